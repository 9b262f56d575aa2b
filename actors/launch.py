"""Spawns the cast, wires it to the loop, and closes all of it again. The only module that knows every actor.

async with launch(config, reward=Short()) as run:
    async for step in run.train():
        print(step.version, step.metrics["reward/mean"])
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge import checkpoint, weights
from forge.actors.cast import Cast
from forge.actors.remote import Learner, ListToList, RemoteCalibrator, Replica
from forge.actors.stock import score_in_stock_vllm
from forge.config import GrpoConfig, to_yaml
from forge.data import Dataset
from forge.errors import ConfigError, ForgeError
from forge.files import scratch_folder
from forge.inputs import check_inputs
from forge.loop import GrpoLoop, evaluate, request_seed
from forge.mesh import Part
from forge.parity import (
    MAX_GAP,
    file_digest,
    folder_bytes,
    other_kernels_bound,
    parity_record,
    unproven,
    write_parity,
)
from forge.quant import Format, Quantization
from forge.quant.calibration import Decision
from forge.recalibration import Recalibration, calibration_metrics, fresh_rows
from forge.reward import Reward
from forge.runfolder import RunFolder
from forge.service import GeneratorPool
from forge.tracker import open_trackers
from forge.types import Completion, Episode, Group, Manifest, SamplingRequest, StepResult

log = logging.getLogger(__name__)

RECENT_BATCHES = 8
"""Batches whose rollouts a calibration can draw from."""
SAVE_TIMEOUT_S = 10.0
"""How long the end of a run waits for a checkpoint that is being written."""
CANARY_ROWS, CANARY_TOKENS = 4, 64
"""Prompts, and of each the first tokens, that a generator with new weights must score as the trainer does."""
FIRST_ROLLOUTS = 64
"""Rollouts sampled to calibrate a static scheme before training."""
SKIPPED = {"trainer/skipped_empty", "trainer/skipped_nonfinite"}
"""Metrics that only a step without an update has."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Evaluation:
    """Greedy accuracy on the held-out rows."""

    version: int
    """Weights it was measured on."""
    mean_reward: float
    """Mean reward over scored episodes; with a 0/1 reward, the accuracy."""
    episodes: tuple[Episode, ...]


class Run:
    """A job whose parts are up. Made by `launch`."""

    def __init__(
        self,
        config: GrpoConfig,
        *,
        folder: RunFolder,
        dataset: Dataset,
        cast: Cast,
        trainer: Part,
        pool: GeneratorPool,
        scorer: ListToList,
        loop: GrpoLoop,
        learner: Learner,
        recalibration: Recalibration | None,
        model: Path,
        started: float,
    ) -> None:
        self.config, self.folder, self.dataset = config, folder, dataset
        self.version = loop.step
        self._resumed_from = loop.step or None
        self._cast, self._trainer, self._pool, self._scorer, self._loop = cast, trainer, pool, scorer, loop
        self._learner, self._recalibration, self._model = learner, recalibration, model
        self._started = started
        self._first_step_s: float | None = None
        self._recent: deque[list[Group]] = deque(maxlen=RECENT_BATCHES)
        self._rows: list[dict[str, float]] = []
        self._evaluations: list[Evaluation] = []
        self._saves = checkpoint.BackgroundSaves(
            checkpoint.Checkpoints(folder.checkpoints, keep=config.checkpoint.keep),
            snapshot=self._snapshot,
            write=lambda partial: trainer.call("write_snapshot", partial),
            warn=log.warning,
        )
        self._trackers = open_trackers(
            folder.path,
            tensorboard=config.tracker.tensorboard,
            wandb=config.tracker.wandb,
            project=config.tracker.wandb_project,
            after_step=loop.step,
        )
        loop.on_batch = self._record_batch
        if recalibration is not None:
            loop.calibration = self._calibrate_if_due

    async def train(self) -> AsyncGenerator[StepResult, None]:
        """Train to `config.steps`, yielding after each step; metrics, rollouts and checkpoints are written on the way.

        Raises:
            PartFailed: a part of the run failed; it is named.
        """
        async with contextlib.aclosing(self._loop.train()) as steps:
            async for step in steps:
                if self._first_step_s is None:
                    self._first_step_s = time.monotonic() - self._started
                self.version = step.version
                every = self.config.eval.every
                metrics = dict(step.metrics) | self._learner.metrics()
                metrics |= {f"checkpoint/{part}_seconds": s for part, s in self._saves.seconds.items()}
                metrics["failures/checkpoints"] = float(self._saves.failed)
                due = every and step.step % every == 0 and step.step < self.config.steps
                if due and (result := await self.evaluate()) is not None:
                    metrics["eval/mean_reward"] = result.mean_reward
                self._rows.append(metrics)
                self.folder.append_metrics({"step": step.step, **metrics})
                self._trackers.log(step.step, metrics)
                if self.config.checkpoint.every and step.step % self.config.checkpoint.every == 0:
                    await self._saves.start()
                yield replace(step, metrics=metrics)
        await self._saves.settle()

    def _record_batch(self, batch: list[Group], version: int) -> None:
        self._recent.append(batch)
        self.folder.append_rollouts(batch, version=version, mask_truncated=self.config.algo.mask_truncated)

    async def evaluate(self) -> Evaluation | None:
        """Greedy completions of the held-out rows on the live weights, scored. None without held-out rows."""
        if not self.dataset.heldout:
            return None
        episodes = await evaluate(
            self.dataset.heldout,
            generate=self._pool.spread,
            scorer=self._scorer,
            max_new_tokens=self.config.sampling.max_new_tokens,
        )
        scored = [e.reward for e in episodes if e.reward is not None]
        result = Evaluation(
            version=self.version,
            mean_reward=sum(scored) / len(scored) if scored else 0.0,
            episodes=tuple(episodes),
        )
        self._evaluations.append(result)
        return result

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample from the live policy."""
        return await self._pool.spread(list(requests))

    def pids(self) -> dict[str, list[int]]:
        """Process ids of every part that is up now, by its name; a trainer has one for each rank."""
        return {part.name: list(part.pids) for part in self._cast.parts}

    async def set(self, *, max_age: int) -> None:
        """Change the async degree of a running job.

        Raises:
            ConfigError: `max_age` is negative.
        """
        problems = list(replace(self.config.async_, max_age=max_age).problems())
        if problems:
            raise ConfigError(problems)
        await self._loop.set_max_age(max_age)

    async def _calibrate_if_due(self, manifest: Manifest) -> tuple[Manifest, dict[str, float]]:
        """The loop's hook: the scales a version goes live with."""
        recalibration = self._recalibration
        assert recalibration is not None
        metrics: dict[str, float] = {}
        if recalibration.due(manifest.version):
            plain = self._learner.plain(manifest.version)
            rows = fresh_rows(self._recent, at_most=2 * self.config.calibration.samples)
            manifest, decision = await recalibration.run(manifest, plain, rows, "rollouts of the last steps")
            metrics = calibration_metrics(decision, recalibration.gate)
        else:
            manifest = recalibration.stamp(manifest)
        return manifest, metrics | {"quant/scale_version": float(manifest.scale_version)}

    async def calibrate(self) -> Decision:
        """Calibrate the live version now, on the newest rollouts; accepted scales go live at once.

        Before the first step, rollouts are sampled for it. Call it between steps.

        Raises:
            ConfigError: the run has no quantization.
        """
        recalibration = self._recalibration
        if recalibration is None:
            raise ConfigError("there is nothing to calibrate: this run has quant.scheme=none")
        async with self._loop.going_live:
            manifest = await self._learner.stage_forms(self.version, unquantized=True)
            rows = fresh_rows(self._recent, at_most=2 * self.config.calibration.samples)
            if not rows:
                rows = await self._sample(self.config.calibration.samples)
            plain = self._learner.plain(self.version)
            manifest, decision = await recalibration.run(manifest, plain, rows, "asked for")
            await self._pool.pull(manifest)
        return decision

    async def _sample(self, count: int) -> list[Episode]:
        """Rollouts of training prompts by the live policy, unscored."""
        prompts = [self.dataset.prompt(i) for i in range(count)]
        c = self.config
        requests = [
            SamplingRequest(
                token_ids=p.token_ids,
                temperature=c.sampling.temperature,
                max_new_tokens=c.sampling.max_new_tokens,
                seed=request_seed(c.seed, i, -1),
            )
            for i, p in enumerate(prompts)
        ]
        found = await self._pool.spread(requests)
        return [
            Episode(prompt=p, completion=f, group=i, member=0)
            for i, (p, f) in enumerate(zip(prompts, found, strict=True))
            if f.token_ids
        ]

    async def start_quantized(self) -> None:
        """Bring the first quantized version to the generators, calibrated if the scheme needs it."""
        recalibration = self._recalibration
        if recalibration is None:
            return
        first = recalibration.quantization.scheme.static and not recalibration.gate.scales
        manifest = await self._learner.stage_forms(self.version, unquantized=first)
        if first:
            plain = self._learner.plain(self.version)
            manifest = await recalibration.start(manifest, plain)
        else:
            manifest = recalibration.stamp(manifest)
        await self._learner.set_scales(manifest.scales)
        await self._learner.publish(manifest)
        await self._pool.pull(manifest)
        if first:
            rows = await self._sample(min(self.config.calibration.samples, FIRST_ROLLOUTS))
            manifest, _ = await recalibration.run(manifest, plain, rows, "rollouts before training")
            await self._pool.pull(manifest)

    async def export(self, target: Path | None = None, format: Format | None = None) -> Path:
        """Write the quantized policy as a Hugging Face folder and prove it: parity.json in it.

        A fresh, stock vLLM loads the folder; its log-probs of pinned texts must equal those of the generators. What
        quantizing cost each layer lies beside it (layers.md, layers.png).

        Args:
            target: by default the run folder's export/.
            format: None takes the one that generators serve.

        Raises:
            ConfigError: the run has no quantization, or the scheme has no such format.
            PartFailed: the exported folder is not what was served; it stays as `target`.unproven.
        """
        recalibration = self._recalibration
        if recalibration is None:
            raise ConfigError("there is nothing to export quantized: this run has quant.scheme=none")
        scheme = recalibration.quantization.scheme
        target = target or self.folder.export
        format = format or scheme.formats[0]
        with unproven(target) as folder:
            await self._export(folder, format, recalibration)
        return target

    async def _export(self, target: Path, format: Format, recalibration: Recalibration) -> None:
        scheme, gate = recalibration.quantization.scheme, recalibration.gate
        async with self._loop.going_live:
            manifest = await self._learner.stage_forms(self.version, unquantized=True)
            rows = await self._learner.save_quantized(target, format, gate.scales)
            plain = self._learner.plain(manifest.version)
            await self._learner.publish(plain)
            await recalibration.calibrator.pull(plain)
            await self._learner.free(plain)
            sequences = await recalibration.pinned_texts()
            served = await self._pool.score(sequences)
        from forge.quant_report import write_layer_report  # draws with matplotlib

        await asyncio.to_thread(write_layer_report, target, rows, title=f"{self.config.model.name}, {scheme.name}")
        unquantized = await recalibration.calibrator.score(sequences)
        stock = await score_in_stock_vllm(
            self.config, target, sequences, logs=self.folder.logs, unquantized=self._model
        )
        same_kernels = format is scheme.formats[0]
        record = parity_record(
            sequences=sequences,
            exported=stock.logprobs,
            served=served,
            unquantized=unquantized,
            bound=MAX_GAP if same_kernels else other_kernels_bound(served, unquantized),
            facts={
                "scheme": recalibration.quantization.label,
                "format": format.value,
                "version": self.version,
                "scale_version": gate.scale_version,
                "calibration_sha256": file_digest(self.folder.calibration),
                "bytes": folder_bytes(target),
                "unquantized_bytes": folder_bytes(self._model),
                "tokens_per_second": stock.tokens_per_second,
                "unquantized_tokens_per_second": stock.unquantized_tokens_per_second,
            },
        )
        write_parity(target, record)

    async def save_hf(self, target: Path | None = None) -> Path:
        """Write the trainer's weights as a Hugging Face folder; by default into the run folder's export/."""
        target = target or self.folder.export
        await self._trainer.call("save_hf", target)
        return target

    async def save_checkpoint(self) -> Path:
        """Write a checkpoint of the trainer's last finished step, which an interrupted run may not have seen yet.

        Raises:
            PartFailed: it cannot be written; earlier ones stay.
        """
        await self._saves.start()
        final = await self._saves.result()
        assert final is not None
        return final

    async def _snapshot(self) -> checkpoint.RunState:
        (version, *_) = await self._trainer.call("snapshot")
        return checkpoint.RunState(
            step=version,
            seed=self.config.seed,
            prompts_per_step=self.config.prompts_per_step,
            order=self._loop.buffer.order(version),
            calibration=self._recalibration.gate.state() if self._recalibration else {},
        )

    async def summary(self, status: str) -> dict[str, Any]:
        """The numbers of the run, as in summary.json."""
        parts = self._cast.parts
        answers = await asyncio.gather(*(p.call("memory") for p in parts), return_exceptions=True)
        memory = {p.name: sum(a) for p, a in zip(parts, answers, strict=True) if not isinstance(a, BaseException)}
        rewards = [r["reward/mean"] for r in self._rows if "reward/mean" in r]
        syncs = [r["weights/sync_seconds"] for r in self._rows if "weights/sync_seconds" in r]
        speeds = [r["rollout/tokens_per_second"] for r in self._rows if "rollout/tokens_per_second" in r]
        first, last = (self._evaluations[0], self._evaluations[-1]) if self._evaluations else (None, None)
        return {
            "status": status,
            "steps": self.version,
            "resumed_from_step": self._resumed_from,
            "steps_without_training": sum(
                "trainer/skipped_empty" in r or "trainer/skipped_nonfinite" in r for r in self._rows
            ),
            "wall_seconds": time.monotonic() - self._started,
            "time_to_first_step_seconds": self._first_step_s,
            "reward_first3": statistics.fmean(rewards[:3]) if rewards else None,
            "reward_last5": statistics.fmean(rewards[-5:]) if rewards else None,
            "heldout_before": first.mean_reward if first else None,
            "heldout_after": last.mean_reward if last and last is not first else None,
            "heldout_rows": len(self.dataset.heldout),
            "tokens_per_second": statistics.fmean(speeds) if speeds else None,
            "max_age_bound": self.config.age_bound,
            "max_age_measured": self._loop.max_age_seen,
            "weight_sync_seconds": statistics.median(syncs) if syncs else None,
            "peak_rss_gib": sum(memory.values()),
            "peak_rss_gib_by_part": memory,
            "failures": {
                "reward": self._loop.failed_episodes,
                "checkpoints": self._saves.failed,
                **{f"{name} restarts": count for name, count in self._cast.restarts.items()},
                **self.folder.statistics(),
                **self._trackers.statistics(),
            },
            "seed": self.config.seed,
            "scheme": self.config.quant.scheme,
            "scale_version": self._recalibration.gate.scale_version if self._recalibration else None,
        }

    async def finish(self, status: str) -> dict[str, Any]:
        """Write summary.json, samples.json and report.html; returns the summary."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._saves.settle(), SAVE_TIMEOUT_S)
        summary = await self.summary(status)
        self.folder.write_summary(summary)
        if len(self._evaluations) > 1:
            before, after = self._evaluations[0], self._evaluations[-1]
            self.folder.write_samples([_sample(b, a) for b, a in zip(before.episodes, after.episodes, strict=True)])
        from forge.report import write_report  # draws with matplotlib, which nothing else here needs

        await asyncio.to_thread(write_report, self.folder.path)
        await asyncio.to_thread(self._trackers.close)
        return summary


def _sample(before: Episode, after: Episode) -> dict[str, Any]:
    return {
        "id": before.prompt.id,
        "question": before.question,
        "answer": before.answer,
        "before": before.text,
        "after": after.text,
        "reward_before": before.reward,
        "reward_after": after.reward,
    }


@contextlib.asynccontextmanager
async def launch(
    config: GrpoConfig,
    *,
    reward: Reward | None = None,
    on_stage: Callable[[str], None] = log.info,
    started: float | None = None,
) -> AsyncIterator[Run]:
    """Check the input, spawn the cast, and close all of it on exit, also on an error.

    Args:
        config: from `load_config`.
        reward: a reward of your own; None takes `config.reward.name`.
        on_stage: told what is being waited for while parts start.
        started: `time.monotonic()` at the start of the command, for the summary's times.

    Raises:
        RefusedInput: config, model folder or data cannot work; raised before any process is started.
        PartFailed: a part could not start, or failed later.
    """
    started = time.monotonic() if started is None else started
    on_stage("checking model and data")
    model, dataset, resume = await asyncio.to_thread(check_inputs, config, reward)
    folder = RunFolder.create(Path(config.out), "grpo", config.name, resume=config.resume != "never")
    if resume is None and config.resume == "auto":
        folder.truncate_after(0)  # a run that ended before its first checkpoint begins anew, under its name
    folder.write_config(to_yaml(config))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(folder.close)
        run = await _spawn_cast(config, reward, model, dataset, resume, folder, stack, on_stage, started)
        status = "failed"
        try:
            yield run
            status = "done"
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            status = "interrupted"
            if config.checkpoint.on_interrupt and run.version:
                await asyncio.shield(run.save_checkpoint())
            raise
        finally:
            on_stage("closing")
            # a run that failed is told about its failure, not about the records that failed with it
            with contextlib.suppress(*(() if status == "done" else (ForgeError, asyncio.CancelledError))):
                await run.finish(status)


async def _spawn_cast(
    config: GrpoConfig,
    reward: Reward | None,
    model: Path,
    dataset: Dataset,
    resume: Path | None,
    folder: RunFolder,
    stack: contextlib.AsyncExitStack,
    on_stage: Callable[[str], None],
    started: float,
) -> Run:
    if dataset.skipped:
        on_stage(
            f"{len(dataset.skipped)} rows skipped, the first: {dataset.skipped[0].id}: {dataset.skipped[0].reason}"
        )
    on_stage("starting processes")
    scratch = stack.enter_context(scratch_folder())
    store = weights.WeightStore(f"weights-{os.getpid()}-{time.time_ns()}", shared=True)
    stack.callback(store.close)
    cast = Cast(config, model, reward, store=store.name, scratch=scratch, logs=folder.logs)
    stack.push_async_callback(cast.close)
    quantization = Quantization.of(config.quant)
    calibrator: Part | None = None
    if quantization is not None:
        calibrator = await cast.calibrator()
        smoothed = scratch / "smoothed"
        if resume is None and quantization.smooths and config.quant.smooth > 0:
            on_stage("smoothing outlier channels")
            await calibrator.call("setup")
            rows = [dataset.prompt(i).token_ids for i in range(config.calibration.batch_size)]
            await calibrator.call_one("smooth", rows, smoothed, config.quant.smooth)
            cast.model = smoothed
    volume, trainer, scorer, *rest = await asyncio.gather(
        cast.weight_store(),
        cast.trainer(),
        cast.reward(),
        *(cast.generator(i) for i in range(config.generator.replicas)),
        *([cast.reference()] if config.algo.kl > 0 else []),
    )
    generators = rest[: config.generator.replicas]
    reference = rest[config.generator.replicas] if config.algo.kl > 0 else None

    on_stage(f"loading {config.model.name}: trainer ranks {config.trainer.ranks}, vLLM engines {len(generators)}")
    await store.open(volume.procs)
    (specs, *_), *_ = await asyncio.gather(
        trainer.call("setup"),
        scorer.call("setup"),
        *(g.call("setup") for g in generators),
        *([calibrator.call("setup")] if calibrator and not smoothed.exists() else []),
        *([reference.call("setup")] if reference else []),
    )
    canary = [dataset.prompt(i).token_ids[:CANARY_TOKENS] for i in range(CANARY_ROWS)]
    learner = Learner(
        trainer, store, specs, quantization, config.generator.dtype.value,
        pinned=[p for p in canary if len(p) > 1] if config.generator.canary_max_gap else (),
    )  # fmt: skip
    pool = GeneratorPool([Replica(g) for g in generators], respawn=cast.respawn, max_restarts=config.max_restarts)
    watch = asyncio.create_task(pool.watch(hang_timeout_s=config.hang_timeout_s))
    stack.push_async_callback(pool.close)
    stack.callback(watch.cancel)
    restored: checkpoint.RunState | None = None
    if resume is not None:
        on_stage(f"restoring {resume}")
        restored = checkpoint.read_state(resume)
        await trainer.call("load_state", resume)
        folder.truncate_after(restored.step)
    remote = ListToList(cast.worker(scorer, cast.reward))
    recalibration: Recalibration | None = None
    if calibrator is not None:
        wanted = config.calibration.prompts
        pinned = list(dataset.heldout[:wanted])
        pinned += [dataset.prompt(i) for i in range(wanted - len(pinned))]
        recalibration = Recalibration(
            config,
            calibrator=RemoteCalibrator(cast.worker(calibrator, cast.calibrator)),
            rollouts=pool,
            scorer=remote,
            quantizer=learner,
            pinned=pinned,
            end_tokens=await calibrator.call_one("end_tokens"),
            record=folder.append_calibration,
        )
        learner.due = recalibration.due
        if restored is not None and restored.calibration:
            recalibration.gate.restore(restored.calibration)
    elif restored is not None:
        manifest = await learner.stage(restored.step)
        await learner.publish(manifest)
        await pool.pull(manifest)
    loop = GrpoLoop(
        config,
        prompts=dataset,
        rollouts=pool,
        scorer=remote,
        learner=learner,
        reference=ListToList(cast.worker(reference, cast.reference)) if reference else None,
        first_step=restored.step if restored else 0,
        order=restored.order if restored else None,
    )
    run = Run(
        config,
        folder=folder,
        dataset=dataset,
        cast=cast,
        trainer=trainer,
        pool=pool,
        scorer=remote,
        loop=loop,
        learner=learner,
        recalibration=recalibration,
        model=cast.model,
        started=started,
    )
    if recalibration is not None:
        on_stage(f"quantizing: {recalibration.quantization.label}")
        await run.start_quantized()
    return run
