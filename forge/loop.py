"""The GRPO loop: coroutines over protocols. It knows no vendor, no actor and no file.

      admit ─► rollout ─► score ─► advantage ─► buffer ─► batch ─► train ─► publish ─► pull ─┐
        ▲      (a task for each group, many at once)     (one task, in order of steps)      │
        └────────────────────────────── slots given back when live ◄─────────────────────────┘

`_produce` admits groups as slots free up and starts a task for each; `train` takes batches in order. With
`async.max_age=0` the two alternate; above 0 generation runs ahead, and publishing and pulling a version run beside
the next forward and backward pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from forge.advantage import with_advantages
from forge.buffer import DataOrder, GroupBuffer
from forge.config import GrpoConfig
from forge.errors import Stalled, TooManyFailures
from forge.metrics import rollout_metrics
from forge.types import Completion, Episode, Group, Manifest, Prompt, SamplingRequest, StepResult, StepStats

WATCH_INTERVAL_S = 1.0
"""How often the watchdog looks whether anything moved."""


class Prompts(Protocol):
    """The data order: a pure function of the index, so it needs no state of its own."""

    def prompt(self, index: int) -> Prompt: ...


class Rollouts(Protocol):
    """Samples completions on live weights."""

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]: ...
    async def pull(self, manifest: Manifest) -> dict[str, float]: ...
    async def statistics(self) -> dict[str, float]: ...


class Scorer(Protocol):
    """Rewards episodes; a reward's fault comes back on the episode, never as an exception."""

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]: ...


class Learner(Protocol):
    """Trains and publishes. `publish` may run beside the next `step`, `stage` may not."""

    async def step(self, groups: Sequence[Group]) -> StepStats: ...
    async def stage(self, version: int) -> Manifest: ...
    async def publish(self, manifest: Manifest) -> None: ...
    async def free_before(self, version: int) -> None: ...


class Reference(Protocol):
    """Log-probs under the initial policy."""

    async def annotate(self, episodes: Sequence[Episode]) -> list[Episode]: ...


def request_seed(seed: int, group: int, member: int) -> int:
    """Seed of one completion: the same in every run of a seed, different for every member of every group."""
    import hashlib

    digest = hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Calibration(Protocol):
    """Decides with which activation scales a version goes live."""

    async def __call__(self, manifest: Manifest) -> tuple[Manifest, dict[str, float]]: ...


class GrpoLoop:
    """One GRPO run over the parts it is given.

    Args:
        calibration: None without quantization.
        first_step: steps already taken (above 0 after a resume); also the version of the live weights.
        order: where the data goes on after a resume.
        on_batch: called with each trained batch and the version it trained.
    """

    def __init__(
        self,
        config: GrpoConfig,
        *,
        prompts: Prompts,
        rollouts: Rollouts,
        scorer: Scorer,
        learner: Learner,
        reference: Reference | None = None,
        calibration: Calibration | None = None,
        first_step: int = 0,
        order: DataOrder | None = None,
        on_batch: Callable[[list[Group], int], None] | None = None,
    ) -> None:
        self.config = config
        self.prompts, self.rollouts, self.scorer = prompts, rollouts, scorer
        self.learner, self.reference, self.calibration = learner, reference, calibration
        self.step = first_step
        self.on_batch = on_batch
        self.max_age_seen = 0
        self.failed_episodes = 0
        self.buffer = GroupBuffer(config.async_, prompts_per_step=config.prompts_per_step, order=order)
        self._moved = time.monotonic()
        self.going_live = asyncio.Lock()
        """Held while a version goes live; whoever changes what is live takes it."""
        self._paused = False
        self._doing = {"admission": "not started", "training": "not started", "weights": "idle"}
        self._rollout_tasks: set[asyncio.Task[None]] = set()

    async def train(self) -> AsyncGenerator[StepResult, None]:
        """Train to `config.steps`, yielding after each step.

        Consumes batches of the buffer; waits for P finished groups; unblocked by rollouts; produces versions.
        Closing it early cancels rollouts and lets a publish in progress go; no weights are half-swapped.

        Raises:
            PartFailed: a part of the run failed.
        """
        background: asyncio.Queue[BaseException] = asyncio.Queue()
        self._moved = time.monotonic()
        producer = self._spawn(self._produce(background), background)
        watchdog = self._spawn(self._watch(), background)
        failure = asyncio.ensure_future(background.get())
        syncing: asyncio.Task[dict[str, float]] | None = None
        try:
            while self.step < self.config.steps:
                start = time.perf_counter()
                before = await self.rollouts.statistics()
                self._doing["training"] = "waiting for a batch"
                batch = await _first(self.buffer.take(self.step), failure)
                waited = time.perf_counter()
                metrics = rollout_metrics(batch, version=self.step, group_size=self.config.group_size)
                self._check_failures(batch)
                self._doing["training"] = f"training step {self.step + 1}"
                stats = await _first(self.learner.step(batch), failure)
                trained = time.perf_counter()
                if self.on_batch is not None:
                    self.on_batch(batch, self.step)
                self.step = stats.version
                sync: dict[str, float] = {}
                if syncing is not None:  # the version before this one; its shards must be out before new ones come
                    self._doing["training"] = "waiting for the previous version to go live"
                    sync = await _first(syncing, failure)
                manifest = await _first(self.learner.stage(self.step), failure)
                syncing = asyncio.create_task(self._go_live(manifest, batch))
                if self.config.async_.max_age == 0 or self.step == self.config.steps:
                    sync = await _first(syncing, failure)
                    syncing = None
                after = await self.rollouts.statistics()
                wall = time.perf_counter() - start
                self._moved = time.monotonic()
                tokens = after["tokens"] - before["tokens"]
                metrics |= stats.metrics
                metrics |= sync
                metrics |= self.buffer.statistics()
                metrics |= {
                    "weights/changed_share": manifest.changed_share,
                    "weights/bytes": float(manifest.num_bytes),
                    "rollout/tokens_per_second": tokens / wall,
                    "idle/trainer_share": (waited - start) / wall,
                    "idle/generator_share": max(
                        0.0, 1 - (after["busy_seconds"] - before["busy_seconds"]) / wall / after["replicas"]
                    ),
                    "time/step_seconds": wall,
                    "time/wait_batch_seconds": waited - start,
                    "time/train_seconds": trained - waited,
                    "time/generate_seconds": (after["busy_seconds"] - before["busy_seconds"]) / after["replicas"],
                    "failures/total": float(self.failed_episodes),
                    "failures/generator_restarts": after.get("restarts", 0.0),
                    "failures/reissued_requests": after.get("reissued", 0.0),
                    "rollout/replicas": after["replicas"],
                }
                self.max_age_seen = max(self.max_age_seen, int(metrics.get("age/max", 0)))
                self._paused = True  # the caller may take its time; the watchdog must not count it
                yield StepResult(step=self.step, version=self.step, metrics=metrics)
                self._paused, self._moved = False, time.monotonic()
        finally:
            tasks = [producer, watchdog, failure, *self._rollout_tasks, *([syncing] if syncing else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def set_max_age(self, max_age: int) -> None:
        """Change the async degree while running."""
        await self.buffer.set_max_age(max_age)

    async def rollout(self, prompt: Prompt, *, group: int) -> Group:
        """Sample, score and compare one group. Its reward and reference calls overlap other groups' sampling."""
        c = self.config
        requests = [
            SamplingRequest(
                token_ids=prompt.token_ids,
                temperature=c.sampling.temperature,
                max_new_tokens=c.sampling.max_new_tokens,
                seed=request_seed(c.seed, group, member),
            )
            for member in range(c.group_size)
        ]
        completions = await self.rollouts.generate(requests)
        episodes = [
            Episode(prompt=prompt, completion=completion, group=group, member=member)
            for member, completion in enumerate(completions)
        ]
        episodes = await self.scorer.score(episodes)
        if self.reference is not None:
            episodes = await self.reference.annotate(episodes)
        whole = Group(index=group, episodes=tuple(episodes))
        return with_advantages(whole, scale_by_std=c.algo.scale_by_std, keep_equal=c.algo.kl > 0)

    async def _produce(self, background: asyncio.Queue[BaseException]) -> None:
        """Admit groups for ever.

        Consumes slots; waits for a free one; unblocked by `buffer.release`; produces rollout tasks.
        """
        last = self.config.steps * self.config.prompts_per_step
        while True:
            self._doing["admission"] = "waiting for a free slot"
            index = await self.buffer.admit()
            if index >= last and self.config.async_.window == 0:
                return  # nothing would train it; its slot stays taken, which stops admission
            self._doing["admission"] = f"admitted group {index}"
            task = self._spawn(self._one(index), background)
            self._rollout_tasks.add(task)
            task.add_done_callback(self._rollout_tasks.discard)

    async def _one(self, index: int) -> None:
        group = await self.rollout(self.prompts.prompt(index), group=index)
        await self.buffer.put(group)
        self._moved = time.monotonic()

    async def _go_live(self, manifest: Manifest, batch: list[Group]) -> dict[str, float]:
        async with self.going_live:
            return await self._swap(manifest, batch)

    async def _swap(self, manifest: Manifest, batch: list[Group]) -> dict[str, float]:
        """Publish a version, bring it to every generator, give the batch's slots back, free older versions."""
        calibrated: dict[str, float] = {}
        if self.calibration is not None:
            self._doing["weights"] = f"calibrating version {manifest.version}"
            manifest, calibrated = await self.calibration(manifest)
        start = time.perf_counter()
        self._doing["weights"] = f"publishing version {manifest.version}"
        await self.learner.publish(manifest)
        published = time.perf_counter()
        self._doing["weights"] = f"generators pull version {manifest.version}"
        seconds = await self.rollouts.pull(manifest)
        live = time.perf_counter()
        await self.buffer.release(batch)
        await self.learner.free_before(manifest.version)
        self._doing["weights"] = "idle"
        self._moved = time.monotonic()
        return calibrated | {
            "weights/sync_seconds": live - start,
            "time/publish_seconds": published - start,
            "time/pull_seconds": live - published,
            "weights/fetch_seconds": seconds.get("fetch", 0.0),
            "weights/swap_seconds": seconds.get("swap", 0.0),
            **{f"weights/{key}": seconds[key] for key in ("canary_seconds", "canary_gap") if key in seconds},
        }

    def _check_failures(self, batch: Sequence[Group]) -> None:
        episodes = [e for g in batch for e in g.episodes]
        failed = [e for e in episodes if e.failure is not None]
        self.failed_episodes += len(failed)
        if episodes and len(failed) / len(episodes) > self.config.reward.max_failed_share:
            raise TooManyFailures(
                "reward",
                f"scoring failed for {len(failed)} of {len(episodes)} episodes of step {self.step + 1}, more than "
                f"reward.max_failed_share={self.config.reward.max_failed_share}; the first: {failed[0].failure}",
            )

    async def _watch(self) -> None:
        """End the run when nothing moved for `stall_timeout_s`, saying what each part waits for."""
        limit = self.config.stall_timeout_s
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, limit / 4))
            if not self._paused and time.monotonic() - self._moved > limit:
                waits = "; ".join(f"{who}: {what}" for who, what in self._doing.items())
                raise Stalled(
                    "run",
                    f"nothing moved for stall_timeout_s={limit} seconds. {waits}; {len(self._rollout_tasks)} groups "
                    f"are being sampled or scored; {self.buffer.waiting_for()}",
                )

    @staticmethod
    def _spawn(work, background: asyncio.Queue[BaseException]) -> asyncio.Task[None]:  # type: ignore[no-untyped-def]
        """A task whose failure ends the run instead of being lost."""
        task: asyncio.Task[None] = asyncio.create_task(work)

        def done(finished: asyncio.Task[None]) -> None:
            if not finished.cancelled() and (error := finished.exception()) is not None:
                background.put_nowait(error)

        task.add_done_callback(done)
        return task


async def _first(work, failure: asyncio.Future[BaseException]):  # type: ignore[no-untyped-def]
    """Await `work`, unless a background task fails first: then cancel it and raise that failure."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise failure.result()


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    generate: Callable[[list[SamplingRequest]], object],
    scorer: Scorer,
    max_new_tokens: int,
) -> list[Episode]:
    """Greedy completions of held-out prompts, scored; one episode each, in order."""
    requests = [SamplingRequest(token_ids=p.token_ids, temperature=0.0, max_new_tokens=max_new_tokens) for p in prompts]
    completions: list[Completion] = await generate(requests)  # type: ignore[misc]
    episodes = [
        Episode(prompt=p, completion=c, group=i, member=0)
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    return await scorer.score(episodes)
