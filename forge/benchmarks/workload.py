"""What the benchmarks let engines do."""

from __future__ import annotations

from pathlib import Path

from forge.config import GrpoConfig
from forge.fetch import fetch
from forge.types import Completion, Episode, FinishReason, Group, Prompt, SamplingRequest

RUNS = 5
"""Measurements of each side, of which the median counts."""


def model_folder(config: GrpoConfig) -> Path:
    """The configured model's files."""
    return Path(config.model.path) if config.model.path else fetch(config.model.name)


def made_up_requests(config: GrpoConfig) -> list[SamplingRequest]:
    """A step's episodes with made-up prompts of 40 tokens and completions of 64."""
    return [
        SamplingRequest(
            token_ids=tuple((31 * i + 7 * j) % 500 + 100 for j in range(40)),
            temperature=1.0,
            max_new_tokens=64,
            seed=i,
            ignore_eos=True,
        )
        for i in range(config.episodes_per_step)
    ]


def made_up_groups(config: GrpoConfig, *, prompt_tokens: int, completion_tokens: int) -> list[Group]:
    """A step's groups; every other completion of a group is better than the mean, the others worse."""

    def tokens(seed: int, count: int) -> tuple[int, ...]:
        return tuple((31 * seed + 7 * j) % 500 + 100 for j in range(count))

    def episode(group: int, member: int) -> Episode:
        return Episode(
            prompt=Prompt(id="", question="", answer="", token_ids=tokens(group, prompt_tokens)),
            completion=Completion(
                token_ids=tokens(group * config.group_size + member, completion_tokens),
                logprobs=(-5.0,) * completion_tokens,
                versions=(0,) * completion_tokens,
                text="",
                finish_reason=FinishReason.STOP,
            ),
            group=group,
            member=member,
            reward=float(member % 2),
            advantage=1.0 if member % 2 else -1.0,
        )

    return [
        Group(index=g, episodes=tuple(episode(g, m) for m in range(config.group_size)))
        for g in range(config.prompts_per_step)
    ]
