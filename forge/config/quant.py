"""The part of the schema that is about quantization."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

QUANT_SCHEMES = ("none", "int8_dynamic", "int8_static", "int4_weight", "8da4w", "int8_weight", "fp8_dynamic")
"""Schemes that rollout engines serve from live weights; forge.quant says what each is."""


@dataclass(kw_only=True, slots=True)
class QatConfig:
    """Quantization-aware training: the trainer computes on the scheme's grid, with straight-through gradients."""

    enabled: bool = False
    """Train with fake-quantized linear layers."""
    start_step: int = 0
    """First step that does; earlier ones train unquantized."""

    def problems(self) -> Iterator[str]:
        if self.start_step < 0:
            yield f"quant.qat.start_step must be 0 or more, got {self.start_step}"


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Quantization of the policy: what generators serve, what the run exports."""

    scheme: str = "none"
    """none, int8_dynamic, int8_static, int4_weight, 8da4w, int8_weight or fp8_dynamic (GPU)."""
    group_size: int = 32
    """Inputs that share a scale, for int4_weight and 8da4w: 32, 64, 128 or 256."""
    layers: str = ".*"
    """Regular expression, searched in a linear layer's Hugging Face name: which are quantized. lm_head and embeddings
    never are."""
    skip: str = "router|mlp[.]gate$"
    """Regular expression: which of those are left out; empty leaves out none."""
    smooth: float = 0.65
    """Before training, move the range of outlier channels from activations into weights (SmoothQuant's exponent) by
    powers of two, which changes no function; for schemes with int8 activations. 0 leaves the model as it is."""
    qat: QatConfig = field(default_factory=QatConfig)

    def problems(self) -> Iterator[str]:
        yield from self.qat.problems()
        if not 0 <= self.smooth < 1:
            yield f"quant.smooth must be 0 (off) or an exponent below 1, got {self.smooth}"
        if self.scheme not in QUANT_SCHEMES:
            yield f"quant.scheme must be one of {', '.join(QUANT_SCHEMES)}; got {self.scheme!r}"
        if self.group_size not in (32, 64, 128, 256):
            yield f"quant.group_size must be 32, 64, 128 or 256, got {self.group_size}"
        if self.qat.enabled and self.scheme == "none":
            yield "quant.qat.enabled=true needs a quant.scheme to train for, got none"
        for name in ("layers", "skip"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                yield f"quant.{name} must be a regular expression, got {getattr(self, name)!r}: {error}"


@dataclass(kw_only=True, slots=True)
class CalibrationConfig:
    """Re-estimation of activation scales from fresh rollouts, and the gate that new ones must pass. For schemes
    without static scales the same measurements are taken, and nothing but QAT can answer them."""

    every: int = 1000
    """Calibrate every so many steps; 0 only at the start (where a static scheme needs it)."""
    samples: int = 256
    """Rollouts a calibration observes at most; 128 to 512 are usual."""
    batch_size: int = 32
    """Rollouts of one forward pass."""
    iterations: int = 10
    """Forward passes at most."""
    prompts: int = 16
    """Pinned prompts on which quantized and unquantized policy are compared, greedily and by log-probs."""
    min_tokens: int = 8
    """Rows of fewer tokens tell nothing about a layer's range: they are refused and counted."""
    min_rows: int = 8
    """A calibration on fewer usable rows is rejected."""
    max_zero_point_shift: float = 0.05
    """A layer whose zero point moved by more than this share of the range since the live scales is flagged."""
    outlier_std: float = 10.0
    """A layer whose range is more than so many standard deviations is flagged, and a second sample is drawn."""
    max_outlier_growth: float = 4.0
    """A flagged layer is rejected when its range is more than so many times the range of a typical pass: then a few
    rows made it, not the model."""
    max_mean_error: float = 0.01
    """Target of the mean absolute quantization error of a layer's input, relative to its largest value."""
    max_kl: float = 0.5
    """Largest KL (nats a token) of the quantized policy from the unquantized one on pinned prompts."""

    def problems(self) -> Iterator[str]:
        for name in ("samples", "batch_size", "iterations", "prompts", "min_tokens", "min_rows"):
            if getattr(self, name) < 1:
                yield f"calibration.{name} must be at least 1, got {getattr(self, name)}"
        if self.every < 0:
            yield f"calibration.every must be 0 (only at the start) or more steps, got {self.every}"
        if self.min_rows > self.samples:
            yield f"calibration.min_rows={self.min_rows} is more than calibration.samples={self.samples}"
        if self.min_rows > self.batch_size * self.iterations:
            yield (
                f"calibration.min_rows={self.min_rows} is more than the rows of all passes, calibration.batch_size="
                f"{self.batch_size} x calibration.iterations={self.iterations}"
            )
        for name in ("max_zero_point_shift", "outlier_std", "max_outlier_growth", "max_mean_error", "max_kl"):
            if not getattr(self, name) > 0:
                yield f"calibration.{name} must be above 0, got {getattr(self, name)}"


@dataclass(kw_only=True, slots=True)
class RollbackConfig:
    """What happens when the quantized policy falls behind the unquantized one."""

    max_accuracy_drop: float = 0.02
    """Largest loss of greedy mean reward on the pinned prompts; above it the last good scales come back."""
    patience: int = 3
    """Rejections in a row after which the trainer switches to QAT."""
    qat_fraction: float = 0.1
    """Share of all steps that the switch lasts."""
    qat_lr_scale: float = 0.1
    """Learning rate is multiplied by this meanwhile."""

    def problems(self) -> Iterator[str]:
        if not 0 <= self.max_accuracy_drop <= 1:
            yield f"rollback.max_accuracy_drop is a share between 0 and 1, got {self.max_accuracy_drop}"
        if self.patience < 1:
            yield f"rollback.patience must be at least 1 rejection, got {self.patience}"
        if not 0 < self.qat_fraction <= 1:
            yield f"rollback.qat_fraction is a share in (0, 1], got {self.qat_fraction}"
        if not 0 < self.qat_lr_scale <= 1:
            yield f"rollback.qat_lr_scale must be in (0, 1], got {self.qat_lr_scale}"
