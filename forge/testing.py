"""Fakes for coordination logic: parts that keep the loop's protocols and do no work.

They have no model; nothing that concerns weights or numbers is tested with them. Times are in seconds of the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge.types import (
    ActivationScale,
    Completion,
    Episode,
    FinishReason,
    Group,
    Manifest,
    Prompt,
    SamplingRequest,
    StepStats,
)


def fake_prompt(index: int, *, num_tokens: int = 3) -> Prompt:
    """A prompt whose question says its index."""
    return Prompt(id=f"fake:{index}", question=f"q{index}", answer=str(index), token_ids=tuple(range(num_tokens)))


def fake_completion(version: int, *, num_tokens: int = 2, replica: int = 0) -> Completion:
    """A completion of one version."""
    return Completion(
        token_ids=tuple(range(num_tokens)),
        logprobs=(-1.0,) * num_tokens,
        versions=(version,) * num_tokens,
        text="text",
        finish_reason=FinishReason.STOP,
        replica=replica,
    )


def fake_group(index: int, rewards: Sequence[float], *, version: int = 0) -> Group:
    """A scored group of one version."""
    prompt = fake_prompt(index)
    return Group(
        index=index,
        episodes=tuple(
            Episode(prompt=prompt, completion=fake_completion(version), group=index, member=m, reward=r)
            for m, r in enumerate(rewards)
        ),
    )


@dataclass
class FakePrompts:
    """Prompts by index."""

    def prompt(self, index: int) -> Prompt:
        return fake_prompt(index)


@dataclass
class FakeRollouts:
    """Completes after `seconds(call)`; tokens carry the version that was live when the call began.

    With `at_once`, only so many calls run at a time, as an engine's throughput has a limit.
    """

    seconds: Callable[[int], float] = lambda call: 0.0
    at_once: int = 2**31
    name: str = "fake"
    version: int = 0
    calls: int = 0
    busy: float = 0.0
    pulled: list[int] = field(default_factory=list)
    pull_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._engine = asyncio.Semaphore(self.at_once)
        self._running = 0

    def kill(self) -> None:
        raise AssertionError("a fake does not hang")

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        async with self._engine:
            call, version = self.calls, self.version
            self.calls += 1
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
            try:
                await asyncio.sleep(self.seconds(call))
            finally:
                self._running -= 1
                if not self._running:
                    self.busy += time.perf_counter() - self._since
        return [fake_completion(version) for _ in requests]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(s) - 1) for s in sequences]

    async def pull(self, manifest: Manifest) -> dict[str, float]:
        await asyncio.sleep(self.pull_seconds)
        self.version = manifest.version
        self.pulled.append(manifest.version)
        return {"fetch": 0.0, "swap": 0.0}

    async def statistics(self) -> dict[str, float]:
        return {"tokens": 2.0 * self.calls, "busy_seconds": self.busy, "replicas": 1.0}


@dataclass
class FakeScorer:
    """Rewards by `reward(episode)`; an exception there becomes the episode's failure."""

    reward: Callable[[Episode], float] = lambda e: float(e.member % 2)

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        scored: list[Episode] = []
        for e in episodes:
            try:
                scored.append(replace(e, reward=self.reward(e)))
            except ValueError as error:
                scored.append(replace(e, failure=str(error)))
        return scored


@dataclass
class FakeLearner:
    """Takes `seconds` a step and remembers what it trained."""

    seconds: float = 0.0
    version: int = 0
    batches: list[list[Group]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    fail_at: int | None = None

    async def step(self, groups: Sequence[Group]) -> StepStats:
        await asyncio.sleep(self.seconds)
        if self.version == self.fail_at:
            raise RuntimeError("learner fails here")
        self.version += 1
        self.batches.append(list(groups))
        return StepStats(version=self.version, metrics={"loss/total": 0.0})

    async def stage(self, version: int) -> Manifest:
        return Manifest(version=version, tensors={}, num_bytes=0, changed_share=1.0)

    async def publish(self, manifest: Manifest) -> None:
        self.published.append(manifest.version)

    async def free_before(self, version: int) -> None:
        self.published = [v for v in self.published if v >= version]


@dataclass
class FakeCalibrator:
    """Policies as functions of a token prefix: `quantized(prefix, scales)` and `unquantized(prefix)` give a token."""

    unquantized: Callable[[tuple[int, ...]], int]
    quantized: Callable[[tuple[int, ...]], int]
    verified: int = 0

    async def verify(
        self, episodes: Sequence[Episode], scales: Mapping[str, ActivationScale] | None
    ) -> list[FakeVerified]:
        policy = self.unquantized if scales is None else self.quantized
        self.verified += 1
        found = []
        for e in episodes:
            prefix = e.prompt.token_ids
            for k, token in enumerate(e.completion.token_ids):
                if (own := policy(prefix)) != token:
                    found.append(FakeVerified(agreed=k, token=own))
                    break
                prefix += (token,)
            else:
                found.append(FakeVerified(agreed=len(e.completion.token_ids), token=None))
        return found


@dataclass
class FakeVerified:
    """Answer of `FakeCalibrator`."""

    agreed: int
    token: int | None


@dataclass
class FakeGreedy:
    """Generators that decode greedily by a function of the prefix, ending with token 0."""

    policy: Callable[[tuple[int, ...]], int]

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        found = []
        for r in requests:
            ids: tuple[int, ...] = ()
            while len(ids) < r.max_new_tokens and (not ids or ids[-1] != 0):
                ids += (self.policy(r.token_ids + ids),)
            found.append(replace(fake_completion(0), token_ids=ids))
        return found
