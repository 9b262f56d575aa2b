"""The grids: which values a quantized weight or activation can take, bit for bit as the serving kernels have them.

Each rule here was read off a kernel and is pinned against it in tests/e2e/test_quant_kernels.py:
- compressed-tensors W8A8 (vLLM, oneDNN): codes are round(x * (1 / scale)), half to even; with a zero point it is added
  before rounding, in one multiply-add; scale = max|x| / 127.
- compressed-tensors W4A16: scale = max|w| / 7.5 of a group, rounded once to the served dtype; code * scale is rounded
  to that dtype, too.
- torchao's int8 weights: codes enter the product as they are, and the result is multiplied by the scale in the served
  dtype: so the scale is rounded to that dtype once, and code * scale is not.
- torchao's activations: its own primitives, called here.
A zero row or group has scale 0 and codes 0: no floor is put under the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge.quant.scheme import Activation, Quantization
from forge.types import ActivationScale

INT8_LOW, INT8_HIGH = -128, 127
INT4_LOW, INT4_HIGH = -8, 7
FP8_MAX = 448.0


def scale_of_range(low: float, high: float) -> ActivationScale:
    """The grid that covers [low, high] and 0 with 256 codes.

    Engines rebuild the scale from the range it stands for, scale * (127 - zero) - scale * (-128 - zero) over 255, in
    float32. A scale of 16 significant bits comes out of that unchanged, because every product is exact; so it is
    rounded up to that, and the engine serves what was calibrated.

    Raises:
        ValueError: the range is empty or not finite.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    exact = (high - low) / 255
    limits = torch.finfo(torch.float32)  # the engine computes the range itself, and 1 / scale
    if not (high - low <= limits.max and exact > limits.tiny):
        raise ValueError(f"a scale needs a finite range above 0, got [{low}, {high}]")
    mantissa, exponent = math.frexp(exact)
    scale = math.ldexp(math.ceil(mantissa * 2**16), exponent - 16)
    zero = min(max(round(INT8_LOW - low / scale), INT8_LOW), INT8_HIGH)
    return ActivationScale(scale=scale, zero_point=zero)


def weight_scale(weight: Tensor, quantization: Quantization, *, served: torch.dtype) -> Tensor:
    """Scale of every row or group: float32 [outputs, 1] or [outputs, inputs / group_size]; 0 for an all-zero one.

    Args:
        weight: float [outputs, inputs]; rows may be a shard, because no rule crosses rows.
        served: dtype the engine computes in; scales of groups and of weight-only schemes are rounded to it once.
    """
    scheme = quantization.scheme
    rows = weight.detach().float()
    if scheme.grouped:
        largest = rows.reshape(rows.shape[0], -1, quantization.group_size).abs().amax(-1)
        return (largest / 7.5).to(served).float()
    scale = rows.abs().amax(-1, keepdim=True) / (FP8_MAX if scheme.floating else 127.0)
    return scale.to(served).float() if scheme.activation is Activation.none else scale


def weight_codes(weight: Tensor, scale: Tensor, quantization: Quantization) -> Tensor:
    """Codes of a weight, [outputs, inputs]: int8 (int4 codes lie in [-8, 7]) or float8_e4m3fn."""
    scheme = quantization.scheme
    wide = _spread(scale, weight.shape[1])
    scaled = weight.detach().float() * _inverse(wide)
    if scheme.floating:
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    low, high = (INT4_LOW, INT4_HIGH) if scheme.bits == 4 else (INT8_LOW, INT8_HIGH)
    return scaled.round().clamp(low, high).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, quantization: Quantization, *, served: torch.dtype) -> Tensor:
    """float32 [outputs, inputs]: the weight that the serving kernel multiplies with."""
    weight = codes.float() * _spread(scale, codes.shape[1])
    return weight.to(served).float() if quantization.scheme.grouped else weight


def fake_quant_weight(weight: Tensor, quantization: Quantization, *, served: torch.dtype) -> Tensor:
    """The weight on its grid, in its own dtype; gradients pass straight through (arXiv 1308.3432)."""

    def on_grid(w: Tensor) -> Tensor:
        scale = weight_scale(w, quantization, served=served)
        return dequantize(weight_codes(w, scale, quantization), scale, quantization, served=served)

    return straight_through(weight, on_grid)


def fake_quant_activation(
    x: Tensor, activation: Activation, *, served: torch.dtype, floating: bool = False, static: ActivationScale | None
) -> Tensor:
    """The input of a linear layer on its grid, in its own dtype; gradients pass straight through.

    The engine sees activations in the dtype it serves, so x is rounded to it first.

    Args:
        x: float [..., inputs].
        static: needed for `Activation.tensor`.
    """
    if activation is Activation.none:
        return straight_through(x, lambda v: v.to(served).float())
    if activation is Activation.tensor:
        if static is None:
            raise ValueError("a static scheme needs scales from calibration before it computes anything")
        given = static
        return straight_through(x, lambda v: _static(v.to(served), given))
    if activation is Activation.token_asymmetric:
        return straight_through(x, lambda v: _token_asymmetric(v.to(served)).float())
    rule = _token_float8 if floating else _token
    return straight_through(x, lambda v: rule(v.to(served).float()))


def _static(x: Tensor, grid: ActivationScale) -> Tensor:
    inverse = 1.0 / torch.tensor(grid.scale, dtype=torch.float32, device=x.device)
    # the kernel rounds product and sum once (FMA); in float64 the product is exact, so this does, too
    shifted = (x.double() * inverse.double() + grid.zero_point).float()
    codes = shifted.round().clamp(INT8_LOW, INT8_HIGH)
    return (codes - grid.zero_point) * grid.scale


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for scales that have none: a row of zeros, or of values too small for float32 to divide by."""
    inverse = 1.0 / scale
    return torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(scale))


def _token(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    inverse = _inverse(scale)
    return (x * inverse).round().clamp(INT8_LOW, INT8_HIGH) * scale


def _token_float8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / FP8_MAX
    inverse = _inverse(scale)
    return (x * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def _token_asymmetric(x: Tensor) -> Tensor:
    """As torchao's IntxUnpackedToInt8Tensor does it, in the dtype of x."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    block = (*(1 for _ in x.shape[:-1]), x.shape[-1])
    scale, zero = choose_qparams_affine(
        x, MappingType.ASYMMETRIC, block, torch.int8, INT8_LOW, INT8_HIGH, zero_point_dtype=torch.int8
    )
    codes = quantize_affine(x, block, scale, zero, torch.int8, INT8_LOW, INT8_HIGH)
    restored: Tensor = dequantize_affine(
        codes, block, scale, zero, torch.int8, INT8_LOW, INT8_HIGH, output_dtype=x.dtype
    )
    return restored


def _spread(scale: Tensor, width: int) -> Tensor:
    """A scale for each element: [outputs, groups] to [outputs, width] (or [outputs, 1], which broadcasts)."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width // scale.shape[1], dim=1)


class _StraightThrough(torch.autograd.Function):
    """Forward is exactly the grid's value: `x + (q - x).detach()` would round once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_grid: Callable[[Tensor], Tensor]) -> Tensor:
        return on_grid(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, on_grid: Callable[[Tensor], Tensor]) -> Tensor:
    """`on_grid(x)` in the dtype of x, with the gradient of the identity."""
    result: Tensor = _StraightThrough.apply(x, on_grid)  # type: ignore[no-untyped-call]
    return result
