"""Calibration: what a layer's inputs look like, the scales that follow, and the gate that new scales must pass.

Observer (one a layer, over several passes) ── LayerMeasurement ─┐
policies compared on pinned prompts ──────── PolicyMeasurement ──┴─ Measurement ── Gate.decide ── Decision
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from forge.config import CalibrationConfig, RollbackConfig
from forge.quant.grid import INT8_HIGH, INT8_LOW, scale_of_range
from forge.types import ActivationScale

KEPT_VALUES = 4096
"""Values of a pass that an observer keeps for error estimates."""
LISTED = 8
"""Layers that a reason names."""


class Observer:
    """Ranges and moments of one layer's input, pass by pass."""

    def __init__(self) -> None:
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.count = 0
        self.total = 0.0
        self.total_squared = 0.0
        self.largest: Tensor | None = None
        self.kept: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        """Take in the input of one pass, float [..., inputs]."""
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        if flat.numel() == 0:
            return
        self.lows.append(float(flat.min()))
        self.highs.append(float(flat.max()))
        self.count += flat.numel()
        self.total += float(flat.double().sum())
        self.total_squared += float(flat.double().square().sum())
        largest = flat.abs().amax(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.kept.append(flat.reshape(-1)[:: max(1, flat.numel() // KEPT_VALUES)].clone())

    @property
    def low(self) -> float:
        """Smallest value seen; NaN before the first pass."""
        return min(self.lows, default=math.nan)

    @property
    def high(self) -> float:
        """Largest value seen; NaN before the first pass."""
        return max(self.highs, default=math.nan)

    @property
    def std(self) -> float:
        """Standard deviation of all values seen."""
        if self.count == 0:
            return math.nan
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.total_squared / self.count - mean * mean))

    @property
    def growth(self) -> float:
        """Range of all passes over the range of a typical (median) one: large when a few rows made it."""
        typical = statistics.median(h - low for h, low in zip(self.highs, self.lows, strict=True)) if self.lows else 0.0
        return (self.high - self.low) / typical if typical > 0 else math.inf

    def merge(self, other: Observer) -> None:
        """Take in what another observer of the same layer saw."""
        self.lows += other.lows
        self.highs += other.highs
        self.count += other.count
        self.total += other.total
        self.total_squared += other.total_squared
        self.kept += other.kept
        if other.largest is not None:
            self.largest = other.largest if self.largest is None else torch.maximum(self.largest, other.largest)


@dataclass(kw_only=True, slots=True, frozen=True)
class LayerMeasurement:
    """One layer in one calibration. Shares are between 0 and 1; NaN is null in the record."""

    layer: str
    low: float
    high: float
    scale: float
    """Proposed; NaN where the range allows none, or the scheme needs none."""
    zero_point: int
    scale_shift: float
    """|proposed / live - 1|; 0 without live scales."""
    zero_point_shift: float
    """|proposed - live| over the 256 codes."""
    range_over_std: float
    growth: float
    """Range over that of a typical pass, or over the live range, whichever is larger."""
    saturated_share: float
    """Share of values outside the live range."""
    mean_abs_error: float
    """Mean |x - quantized x| with the proposed scale, in the activation's own units."""
    changed_codes_share: float
    """Share of the layer's weights whose integer code differs from the last calibration's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyMeasurement:
    """The quantized policy against the unquantized one on pinned prompts; None where nothing was compared."""

    kl: float | None = None
    """KL(unquantized || quantized with the proposed scales), nats a token."""
    logprob_gap: float | None = None
    """Mean |difference of log-probs| of the unquantized policy's greedy tokens."""
    live_kl: float | None = None
    live_logprob_gap: float | None = None
    argmax_agreement: float | None = None
    greedy_reward: float | None = None
    """Mean reward of the quantized policy's greedy completions, proposed scales."""
    live_greedy_reward: float | None = None
    """The same with the live scales; measured only when the proposed ones lose too much."""
    greedy_reward_unquantized: float | None = None
    drop_error: float = 0.0
    """Standard error of the drop, from the differences prompt by prompt."""
    live_drop_error: float = 0.0

    @property
    def accuracy_drop(self) -> float | None:
        """Greedy reward lost by quantizing with the proposed scales."""
        return _difference(self.greedy_reward_unquantized, self.greedy_reward)

    @property
    def live_accuracy_drop(self) -> float | None:
        """Greedy reward lost by quantizing with the live scales."""
        return _difference(self.greedy_reward_unquantized, self.live_greedy_reward)


@dataclass(kw_only=True, slots=True, frozen=True)
class Measurement:
    """All that a calibration found."""

    rows: int
    tokens: int
    rows_refused: int
    resampled: bool
    layers: tuple[LayerMeasurement, ...]
    scales: Mapping[str, ActivationScale]
    """Proposed; empty for schemes without static scales."""
    policy: PolicyMeasurement = field(default_factory=PolicyMeasurement)


class Action(StrEnum):
    """What a calibration led to."""

    accept = "accept"
    """The proposed scales go live with the version they were measured on."""
    measure = "measure"
    """All is well, and the scheme has no scales to change."""
    reject = "reject"
    """The live scales stay."""
    rollback = "rollback"
    """The live scales lose too much: the last accepted ones before them come back."""
    qat = "qat"
    """As reject or rollback, and the trainer switches to QAT."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Decision:
    """The gate's answer to a measurement."""

    action: Action
    reasons: tuple[str, ...]
    scale_version: int
    """Live from now on."""
    scales: Mapping[str, ActivationScale]
    """Live from now on."""
    rolled_back: bool = False
    qat_steps: int = 0
    """Steps of QAT that start now."""

    @property
    def accepted(self) -> bool:
        """True when nothing was wrong."""
        return self.action in (Action.accept, Action.measure)


def measure_layer(
    layer: str, observer: Observer, *, live: ActivationScale | None, static: bool, changed_codes_share: float
) -> tuple[LayerMeasurement, ActivationScale | None]:
    """What one layer's observer says, and the scale it proposes (None where its range allows none)."""
    low, high = observer.low, observer.high
    try:
        proposed = scale_of_range(low, high) if static else None
    except ValueError:
        proposed = None
    values = torch.cat(observer.kept) if observer.kept else torch.zeros(0)
    error = math.nan
    if proposed is not None and values.numel():
        codes = (values / proposed.scale + proposed.zero_point).round().clamp(INT8_LOW, INT8_HIGH)
        error = float(((codes - proposed.zero_point) * proposed.scale - values).abs().mean())
    growth, saturated, scale_shift, zero_shift = observer.growth, 0.0, 0.0, 0.0
    if live is not None:
        live_low = (INT8_LOW - live.zero_point) * live.scale
        live_high = (INT8_HIGH - live.zero_point) * live.scale
        growth = max(growth, (high - low) / (live_high - live_low))
        slack = live.scale / 2
        outside = (values < live_low - slack) | (values > live_high + slack)
        saturated = float(outside.float().mean()) if values.numel() else 0.0
        if proposed is not None:
            scale_shift = abs(proposed.scale / live.scale - 1)
            zero_shift = abs(proposed.zero_point - live.zero_point) / 256
    std = observer.std
    return (
        LayerMeasurement(
            layer=layer,
            low=low,
            high=high,
            scale=math.nan if proposed is None else proposed.scale,
            zero_point=0 if proposed is None else proposed.zero_point,
            scale_shift=scale_shift,
            zero_point_shift=zero_shift,
            range_over_std=(high - low) / std if std > 0 else math.nan,
            growth=growth,
            saturated_share=saturated,
            mean_abs_error=error,
            changed_codes_share=changed_codes_share,
        ),
        proposed,
    )


class Gate:
    """Decides what a measurement leads to, and remembers which scales were good.

    Args:
        static: whether the scheme has activation scales; without, it can only be measured and answered by QAT.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, calibration: CalibrationConfig, rollback: RollbackConfig, *, static: bool, steps: int) -> None:
        self.calibration, self.rollback, self.static, self.steps = calibration, rollback, static, steps
        self.scale_version = 0
        self.rejected_in_a_row = 0
        self._good: list[tuple[int, Mapping[str, ActivationScale]]] = []
        self._next = 1

    @property
    def scales(self) -> Mapping[str, ActivationScale]:
        """Live activation scales by module name; empty before the first were accepted."""
        return self._good[-1][1] if self._good else {}

    def decide(self, m: Measurement) -> Decision:
        """Accept, reject, roll back or switch to QAT. Changes the live scales accordingly."""
        wrong = [*self._bad_rows(m), *self._bad_layers(m), *self._bad_policy(m)]
        flags = self._flags(m)
        if not wrong:
            self.rejected_in_a_row = 0
            if self.static:
                self.scale_version = self._next
                self._next += 1
                self._good.append((self.scale_version, m.scales))
            return self._decision(Action.accept if self.static else Action.measure, flags)
        self.rejected_in_a_row += 1
        rolled_back = False
        live_drop = m.policy.live_accuracy_drop
        limit = self.rollback.max_accuracy_drop
        if live_drop is not None and live_drop - m.policy.live_drop_error > limit:
            wrong.append(f"the live scales (version {self.scale_version}) lose {live_drop:.3f} of greedy reward, more "
                         f"than rollback.max_accuracy_drop={limit}")  # fmt: skip
            if len(self._good) > 1:
                self._good.pop()
                self.scale_version = self._good[-1][0]
                rolled_back = True
                wrong.append(f"rolled back to scale version {self.scale_version}")
            else:
                wrong.append("there are no earlier accepted scales to roll back to")
        action = Action.rollback if rolled_back else Action.reject
        qat_steps = 0
        if self.rejected_in_a_row >= self.rollback.patience:
            qat_steps = max(1, math.ceil(self.rollback.qat_fraction * self.steps))
            wrong.append(
                f"{self.rejected_in_a_row} rejections in a row (rollback.patience={self.rollback.patience}): QAT for "
                f"{qat_steps} steps at {self.rollback.qat_lr_scale} times the learning rate"
            )
            action, self.rejected_in_a_row = Action.qat, 0
        return self._decision(action, wrong + flags, rolled_back=rolled_back, qat_steps=qat_steps)

    def forget_earlier(self) -> None:
        """Scales before the live ones are no longer good to roll back to."""
        del self._good[:-1]

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as JSON values."""
        return {
            "scale_version": self.scale_version,
            "next": self._next,
            "rejected_in_a_row": self.rejected_in_a_row,
            "good": [[v, {n: asdict(s) for n, s in scales.items()}] for v, scales in self._good],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.scale_version, self._next = state["scale_version"], state["next"]
        self.rejected_in_a_row = state["rejected_in_a_row"]
        self._good = [(v, {n: ActivationScale(**s) for n, s in scales.items()}) for v, scales in state["good"]]

    def _decision(self, action: Action, reasons: Sequence[str], **more: Any) -> Decision:
        return Decision(
            action=action, reasons=tuple(reasons), scale_version=self.scale_version, scales=self.scales, **more
        )

    def _bad_rows(self, m: Measurement) -> list[str]:
        c = self.calibration
        if m.rows >= c.min_rows:
            return []
        return [
            f"{m.rows} usable rows, fewer than calibration.min_rows={c.min_rows} ({m.rows_refused} rows had fewer than "
            f"calibration.min_tokens={c.min_tokens} tokens)"
        ]

    def _bad_layers(self, m: Measurement) -> list[str]:
        reasons = []
        broken = [x for x in m.layers if not (math.isfinite(x.low) and math.isfinite(x.high))]
        if broken:
            reasons.append(f"inputs that are not finite, or were never seen: {_some([x.layer for x in broken])}")
        zero = [x for x in m.layers if x.low == x.high == 0.0]
        if zero:
            reasons.append(f"inputs that are all zero, which give no scale: {_some([x.layer for x in zero])}")
        c = self.calibration
        grown = [x for x in m.layers if x.range_over_std > c.outlier_std and x.growth > c.max_outlier_growth]
        if self.static and grown:
            worst = max(grown, key=lambda x: x.growth)
            reasons.append(
                f"outliers: the range of {worst.layer} is {worst.range_over_std:.0f} standard deviations and "
                f"{worst.growth:.1f} times that of a typical pass or of the live scales, more than "
                f"calibration.max_outlier_growth={c.max_outlier_growth} ({len(grown)} layers)"
            )
        return reasons

    def _bad_policy(self, m: Measurement) -> list[str]:
        reasons = []
        p, c = m.policy, self.calibration
        if p.kl is not None and not p.kl <= c.max_kl:
            reasons.append(f"KL from the unquantized policy is {p.kl:.3f} nats a token, more than "
                           f"calibration.max_kl={c.max_kl}")  # fmt: skip
        limit = self.rollback.max_accuracy_drop
        # a few prompts show a small drop by chance: it counts when it is over the limit by a standard error
        if p.accuracy_drop is not None and p.accuracy_drop - p.drop_error > limit:
            reasons.append(
                f"greedy reward falls by {p.accuracy_drop:.3f} (standard error {p.drop_error:.3f}) from "
                f"{p.greedy_reward_unquantized:.3f}, more than rollback.max_accuracy_drop={limit}"
            )
        return reasons

    def _flags(self, m: Measurement) -> list[str]:
        c, flags = self.calibration, []
        moved = [x for x in m.layers if x.zero_point_shift > c.max_zero_point_shift]
        if moved:
            worst = max(moved, key=lambda x: x.zero_point_shift)
            flags.append(f"flag: zero point of {len(moved)} layers moved by more than calibration.max_zero_point_shift="
                         f"{c.max_zero_point_shift}, most {worst.layer} ({worst.zero_point_shift:.3f})")  # fmt: skip
        wide = [x for x in m.layers if x.range_over_std > c.outlier_std]
        if wide:
            worst = max(wide, key=lambda x: x.range_over_std)
            flags.append(f"flag: range of {len(wide)} layers above calibration.outlier_std={c.outlier_std} standard "
                         f"deviations, most {worst.layer} ({worst.range_over_std:.0f})")  # fmt: skip
        inexact = [x for x in m.layers if x.mean_abs_error > c.max_mean_error]
        if inexact:
            worst = max(inexact, key=lambda x: x.mean_abs_error)
            flags.append(f"flag: mean absolute error of {len(inexact)} layers above calibration.max_mean_error="
                         f"{c.max_mean_error}, most {worst.layer} ({worst.mean_abs_error:.3f})")  # fmt: skip
        saturated = [x for x in m.layers if x.saturated_share > 0.001]
        if saturated:
            worst = max(saturated, key=lambda x: x.saturated_share)
            flags.append(f"flag: inputs of {len(saturated)} layers leave the live scales' range, most {worst.layer} "
                         f"({worst.saturated_share:.4f} of its values)")  # fmt: skip
        p = m.policy
        if p.live_kl is not None and p.live_kl > c.max_kl:
            flags.append(f"flag: the live scales are {p.live_kl:.3f} nats a token from the unquantized policy, more "
                         f"than calibration.max_kl={c.max_kl}")  # fmt: skip
        return flags


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
