"""Derived values of the messages."""

from dataclasses import FrozenInstanceError, replace

import pytest

from forge.testing import fake_completion, fake_group
from forge.types import FinishReason, Group


def test_the_versions_of_a_group_span_all_its_tokens() -> None:
    group = fake_group(0, [0, 1], version=3)
    late = replace(group.episodes[1], completion=replace(fake_completion(3, num_tokens=3), versions=(3, 4, 5)))
    group = replace(group, episodes=(group.episodes[0], late))
    assert (group.min_version, group.max_version) == (3, 5)


def test_a_group_without_tokens_has_version_zero() -> None:
    assert Group(index=0, episodes=()).min_version == 0


def test_an_episode_reads_through_to_prompt_and_completion() -> None:
    e = fake_group(4, [1.0]).episodes[0]
    assert (e.question, e.answer, e.text, e.num_response_tokens, e.truncated) == ("q4", "4", "text", 2, False)
    cut = replace(e, completion=replace(e.completion, finish_reason=FinishReason.LENGTH))
    assert cut.truncated


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        fake_group(0, [1.0]).index = 3  # type: ignore[misc]
