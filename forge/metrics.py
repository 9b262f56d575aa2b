"""Metrics as values: how a number is reduced is its type, never a suffix of its name.

    part A ── Mean(total=2, weight=2) ──┐
                                        ├─ merge ── Mean(total=2, weight=3) ── reduce ── {"reward/mean": 0.667}
    part B ── Mean(total=0, weight=1) ──┘

Merging is associative and has a neutral element (the value's default), so parts of any size, order or number
reduce to the same result. Nothing here can stop a run: what has no value is absent from the result, and a value
that is not finite is left out and counted under `metrics/not_finite`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from forge.advantage import EQUAL_REWARDS, NO_VALID_EPISODES
from forge.types import Episode, Group

NOT_FINITE = "metrics/not_finite"
"""How many values of the step were NaN or infinite and therefore left out; absent when there was none."""

_RESERVED_REWARD_NAMES = frozenset({"mean", "std", "group_std", "failed", "count"})
"""Names under `reward/` that belong to the scalar reward; a component called so is filed under `reward/component/`."""


class Metric(Protocol):
    """A value that can be merged with others of its type and read as one number."""

    def merge(self, other: Self) -> Self:
        """The value of both parts together."""

    def value(self) -> float | None:
        """The number, or None where there is none yet."""


def _present(values: Iterable[float | None]) -> list[float]:
    """The values that are numbers: None and NaN say "no value here"."""
    return [float(v) for v in values if v is not None and not math.isnan(v)]


def _sum(values: Iterable[float]) -> float:
    """Exact sum; NaN where there is none (infinities of both signs, overflow), never an error."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


@dataclass(slots=True, frozen=True)
class Mean:
    """Weighted mean.

    Example: Mean.of([1, 1]).merge(Mean.of([0])).value() is 2/3, the mean of the three, not that of two means.
    """

    total: float = 0.0
    """Sum of value times weight."""
    weight: float = 0.0
    """Sum of weights."""
    count: int = 0
    """Number of values that were present."""

    @classmethod
    def of(cls, values: Iterable[float | None], weights: Iterable[float] | None = None) -> Mean:
        """Mean over the values that are present; None and NaN are left out together with their weight."""
        values = list(values)
        pairs = zip(values, [1.0] * len(values) if weights is None else weights, strict=True)
        kept = [(float(v), float(w)) for v, w in pairs if v is not None and not math.isnan(v)]
        return cls(_sum(v * w for v, w in kept), _sum(w for _, w in kept), len(kept))

    def merge(self, other: Mean) -> Mean:
        """Mean of both parts, each with its weight."""
        return Mean(self.total + other.total, self.weight + other.weight, self.count + other.count)

    def value(self) -> float | None:
        """The mean, or None when no value with a positive weight was present."""
        return self.total / self.weight if self.weight > 0 else None


@dataclass(slots=True, frozen=True)
class Std:
    """Standard deviation (divisor n - 1) of all values, from sums that merge.

    Example: Std.of([1, 0, 0, 0]).value() is 0.5.
    """

    count: int = 0
    """Number of values that were present."""
    mean: float = 0.0
    """Their mean."""
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Std:
        """Deviation of the values that are present."""
        kept = _present(values)
        if not kept:
            return cls()
        mean = _sum(kept) / len(kept)
        return cls(len(kept), mean, _sum((v - mean) * (v - mean) for v in kept))

    def merge(self, other: Std) -> Std:
        """Deviation of both parts together (Chan, Golub and LeVeque's update)."""
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return Std(count, self.mean + gap * other.count / count, squares)

    def value(self) -> float | None:
        """The deviation, or None for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None


@dataclass(slots=True, frozen=True)
class Sum:
    """Sum; a sum of nothing is 0."""

    total: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Sum:
        """Sum of the values that are present."""
        return cls(_sum(_present(values)))

    def merge(self, other: Sum) -> Sum:
        """Sum of both parts."""
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        """The sum."""
        return self.total


@dataclass(slots=True, frozen=True)
class Max:
    """Largest value."""

    largest: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Max:
        """Largest of the values that are present."""
        return cls(max(_present(values), default=None))

    def merge(self, other: Max) -> Max:
        """Largest of both parts."""
        return Max.of([self.largest, other.largest])

    def value(self) -> float | None:
        """The largest value, or None when there was none."""
        return self.largest


@dataclass(slots=True, frozen=True)
class Min:
    """Smallest value."""

    smallest: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Min:
        """Smallest of the values that are present."""
        return cls(min(_present(values), default=None))

    def merge(self, other: Min) -> Min:
        """Smallest of both parts."""
        return Min.of([self.smallest, other.smallest])

    def value(self) -> float | None:
        """The smallest value, or None when there was none."""
        return self.smallest


@dataclass(slots=True, frozen=True)
class Last:
    """The newest value: of two merged parts, the right one unless it is empty."""

    latest: float | None = None

    def merge(self, other: Last) -> Last:
        """The newer of both parts."""
        return self if other.latest is None else other

    def value(self) -> float | None:
        """The newest value, or None when there was none."""
        return self.latest


Value = Mean | Std | Sum | Max | Min | Last
"""Any of the reducible values."""


def merge(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Merges mappings name by name; a name that some parts lack is merged over those that have it.

    Raises:
        TypeError: two parts reduce the same name in different ways.
    """
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            known = merged.setdefault(name, value)
            if known is value:
                continue
            if type(known) is not type(value):
                raise TypeError(f"metric {name!r} is {type(known).__name__} in one part and {type(value).__name__}")
            merged[name] = known.merge(value)  # type: ignore[arg-type]  # the line above made them one type
    return merged


def reduce(values: Mapping[str, Value | float | int | None]) -> dict[str, float]:
    """Reads every value as a finite float. A plain number stands for itself.

    What is empty is absent; what is NaN or infinite is absent and counted under `metrics/not_finite`.
    """
    result: dict[str, float] = {}
    not_finite = 0
    for name, value in values.items():
        number = value.value() if isinstance(value, Value) else value
        if number is None:
            continue
        if math.isfinite(number):
            result[name] = float(number)
        else:
            not_finite += 1
    if not_finite:
        result[NOT_FINITE] = result.get(NOT_FINITE, 0.0) + not_finite
    return result


def _scored(episode: Episode) -> bool:
    return episode.failure is None and episode.reward is not None and math.isfinite(episode.reward)


def _reward_metrics(groups: Sequence[Group]) -> dict[str, Value | float]:
    episodes = [e for g in groups for e in g.episodes]
    rewards = [e.reward for e in episodes if _scored(e)]
    within = [Std.of([e.reward for e in g.episodes if _scored(e)]).value() for g in groups]
    metrics: dict[str, Value | float] = {
        "reward/mean": Mean.of(rewards),
        "reward/std": Std.of(rewards),
        "reward/group_std": Mean.of(within),
        "reward/count": len(rewards),
        "reward/failed": len(episodes) - len(rewards),
    }
    for name in sorted({name for e in episodes for name in e.rewards}):
        key = f"reward/component/{name}" if name in _RESERVED_REWARD_NAMES else f"reward/{name}"
        component = Mean.of([e.rewards.get(name) for e in episodes])
        metrics |= {key: component, f"{key}/count": component.count}
    return metrics


def _age_metrics(groups: Sequence[Group], version: int) -> dict[str, Value | float]:
    """Ages of the groups that sampled at least one token: without tokens there is no version to be old."""
    ages = [version - g.min_version for g in groups if any(e.num_response_tokens for e in g.episodes)]
    counts = Counter(ages)
    buckets = range(min(0, *ages), max(ages) + 1) if ages else range(0)
    histogram: dict[str, Value | float] = {f"age/{age}": counts[age] for age in buckets}
    return {"age/mean": Mean.of(ages), "age/max": Max.of(ages), **histogram}


def rollout_metrics(groups: Sequence[Group], *, version: int, group_size: int) -> dict[str, float]:
    """What the groups of one step say about rollouts and rewards.

    Args:
        groups: the groups consumed by the step, the dropped ones included.
        version: weight version that the step trains; the age of a group is this minus its oldest token's version.
        group_size: completions a complete group has.

    Returns:
        reward/mean, reward/std over all scored episodes, reward/group_std (mean deviation within a group: what the
        advantage sees), reward/count and reward/failed (episodes with and without a usable reward),
        reward/<component> and reward/<component>/count (mean over the episodes that have it, and how many do);
        completion/tokens_mean, completion/tokens_max, completion/truncated_share; tokens/completion, tokens/prompt
        (sums over episodes); group/count, group/kept, group/incomplete, group/dropped_<reason>;
        age/mean, age/max and age/0, age/1 … (groups of that age).
    """
    episodes = [e for g in groups for e in g.episodes]
    lengths = [e.num_response_tokens for e in episodes]
    dropped = Counter(g.dropped for g in groups if g.dropped is not None)
    reasons = sorted({EQUAL_REWARDS, NO_VALID_EPISODES, *dropped})
    return reduce(
        _reward_metrics(groups)
        | {
            "completion/tokens_mean": Mean.of(lengths),
            "completion/tokens_max": Max.of(lengths),
            "completion/truncated_share": Mean.of([float(e.truncated) for e in episodes]),
            "tokens/completion": sum(lengths),
            "tokens/prompt": sum(len(e.prompt.token_ids) for e in episodes),
            "group/count": len(groups),
            "group/kept": len(groups) - dropped.total(),
            "group/incomplete": sum(len(g.episodes) < group_size for g in groups),
        }
        | {f"group/dropped_{reason}": dropped[reason] for reason in reasons}
        | _age_metrics(groups, version)
    )
