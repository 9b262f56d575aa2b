"""Quantization schemes as data, and which layers of a model one applies to. No torch.

    SCHEMES["int8_static"] ── Quantization(scheme, group_size, layers, skip) ── plan(shapes) ── Plan

A scheme says what weights and activations become, which engine serves it and what it exports to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forge.config import QuantConfig
from forge.errors import ConfigError

GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes that the int4 kernels of every engine have."""
NEVER = r"lm_head|embed_tokens"
"""Always left as they are: they share one tensor in tied models, and an engine gathers rows from the embedding."""
SHARED_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Projections that engines fuse into one layer: quantized together or not at all."""


class Activation(StrEnum):
    """What a scheme does with the input of a linear layer."""

    none = "none"
    """Nothing: the input stays as it is."""
    token = "token"
    """Low-bit codes with a scale for each token, computed as it passes."""
    token_asymmetric = "token_asymmetric"
    """The same with a zero point for each token."""
    tensor = "tensor"
    """Codes with one scale and zero point for the layer, estimated beforehand (calibration)."""


class Format(StrEnum):
    """How a quantized model lies in files."""

    compressed_tensors = "compressed-tensors"
    torchao = "torchao"
    pt2 = "torch.export"


@dataclass(kw_only=True, slots=True, frozen=True)
class Scheme:
    """One way to quantize the linear layers of a model."""

    name: str
    summary: str
    bits: int
    """Bits of a weight's code."""
    floating: bool = False
    """Codes are float8 (e4m3) instead of integers."""
    grouped: bool = False
    """One scale for each group of `group_size` inputs of a row, instead of one for the row."""
    activation: Activation = Activation.none
    formats: tuple[Format, ...] = ()
    """What it exports to; the first is what rollout engines load."""
    rollouts: bool = True
    """A rollout engine can serve it from live weights, so the trainer can be prepared for it."""
    needs_gpu: bool = False

    @property
    def static(self) -> bool:
        """True when activations need scales from calibration."""
        return self.activation is Activation.tensor


_CT, _AO, _PT2 = Format.compressed_tensors, Format.torchao, Format.pt2
SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme(
            name="int8_dynamic",
            summary="int8 weights per channel, int8 activations per token",
            bits=8,
            activation=Activation.token,
            formats=(_CT,),  # torchao divides by 127.5 where the serving kernels divide by 127: another function
        ),
        Scheme(
            name="int8_static",
            summary="int8 weights per channel, int8 activations with calibrated scale and zero point",
            bits=8,
            activation=Activation.tensor,
            formats=(_CT,),
        ),
        Scheme(name="int4_weight", summary="int4 weights in groups", bits=4, grouped=True, formats=(_CT, _AO)),
        Scheme(
            name="8da4w",
            summary="int4 weights in groups, int8 activations per token with zero point",
            bits=4,
            grouped=True,
            activation=Activation.token_asymmetric,
            formats=(_AO,),
        ),
        Scheme(name="int8_weight", summary="int8 weights per channel", bits=8, formats=(_AO,)),
        Scheme(
            name="fp8_dynamic",
            summary="float8 weights per channel, float8 activations per token",
            bits=8,
            floating=True,
            activation=Activation.token,
            formats=(_CT,),
            needs_gpu=True,
        ),
        Scheme(
            name="x86_static",
            summary="int8 by PT2E for Inductor on x86 CPUs",
            bits=8,
            activation=Activation.tensor,
            formats=(_PT2,),
            rollouts=False,
        ),
        Scheme(
            name="arm_static",
            summary="int8 by PT2E for Inductor on Arm CPUs",
            bits=8,
            activation=Activation.tensor,
            formats=(_PT2,),
            rollouts=False,
        ),
    )
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """Which linear layers of a model are quantized, and their shapes. Names are Hugging Face module names."""

    quantized: Mapping[str, tuple[int, int]]
    """Name to (outputs, inputs)."""
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Linear layers left as they are."""

    def __str__(self) -> str:
        return f"quantized {len(self.quantized)} of {len(self.quantized) + len(self.left)} linears"


@dataclass(kw_only=True, slots=True, frozen=True)
class Quantization:
    """A scheme with its settings: all that `prepare`, `convert` and `export` need to agree on."""

    scheme: Scheme
    group_size: int = 32
    """Inputs that share a scale, for schemes with groups."""
    layers: str = ".*"
    """Regular expression, searched in the module's name: what is quantized."""
    skip: str = ""
    """Regular expression, searched in the module's name: what is left out of that; empty leaves out nothing."""

    @classmethod
    def of(cls, config: QuantConfig) -> Quantization | None:
        """What a configuration asks for; None without quantization."""
        if config.scheme == "none":
            return None
        return cls(scheme=SCHEMES[config.scheme], group_size=config.group_size, layers=config.layers, skip=config.skip)

    @property
    def smooths(self) -> bool:
        """True when outlier channels of activations cost accuracy, so that smoothing helps."""
        return self.scheme.bits == 8 and self.scheme.activation is not Activation.none

    @property
    def label(self) -> str:
        """Name for messages and manifests: engines of different labels hold different functions."""
        group = f" group_size={self.group_size}" if self.scheme.grouped else ""
        return f"{self.scheme.name}{group} layers={self.layers} skip={self.skip}"

    def check_format(self, format: Format) -> None:
        """Refuse a format that the scheme cannot be written in.

        Raises:
            ConfigError: naming those it can be written in.
        """
        if format not in self.scheme.formats:
            raise ConfigError(
                f"{self.scheme.name} cannot be written as {format.value}: it can be as "
                f"{' or '.join(f.value for f in self.scheme.formats)}"
            )

    def selects(self, module: str) -> bool:
        """True when the linear layer of this name is quantized."""
        return bool(
            re.search(self.layers, module)
            and not (self.skip and re.search(self.skip, module))
            and not re.search(NEVER, module)
        )

    def plan(self, shapes: Mapping[str, tuple[int, int]]) -> Plan:
        """Which of a model's linear layers are quantized.

        Args:
            shapes: (outputs, inputs) of every linear layer by module name.

        Raises:
            ConfigError: nothing is selected, fused projections are split, or a group size does not divide a layer's
                width; layers and valid sizes are named.
        """
        chosen = {n: s for n, s in shapes.items() if self.selects(n)}
        problems = [*self._split(shapes, chosen), *self._indivisible(chosen)]
        if not chosen:
            problems.append(
                f"quant.layers={self.layers!r} with quant.skip={self.skip!r} selects none of the model's "
                f"{len(shapes)} linear layers: for example {next(iter(shapes), None)!r} should match"
            )
        if problems:
            raise ConfigError(problems)
        return Plan(quantized=chosen, left={n: s for n, s in shapes.items() if n not in chosen})

    def _split(self, shapes: Iterable[str], chosen: Iterable[str]) -> list[str]:
        problems = []
        for name in shapes:
            parent, _, leaf = name.rpartition(".")
            for family in SHARED_INPUT:
                if leaf != sorted(family)[0]:
                    continue
                members = {f"{parent}.{m}" for m in family}
                taken = members & set(chosen)
                if taken and taken != members:
                    problems.append(
                        f"{parent}: engines fuse {', '.join(sorted(family))}, so quant.layers and quant.skip must take "
                        f"all of them or none; they take {', '.join(sorted(t.rpartition('.')[2] for t in taken))}"
                    )
        return problems[:5] + ([f"and {len(problems) - 5} more blocks"] if len(problems) > 5 else [])

    def _indivisible(self, chosen: Mapping[str, tuple[int, int]]) -> list[str]:
        if not self.scheme.grouped:
            return []
        bad = {n: width for n, (_, width) in chosen.items() if width % self.group_size}
        if not bad:
            return []
        widths = set(width for _, width in chosen.values())
        valid = [g for g in GROUP_SIZES if all(w % g == 0 for w in widths)]
        wide = ", ".join(map(str, sorted(set(bad.values()))))
        names = ", ".join(list(bad)[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        return [
            f"quant.group_size={self.group_size} does not divide the width {wide} of {names}: "
            "valid sizes for this model are "
            f"{', '.join(map(str, valid)) if valid else 'none; leave these layers out with quant.skip'}"
        ]
