"""Packing against sequences laid out by hand."""

import math
from dataclasses import replace

import pytest

from forge.advantage import with_advantages
from forge.batch import PROMPT, pack, split, trained_episodes, trained_tokens
from forge.testing import fake_group
from forge.types import Completion, Episode, FinishReason, Group, Prompt


def episode(group: int, member: int, prompt: tuple[int, ...], tokens: tuple[int, ...], **kw: object) -> Episode:
    completion = Completion(
        token_ids=tokens,
        logprobs=kw.pop("logprobs", tuple(-0.1 * (i + 1) for i in range(len(tokens)))),  # type: ignore[arg-type]
        versions=(0,) * len(tokens),
        text="",
        finish_reason=kw.pop("finish", FinishReason.STOP),  # type: ignore[arg-type]
    )
    p = Prompt(id="p", question="", answer="", token_ids=prompt)
    return Episode(prompt=p, completion=completion, group=group, member=member, advantage=kw.pop("advantage", 0.0))  # type: ignore[arg-type]


def test_a_group_shares_one_copy_of_its_prompt() -> None:
    p = pack([episode(5, 0, (10, 11, 12), (20, 21)), episode(5, 1, (10, 11, 12), (30, 31, 2))])
    assert p.token_ids.tolist() == [10, 11, 12, 20, 30, 31]  # a completion's last token predicts nothing
    assert p.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert p.members.tolist() == [PROMPT, PROMPT, PROMPT, 0, 1, 1]
    assert p.source.tolist() == [2, 3, 2, 4, 5]  # both first tokens are predicted by the prompt's last
    assert p.target.tolist() == [20, 21, 30, 31, 2]


def test_the_final_end_token_is_trained_and_the_prompt_never() -> None:
    p = pack([episode(0, 0, (10, 11), (20, 2))])
    assert p.target.tolist() == [20, 2]
    assert not set(p.target.tolist()) & {10, 11}


def test_a_completion_sees_its_prompt_and_its_own_past_only() -> None:
    p = pack([episode(0, 0, (1, 2), (3, 4, 5)), episode(0, 1, (1, 2), (6, 7, 8))])
    visible = p.visible(*p.blocks()[0]).int().tolist()
    #        p0 p1 a0 a1 b0 b1
    assert visible == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_groups_are_separate_blocks() -> None:
    p = pack([episode(0, 0, (1, 2), (3, 4)), episode(1, 0, (5,), (6, 7))])
    assert p.blocks() == [(0, 3), (3, 5)]


def test_a_token_without_a_sampler_logprob_is_fed_but_not_trained() -> None:
    e = episode(0, 0, (1,), (2, 3, 4), logprobs=(-0.5, math.nan, -0.25))
    p = pack([e])
    assert p.token_ids.tolist() == [1, 2, 3]
    assert p.target.tolist() == [2, 4]
    assert p.source.tolist() == [0, 2]
    assert trained_tokens([e]) == 2


def test_no_episodes_make_a_pack_that_trains_nothing() -> None:
    p = pack([])
    assert len(p.token_ids) == 1
    assert len(p.target) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 8, 64])
def test_every_episode_is_in_one_micro_batch_and_rounds_are_equal(ranks: int, micro_batch: int) -> None:
    episodes = [episode(g, m, (1,) * (g + 1), (2,) * (m + 1)) for g in range(5) for m in range(3)]
    parts = split(episodes, ranks=ranks, micro_batch=micro_batch)
    assert len(parts) == ranks
    assert len({len(rounds) for rounds in parts}) == 1
    found = sorted((e.group, e.member) for rounds in parts for micro in rounds for e in micro)
    assert found == sorted((e.group, e.member) for e in episodes)
    assert all(len(micro) <= micro_batch for rounds in parts for micro in rounds)


def test_few_episodes_are_spread_over_all_ranks() -> None:
    parts = split([episode(0, m, (1,), (2,)) for m in range(4)], ranks=2, micro_batch=16)
    assert [[len(m) for m in rounds] for rounds in parts] == [[2], [2]]


def test_dropped_groups_failed_and_empty_episodes_are_not_trained() -> None:
    good = with_advantages(fake_group(0, [1, 0]), scale_by_std=True, keep_equal=False)
    equal = with_advantages(fake_group(1, [1, 1]), scale_by_std=True, keep_equal=False)
    failed = replace(good.episodes[0], failure="timeout")
    assert len(trained_episodes([good, equal], mask_truncated=False)) == 2
    assert trained_episodes([replace(good, episodes=(failed, good.episodes[1]))], mask_truncated=False) == [
        good.episodes[1]
    ]


def test_masking_truncated_completions_takes_them_out_of_the_denominator_too() -> None:
    cut = episode(0, 0, (1,), (2, 3, 4), finish=FinishReason.LENGTH)
    whole = episode(0, 1, (1,), (2, 3))
    group = Group(index=0, episodes=(cut, whole))
    kept = trained_episodes([group], mask_truncated=True)
    assert kept == [whole]
    assert trained_tokens(kept) == 2
