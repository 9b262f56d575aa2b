"""Every message that passes between parts of Forge, in the order of the data.

    Prompt ── Completion ── Episode ── Group ── (trainer) ── StepStats

All are frozen: a stage that adds something makes a new one with `dataclasses.replace`.
The token ids that the engine sampled are the ones that are trained; nothing is tokenized twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model emitted one of its end tokens; that token is the last of `token_ids` and is trained."""
    LENGTH = "length"
    """Cut off by `sampling.max_new_tokens` or the context length."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenized.

    Example: Prompt(id="sums.jsonl:17", question="41 + 27 =", answer="68", token_ids=(1, 9690, …))
    """

    id: str
    """Where the row comes from: "<file name>:<1-based line or row>", or "<task>:<0-based index>"."""
    question: str
    """The user's text as it stands in the dataset."""
    answer: str
    """The reference answer as text ("" where the reward needs none)."""
    token_ids: tuple[int, ...]
    """The templated prompt, exactly as the engine receives it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns (for a reasoning-gym task: its entry), for rewards that want them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingRequest:
    """One completion to sample."""

    token_ids: tuple[int, ...]
    """The templated prompt."""
    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    seed: int | None = None
    """Seed of this request alone; members of a group get different ones."""
    ignore_eos: bool = False
    """Sample to the length limit whatever is sampled; for measurements only."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """What one request sampled. The three tuples have the same length, one entry a token."""

    token_ids: tuple[int, ...]
    """Sampled ids, the final end token included."""
    logprobs: tuple[float, ...]
    """Natural log-probability under the policy that sampled, temperature included."""
    versions: tuple[int, ...]
    """Weight version that sampled each token."""
    text: str
    """Decoded `token_ids` without special tokens."""
    finish_reason: FinishReason
    replica: int = 0
    """Generator replica that served the request."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Episode:
    """A prompt, one completion of it and, after the reward actor, its reward.

    Example: `Episode(prompt=p, completion=c, group=12, member=3).text` is the completion's text.
    """

    prompt: Prompt
    completion: Completion
    group: int
    """Number of the group in order of admission, from 0."""
    member: int
    """Place within the group, from 0."""
    reward: float | None = None
    """Scalar reward; None before scoring and when scoring failed (then `failure` says why)."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward by component, for the record."""
    failure: str | None = None
    """Why scoring failed; a failed episode is counted, excluded from its group's statistics and not trained."""
    advantage: float = 0.0
    """Group-relative advantage, set by the advantage stage."""
    reference_logprobs: tuple[float, ...] = ()
    """Log-prob of each sampled token under the initial policy, from the reference actor; empty without KL."""

    @property
    def text(self) -> str:
        """The completion's text."""
        return self.completion.text

    @property
    def question(self) -> str:
        """The user's text."""
        return self.prompt.question

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.prompt.answer

    @property
    def num_response_tokens(self) -> int:
        """Number of sampled tokens, the end token included."""
        return len(self.completion.token_ids)

    @property
    def truncated(self) -> bool:
        """True when the completion was cut off by a length limit."""
        return self.completion.finish_reason is FinishReason.LENGTH


@dataclass(kw_only=True, slots=True, frozen=True)
class Group:
    """`group_size` episodes of one prompt: the unit of admission, advantage, age and training."""

    index: int
    """Number in order of admission, from 0; its prompt is the index-th of the data order."""
    episodes: tuple[Episode, ...]
    dropped: str | None = None
    """Why the group carries no gradient ("equal_rewards", "no_valid_episodes"); None when it is trained."""

    @property
    def min_version(self) -> int:
        """Oldest weight version that sampled any token of the group."""
        return min((v for e in self.episodes for v in e.completion.versions), default=0)

    @property
    def max_version(self) -> int:
        """Newest weight version that sampled any token of the group."""
        return max((v for e in self.episodes for v in e.completion.versions), default=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class StepStats:
    """What one optimizer step reports, equal on every rank."""

    version: int
    """Version of the weights after the step: the number of steps taken."""
    metrics: Mapping[str, float]
    """Named scalars ("loss/policy", "trainer/grad_norm" …), already reduced over ranks and micro-batches."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepResult:
    """What `run.train()` yields after each step."""

    step: int
    """1-based number of the step."""
    version: int
    """Weight version after the step (equal to `step`)."""
    metrics: Mapping[str, float]
    """All metrics of the step, as written to metrics.jsonl."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """Shape and dtype of one published tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Torch name without the prefix, for example "bfloat16"."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ActivationScale:
    """Static quantization of one layer's input: x is about (code - zero_point) * scale."""

    scale: float
    """Above 0; exactly a float32."""
    zero_point: int
    """Code of the value 0, in [-128, 127]."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Staged:
    """What one rank froze for publishing."""

    changed: int
    """Elements whose published value differs from the last version's."""
    total: int
    changed_codes: int
    """Of quantized weights alone."""
    total_codes: int
    digests: Mapping[str, Mapping[str, int]]
    """forge.digest of this rank's shards, by the manifest's scheme and tensor name."""
    canary: tuple[tuple[float, ...], ...] = ()
    """Log-probs of the pinned tokens, equal on every rank; see `Canary`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Canary:
    """Pinned tokens and what the trainer makes of them, for a reader to compare with what it makes of them."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Of every token of each sequence but the first, in nats at temperature 1, as the published policy computes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """What a published version holds. A reader loads all of it or nothing."""

    version: int
    tensors: Mapping[str, TensorSpec]
    """By Hugging Face name; a tied head is listed under the embedding's name alone."""
    num_bytes: int
    """Total size as published."""
    changed_share: float
    """Share of all elements whose published value differs from the previous version's (1.0 for the first). Of a
    quantized weight, its integer code is the value."""
    scheme: str = ""
    """Quantization the tensors are in (its label); empty for unquantized ones."""
    scale_version: int = 0
    """Counts the accepted sets of activation scales of a static scheme; 0 without."""
    scales: Mapping[str, ActivationScale] = field(default_factory=dict)
    """Activation scales by Hugging Face module name; they travel with the weights, so both go live at once."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """forge.digest of every tensor, made by its writers; a reader that finds another refuses the version."""
    canary: Canary | None = None
    """None for a form that no generator serves, and before a static scheme has its first scales."""

    @property
    def key(self) -> str:
        """What the version's tensors are filed under in the weight store."""
        return f"{self.version}:{self.scheme}"
