"""The calibration loop of a run: fresh rollouts in, a decision out, and the manifest that goes live.

    version v staged ─► calibrator pulls v unquantized ─► observes rollouts, proposes scales
                        compares quantized and unquantized policy on pinned prompts
                     ─► gate accepts, rejects, rolls back or switches to QAT ─► manifest v with the live scales

Greedy completions of the unquantized policy need no second engine: the generators, which serve the quantized one,
draft them, the calibrator checks a whole draft in one forward pass, and only what follows the first disagreement is
drafted again (speculative decoding, arXiv 2211.17192, with greedy acceptance: the result is exact).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from forge.config import GrpoConfig
from forge.errors import PartDied, PartFailed
from forge.quant.calibration import Decision, Gate, Measurement, PolicyMeasurement
from forge.quant.scheme import Quantization
from forge.types import ActivationScale, Completion, Episode, FinishReason, Group, Manifest, Prompt, SamplingRequest


class Verified(Protocol):
    """Answer of a calibrator to one draft."""

    @property
    def agreed(self) -> int: ...
    @property
    def token(self) -> int | None: ...


class Calibrator(Protocol):
    """What the loop asks of the calibration actor."""

    @property
    def name(self) -> str: ...
    async def restart(self, error: PartFailed) -> None: ...
    async def pull(self, manifest: Manifest) -> None: ...
    async def measure(
        self, rows: Sequence[Sequence[int]], more: Sequence[Sequence[int]], live: Mapping[str, ActivationScale]
    ) -> Measurement: ...
    async def verify(
        self, episodes: Sequence[Episode], scales: Mapping[str, ActivationScale] | None
    ) -> Sequence[Verified]: ...
    async def compare(
        self,
        episodes: Sequence[Episode],
        proposed: Mapping[str, ActivationScale],
        live: Mapping[str, ActivationScale] | None,
    ) -> PolicyMeasurement: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...
    async def decode(self, completions: Sequence[Sequence[int]]) -> list[str]: ...


class Rollouts(Protocol):
    """Samples completions on live weights."""

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]: ...


class Scorer(Protocol):
    """Rewards episodes."""

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]: ...


class Quantizer(Protocol):
    """What the loop asks of the trainer and the weight store."""

    async def publish(self, manifest: Manifest) -> None: ...
    async def free(self, manifest: Manifest) -> None: ...
    async def set_scales(self, scales: Mapping[str, ActivationScale]) -> None: ...
    async def switch_to_qat(self, steps: int, lr_scale: float) -> None: ...


class Recalibration:
    """Runs calibrations and owns which scales are live.

    Args:
        pinned: prompts on which the policies are compared, the same in every calibration.
        end_tokens: tokens that end a completion.
        record: called with each line of calibration.jsonl.
    """

    def __init__(
        self,
        config: GrpoConfig,
        *,
        calibrator: Calibrator,
        rollouts: Rollouts,
        scorer: Scorer,
        quantizer: Quantizer,
        pinned: Sequence[Prompt],
        end_tokens: Sequence[int],
        record: Callable[[Mapping[str, Any]], None],
    ) -> None:
        quantization = Quantization.of(config.quant)
        assert quantization is not None
        self.config, self.quantization = config, quantization
        self.calibrator, self.rollouts, self.scorer, self.quantizer = calibrator, rollouts, scorer, quantizer
        self.pinned, self.end_tokens, self.record = list(pinned), set(end_tokens), record
        self.provisional = False
        """Live scales come from prompts alone: too narrow for completions, and nothing to compare new ones with."""
        self.gate = Gate(config.calibration, config.rollback, static=quantization.scheme.static, steps=config.steps)

    def due(self, version: int) -> bool:
        """Whether version `version` is calibrated before it goes live."""
        every = self.config.calibration.every
        return bool(every) and version > 0 and version % every == 0 and version < self.config.steps

    def stamp(self, manifest: Manifest) -> Manifest:
        """The manifest with the live scales."""
        return replace(manifest, scale_version=self.gate.scale_version, scales=dict(self.gate.scales))

    async def start(self, manifest: Manifest, plain: Manifest) -> Manifest:
        """First scales of a static scheme, from prompts alone: nothing can be sampled before there are any."""
        if not self.quantization.scheme.static:
            return self.stamp(manifest)
        rows = [p.token_ids for p in self.pinned]

        async def measure() -> Measurement:
            await self._pull(plain)
            return await self.calibrator.measure(rows, [], {})

        measurement = await self._surviving(measure)
        decision = self.gate.decide(measurement)
        self._write(manifest.version, measurement, decision, 0.0, "prompts before training")
        if not decision.accepted:
            raise PartFailed("calibrator", "no scales to start with: " + "; ".join(decision.reasons[:3]))
        await self._apply(decision)
        self.provisional = True
        return self.stamp(manifest)

    async def run(
        self, manifest: Manifest, plain: Manifest, episodes: Sequence[Episode], source: str
    ) -> tuple[Manifest, Decision]:
        """Calibrate a staged version on fresh rollouts.

        Args:
            manifest: of the version, quantized.
            plain: of the same version, unquantized; its shards are staged.
            episodes: fresh rollouts; their token ids are observed.
            source: where they come from, for the record.

        Returns:
            the manifest with the scales that are live from now on; the decision.
        """
        start = time.perf_counter()
        measurement = await self._surviving(lambda: self._measure(plain, episodes))
        decision = self.gate.decide(measurement)
        if self.provisional and decision.accepted:
            self.provisional = False
            self.gate.forget_earlier()
        await self._apply(decision)
        self._write(manifest.version, measurement, decision, time.perf_counter() - start, source)
        return self.stamp(manifest), decision

    async def _measure(self, plain: Manifest, episodes: Sequence[Episode]) -> Measurement:
        await self._pull(plain)
        rows = [e.prompt.token_ids + e.completion.token_ids for e in episodes]
        half = min(len(rows), self.config.calibration.samples)
        live = dict(self.gate.scales)
        known = {} if self.provisional else live
        measurement = await self.calibrator.measure(rows[:half], rows[half:], known)
        complete = not self.quantization.scheme.static or len(measurement.scales) == len(measurement.layers)
        if complete and measurement.rows >= self.config.calibration.min_rows:
            policy = await self._compare(measurement.scales, live)
            measurement = replace(measurement, policy=policy)
        return measurement

    async def _surviving(self, work: Callable[[], Awaitable[Measurement]]) -> Measurement:
        """`work()`, from its start again when the calibration actor died: a new one holds no version yet."""
        while True:
            try:
                return await work()
            except PartDied as error:
                if error.part != self.calibrator.name:
                    raise
                await self.calibrator.restart(error)

    async def _pull(self, plain: Manifest) -> None:
        await self.quantizer.publish(plain)
        try:
            await self.calibrator.pull(plain)
        finally:
            await self.quantizer.free(plain)

    async def _apply(self, decision: Decision) -> None:
        await self.quantizer.set_scales(decision.scales)
        if decision.qat_steps:
            await self.quantizer.switch_to_qat(decision.qat_steps, self.config.rollback.qat_lr_scale)

    # ---- quantized against unquantized ------------------------------------------------------------------------

    async def _compare(
        self, proposed: Mapping[str, ActivationScale], live: Mapping[str, ActivationScale]
    ) -> PolicyMeasurement:
        drafts = await self._draft([p.token_ids for p in self.pinned], [()] * len(self.pinned))
        true = await self.greedy(drafts, None)
        quantized = await self.greedy(drafts, proposed)
        policy = await self.calibrator.compare(
            self._episodes(true, [""] * len(true)), proposed, live if live and live != proposed else None
        )
        rewards_true, rewards = await self._rewards(true), await self._rewards(quantized)
        drop, error = _paired_drop(rewards_true, rewards)
        policy = replace(
            policy, greedy_reward=_mean(rewards), greedy_reward_unquantized=_mean(rewards_true), drop_error=error
        )
        if not live:
            return policy
        if live == proposed:
            return replace(policy, live_greedy_reward=policy.greedy_reward, live_drop_error=error)
        if drop - error > self.config.rollback.max_accuracy_drop:  # are the live scales any better?
            rewards_live = await self._rewards(await self.greedy(drafts, live))
            _, error = _paired_drop(rewards_true, rewards_live)
            policy = replace(policy, live_greedy_reward=_mean(rewards_live), live_drop_error=error)
        return policy

    async def pinned_texts(self) -> list[tuple[int, ...]]:
        """Pinned prompts with the live policy's greedy completions."""
        return [
            p.token_ids + ids
            for p, ids in zip(
                self.pinned,
                await self._draft([p.token_ids for p in self.pinned], [()] * len(self.pinned)),
                strict=True,
            )
        ]

    async def greedy(
        self, drafts: Sequence[tuple[int, ...]], scales: Mapping[str, ActivationScale] | None
    ) -> list[tuple[int, ...]]:
        """Greedy completions of the pinned prompts by the policy that the calibrator holds.

        Args:
            drafts: completions that some similar policy gave.
            scales: of the quantized policy; None: the unquantized one.
        """
        done: dict[int, tuple[int, ...]] = {}
        open_drafts = dict(enumerate(drafts))
        while open_drafts:
            order = list(open_drafts)
            episodes = self._episodes([open_drafts[i] for i in order], [""] * len(order), order)
            answers = await self.calibrator.verify(episodes, scales)
            prefixes: dict[int, tuple[int, ...]] = {}
            for i, answer in zip(order, answers, strict=True):
                if answer.token is None:
                    done[i] = open_drafts[i]
                    continue
                prefix = (*open_drafts[i][: answer.agreed], answer.token)
                if answer.token in self.end_tokens or len(prefix) >= self._room(i):
                    done[i] = prefix
                else:
                    prefixes[i] = prefix
            continued = await self._draft(
                [self.pinned[i].token_ids for i in prefixes], list(prefixes.values()), list(prefixes)
            )
            open_drafts = dict(zip(prefixes, continued, strict=True))
        return [done[i] for i in range(len(drafts))]

    def _room(self, i: int) -> int:
        c = self.config
        return min(c.sampling.max_new_tokens, c.model.max_len - len(self.pinned[i].token_ids))

    async def _draft(
        self,
        prompts: Sequence[tuple[int, ...]],
        prefixes: Sequence[tuple[int, ...]],
        which: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:
        """Greedy continuations by the generators, their prefixes included."""
        which = range(len(prompts)) if which is None else which
        requests = [
            SamplingRequest(token_ids=p + x, temperature=0.0, max_new_tokens=self._room(i) - len(x))
            for i, p, x in zip(which, prompts, prefixes, strict=True)
        ]
        found = await self.rollouts.generate(requests) if requests else []
        return [x + c.token_ids for x, c in zip(prefixes, found, strict=True)]

    async def _rewards(self, completions: Sequence[tuple[int, ...]]) -> list[float | None]:
        texts = await self.calibrator.decode(completions)
        return [e.reward for e in await self.scorer.score(self._episodes(completions, texts))]

    def _episodes(
        self, completions: Sequence[tuple[int, ...]], texts: Sequence[str], which: Sequence[int] | None = None
    ) -> list[Episode]:
        rows = range(len(completions)) if which is None else which
        return [
            Episode(
                prompt=self.pinned[i],
                completion=Completion(
                    token_ids=ids,
                    logprobs=(0.0,) * len(ids),
                    versions=(0,) * len(ids),
                    text=text,
                    finish_reason=FinishReason.STOP if ids[-1] in self.end_tokens else FinishReason.LENGTH,
                ),
                group=i,
                member=0,
            )
            for i, ids, text in zip(rows, completions, texts, strict=True)
        ]

    def _write(self, step: int, m: Measurement, decision: Decision, seconds: float, source: str) -> None:
        policy = {**asdict(m.policy), "accuracy_drop": m.policy.accuracy_drop}
        self.record(
            {
                "step": step,
                "source": source,
                "scheme": self.quantization.scheme.name,
                "scale_version": decision.scale_version,
                "action": decision.action.value,
                "accepted": decision.accepted,
                "rolled_back": decision.rolled_back,
                "qat_steps": decision.qat_steps,
                "rejected_in_a_row": self.gate.rejected_in_a_row,
                "reasons": list(decision.reasons),
                "rows": m.rows,
                "tokens": m.tokens,
                "rows_refused": m.rows_refused,
                "resampled": m.resampled,
                "seconds": seconds,
                "policy": policy,
                "layers": [_finite(asdict(x)) for x in m.layers],
            }
        )


def fresh_rows(batches: Sequence[Sequence[Group]], *, at_most: int) -> list[Episode]:
    """Episodes of the newest batches that sampled something, newest first."""
    return [e for batch in reversed(batches) for g in batch for e in g.episodes if e.num_response_tokens > 0][:at_most]


def calibration_metrics(decision: Decision, gate: Gate) -> dict[str, float]:
    """What a calibration adds to its step's metrics."""
    return {
        "calibration/accepted": float(decision.accepted),
        "calibration/rolled_back": float(decision.rolled_back),
        "calibration/qat_steps": float(decision.qat_steps),
        "calibration/rejected_in_a_row": float(gate.rejected_in_a_row),
    }


def _mean(rewards: Sequence[float | None]) -> float | None:
    scored = [r for r in rewards if r is not None]
    return statistics.fmean(scored) if scored else None


def _paired_drop(before: Sequence[float | None], after: Sequence[float | None]) -> tuple[float, float]:
    """Mean loss of reward and its standard error, over the prompts that both sides have a reward for."""
    lost = [a - b for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if len(lost) < 2:
        return (lost[0] if lost else 0.0), 0.0
    return statistics.fmean(lost), statistics.stdev(lost) / math.sqrt(len(lost))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
