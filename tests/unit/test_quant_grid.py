"""The grids against plain Python loops, closed forms and torchao's own code."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.quant import SCHEMES, Activation, Quantization
from forge.quant.grid import (
    dequantize,
    fake_quant_activation,
    fake_quant_weight,
    scale_of_range,
    straight_through,
    weight_codes,
    weight_scale,
)
from forge.types import ActivationScale

f32 = np.float32
SERVED = pytest.mark.parametrize("served", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
INTEGER = ["int8_dynamic", "int8_static", "int8_weight", "int4_weight", "8da4w"]


def quantization(scheme: str, group_size: int = 32) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], group_size=group_size)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- references: float32 one number at a time, no torch -----------------------------------------------------------


def bf16(value: Any) -> Any:
    """A float32 rounded to bfloat16 by its bits, half to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return f32(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def rounded(value: Any, served: torch.dtype) -> Any:
    return bf16(value) if served is torch.bfloat16 else f32(value)


def e4m3_values() -> list[tuple[float, int]]:
    """(value, last bit) of the positive float8 e4m3fn numbers: 4 bits of exponent (bias 7), 3 of mantissa, no inf."""
    values = []
    for code in range(0x7F):  # 0x7f is NaN
        exponent, mantissa = code >> 3, code & 7
        value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append((value, code & 1))
    return values


E4M3 = e4m3_values()


def e4m3(value: float) -> float:
    """The nearest float8, half to the one with an even last bit."""
    size = min(E4M3, key=lambda v: (abs(abs(value) - v[0]), v[1]))[0]
    return math.copysign(size, value)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def loop_weight(
    weight: Tensor, q: Quantization, served: torch.dtype
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Scales, codes and dequantized values."""
    scheme = q.scheme
    size = q.group_size if scheme.grouped else weight.shape[1]
    divisor = 7.5 if scheme.grouped else 448.0 if scheme.floating else 127.0
    low, high = (-8, 7) if scheme.bits == 4 else (-128, 127)
    scales, codes, values = [], [], []
    for row in weight.float().tolist():
        s_row, c_row, v_row = [], [], []
        for start in range(0, len(row), size):
            group = [f32(v) for v in row[start : start + size]]
            scale = f32(max(abs(v) for v in group)) / f32(divisor)
            if scheme.grouped or scheme.activation is Activation.none:
                scale = rounded(scale, served)
            s_row.append(float(scale))
            for v in group:
                x = float(v * (f32(1) / scale)) if scale > 0 else 0.0
                code = e4m3(clamp(x, -448, 448)) if scheme.floating else clamp(round(x), low, high)
                c_row.append(float(code))
                value = f32(code) * scale
                v_row.append(float(rounded(value, served) if scheme.grouped else value))
        scales.append(s_row)
        codes.append(c_row)
        values.append(v_row)
    return scales, codes, values


# ---- weights ------------------------------------------------------------------------------------------------------


@SERVED
@pytest.mark.parametrize("scheme", [*INTEGER, "fp8_dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["of-float32", "of-bfloat16"])
def test_weights_equal_a_plain_loop(scheme: str, served: torch.dtype, dtype: torch.dtype) -> None:
    q = quantization(scheme)
    weight = (normal(7, 96) * 0.05).to(dtype)
    weight[2] = 0
    weight[3, :32] = 0
    weight[4, 5] = 3.0  # an outlier: the rest of its row or group falls on few codes
    scales, codes, values = loop_weight(weight, q, served)
    scale = weight_scale(weight, q, served=served)
    on_grid = weight_codes(weight, scale, q)
    assert scale.dtype is torch.float32
    assert scale.shape == (7, 3 if q.scheme.grouped else 1)
    assert scale.tolist() == scales
    assert on_grid.dtype is (torch.float8_e4m3fn if q.scheme.floating else torch.int8)
    assert on_grid.float().tolist() == codes
    assert dequantize(on_grid, scale, q, served=served).tolist() == values
    fake = fake_quant_weight(weight, q, served=served)
    assert fake.dtype is dtype
    assert torch.equal(fake, torch.tensor(values).to(dtype))


@pytest.mark.parametrize("scheme", [*INTEGER, "fp8_dynamic"])
def test_zero_rows_and_groups_have_scale_and_codes_zero(scheme: str) -> None:
    q = quantization(scheme)
    weight = torch.zeros(2, 64)
    weight[1, 40] = 1.0
    scale = weight_scale(weight, q, served=torch.bfloat16)
    codes = weight_codes(weight, scale, q)
    assert scale[0].eq(0).all()
    assert codes[0].float().eq(0).all()
    assert codes[1].float().count_nonzero() == 1
    if q.scheme.grouped:
        assert scale[1].tolist()[0] == 0.0
    value = dequantize(codes, scale, q, served=torch.bfloat16)
    assert torch.isfinite(value).all()
    assert value.eq(0).sum() == 127


def test_int8_closed_form() -> None:
    # largest 127: the scale is 1 and a code is the number rounded half to even
    weight = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49]])
    q = quantization("int8_dynamic")
    scale = weight_scale(weight, q, served=torch.float32)
    assert scale.tolist() == [[1.0]]
    assert weight_codes(weight, scale, q).tolist() == [[127, -127, 0, 2, 2, 0, -2, 3]]


def test_int4_closed_form() -> None:
    # largest 7.5: the scale is 1; +7.5 would be code 8 and is cut to 7, -7.5 is code -8
    weight = torch.zeros(1, 64)
    weight[0, :6] = torch.tensor([7.5, -7.5, 0.5, 1.5, -2.5, 6.9])
    weight[0, 32:35] = torch.tensor([-15.0, 14.0, 1.0])
    q = quantization("int4_weight")
    scale = weight_scale(weight, q, served=torch.bfloat16)
    assert scale.tolist() == [[1.0, 2.0]]
    codes = weight_codes(weight, scale, q)
    assert codes[0, :6].tolist() == [7, -8, 0, 2, -2, 7]
    assert codes[0, 32:35].tolist() == [-8, 7, 0]


@pytest.mark.parametrize("scheme", ["int4_weight", "8da4w", "int8_weight"])
def test_weight_only_and_group_scales_are_rounded_to_the_served_dtype_once(scheme: str) -> None:
    weight = normal(50, 64, seed=3)
    q = quantization(scheme)
    exact, served = (weight_scale(weight, q, served=d) for d in (torch.float32, torch.bfloat16))
    assert not torch.equal(exact, served)
    assert torch.equal(exact.bfloat16().float(), served)
    assert torch.equal(served.bfloat16().float(), served)  # so what travels is what codes were made with


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static", "fp8_dynamic"])
def test_other_scales_stay_float32(scheme: str) -> None:
    weight = normal(50, 64, seed=3)
    exact, served = (weight_scale(weight, quantization(scheme), served=d) for d in (torch.float32, torch.bfloat16))
    assert torch.equal(exact, served)


@pytest.mark.parametrize("scheme", [*INTEGER, "fp8_dynamic"])
def test_a_shard_of_rows_has_the_codes_of_the_whole(scheme: str) -> None:
    q = quantization(scheme)
    weight = normal(12, 64, seed=5)
    whole = weight_codes(weight, weight_scale(weight, q, served=torch.bfloat16), q).float()
    parts = [weight_codes(w, weight_scale(w, q, served=torch.bfloat16), q).float() for w in weight.split([5, 7])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static", "int8_weight"])
def test_int8_codes_are_torchaos_at_the_same_scale(scheme: str) -> None:
    """torchao's own choice is max / 127.5, which cuts the largest weight to code 127; compressed-tensors' kernels and
    ours take max / 127. Codes of the same scale are the same, ties too: both round v * (1 / scale) half to even."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import Int8Tensor

    q = quantization(scheme)
    weight = normal(500, 288, seed=1) * 0.05
    weight[0] = torch.arange(288) / 2 - 72.0
    weight[0, 0] = 127.0  # scale 1: every other weight of the row is a tie
    scale = weight_scale(weight, q, served=torch.float32)
    assert torch.equal(Int8Tensor.from_hp(weight, PerRow(), scale=scale).qdata, weight_codes(weight, scale, q))
    chosen = Int8Tensor.from_hp(weight, PerRow())
    torch.testing.assert_close(chosen.scale * 127.5, scale * 127, rtol=1e-6, atol=0)
    apart = (chosen.qdata.int() - weight_codes(weight, scale, q)).abs()
    assert apart.max() == 1


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_int4_codes_and_scales_are_torchaos(group_size: int) -> None:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    q = quantization("int4_weight", group_size)
    weight = normal(300, 512, seed=2) * 0.05
    ours = weight_scale(weight, q, served=torch.float32)
    theirs = IntxUnpackedToInt8Tensor.from_hp(weight, (1, group_size), torch.int4)  # type: ignore[attr-defined]
    assert torch.equal(theirs.scale, ours)
    assert torch.equal(theirs.qdata, weight_codes(weight, ours, q))
    assert torch.equal(theirs.dequantize(), fake_quant_weight(weight, q, served=torch.float32))


def test_int4_scales_of_bfloat16_weights_are_torchaos() -> None:
    """Codes are not: torchao divides in bfloat16 (1 / scale and the product are rounded to it), we in float32."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    q = quantization("int4_weight")
    weight = (normal(300, 512, seed=2) * 0.05).bfloat16()
    ours = weight_scale(weight, q, served=torch.bfloat16)
    theirs = IntxUnpackedToInt8Tensor.from_hp(weight, (1, 32), torch.int4)  # type: ignore[attr-defined]
    assert torch.equal(theirs.scale.float(), ours)
    apart = (theirs.qdata.int() - weight_codes(weight, ours, q)).abs()
    assert apart.max() == 1
    assert apart.float().mean() < 0.02


# ---- activations --------------------------------------------------------------------------------------------------


def activations(served: torch.dtype) -> Tensor:
    x = normal(6, 64, seed=7) * 3
    x[1] = 0
    x[2] = torch.arange(64) / 2 - 10.0
    x[2, 0] = 127.0  # token scale 1: ties
    x[3] = x[3].abs()
    x[4] *= 100
    return x


@SERVED
def test_activations_per_token_equal_a_plain_loop(served: torch.dtype) -> None:
    x = activations(served)
    expected = []
    for row in x.tolist():
        values = [rounded(v, served) for v in row]
        scale = f32(max(abs(v) for v in values)) / f32(127)
        codes = [clamp(round(float(v * (f32(1) / scale))), -128, 127) if scale > 0 else 0 for v in values]
        expected.append([float(f32(c) * scale) for c in codes])
    found = fake_quant_activation(x, Activation.token, served=served, static=None)
    assert found.tolist() == expected
    assert found[1].tolist() == [0.0] * 64
    assert found[2, 1:6].tolist() == [-10.0, -9.0, -8.0, -8.0, -8.0]  # of -9.5, -9, -8.5, -8, -7.5


@SERVED
def test_float8_activations_per_token_equal_a_plain_loop(served: torch.dtype) -> None:
    x = activations(served)
    expected = []
    for row in x.tolist():
        values = [rounded(v, served) for v in row]
        scale = f32(max(abs(v) for v in values)) / f32(448)
        codes = [e4m3(clamp(float(v * (f32(1) / scale)), -448, 448)) if scale > 0 else 0.0 for v in values]
        expected.append([float(f32(c) * scale) for c in codes])
    found = fake_quant_activation(x, Activation.token, served=served, floating=True, static=None)
    assert found.tolist() == expected


@SERVED
@pytest.mark.parametrize(("low", "high"), [(-1.0, 7.0), (-5.5, 5.0), (0.0, 3.0), (-300.0, 0.0)])
def test_static_activations_equal_a_plain_loop(low: float, high: float, served: torch.dtype) -> None:
    grid = scale_of_range(low, high)
    x = activations(served)
    expected = []
    for row in x.tolist():
        values = [rounded(v, served) for v in row]
        inverse = f32(1) / f32(grid.scale)
        # multiplied and added with one rounding to float32: float64 holds the product exactly
        moved = [f32(float(v) * float(inverse) + grid.zero_point) for v in values]
        codes = [clamp(round(float(m)), -128, 127) for m in moved]
        expected.append([float(f32(c - grid.zero_point) * f32(grid.scale)) for c in codes])
    found = fake_quant_activation(x, Activation.tensor, served=served, static=grid)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("zero_point", "values"),
    [
        # the zero point is added before rounding, so an odd one turns which half is even: 0.5 + 1 = 1.5 is code 2,
        # which stands for 1; 1.5 + 1 = 2.5 is code 2, too
        (1, {0.5: 1.0, 1.5: 1.0, 2.5: 3.0, -0.5: -1.0, -1.5: -1.0}),
        (0, {0.5: 0.0, 1.5: 2.0, 2.5: 2.0, -0.5: 0.0, -1.5: -2.0}),
        (2, {0.5: 0.0, 1.5: 2.0, 2.5: 2.0, 126.0: 125.0, -131.0: -130.0}),
    ],
)
def test_static_rounding_is_half_to_even_after_the_zero_point(zero_point: int, values: dict[float, float]) -> None:
    grid = ActivationScale(scale=1.0, zero_point=zero_point)
    x = torch.tensor([list(values)])
    found = fake_quant_activation(x, Activation.tensor, served=torch.float32, static=grid)
    assert found.tolist() == [list(values.values())]


@pytest.mark.parametrize(
    ("x", "scale", "zero_point", "code", "rounded_twice"),
    [
        (691.424560546875, 5.179210186004639, -123, 11, 10),
        (5.212135314941406, 0.1708897054195404, -127, -97, -96),
        (126.75838470458984, 4.024075984954834, 6, 37, 38),
    ],
)
def test_static_codes_are_rounded_once_by_the_multiply_add(
    x: float, scale: float, zero_point: int, code: int, rounded_twice: int
) -> None:
    inverse = f32(1) / f32(scale)
    assert round(float(f32(float(f32(x)) * float(inverse) + zero_point))) == code
    assert round(float(f32(x) * inverse + f32(zero_point))) == rounded_twice
    grid = ActivationScale(scale=scale, zero_point=zero_point)
    found = fake_quant_activation(torch.tensor([[x]]), Activation.tensor, served=torch.float32, static=grid)
    assert found.item() == float(f32(code - zero_point) * f32(scale))


@SERVED
def test_asymmetric_activations_are_torchaos(served: torch.dtype) -> None:
    """torchao's own linear with the identity as weight (codes 0 and 1, scale 1) gives the activations back exactly."""
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    eye = IntxUnpackedToInt8Tensor(
        torch.eye(64, dtype=torch.int8),
        torch.ones(64, 2, dtype=served),
        torch.zeros(64, 2, dtype=torch.int8),
        torch.int4,  # type: ignore[attr-defined]
        (1, 32),
        served,
        IntxUnpackedToInt8TensorActivationQuantization("int8_asym_per_token"),
    )
    x = activations(served)
    for rows in (x, x.reshape(2, 3, 64)):
        found = fake_quant_activation(rows, Activation.token_asymmetric, served=served, static=None)
        assert found.dtype is torch.float32
        assert torch.equal(found, F.linear(rows.to(served), eye).float())
    assert found.reshape(6, 64)[1].eq(0).all()


@SERVED
def test_without_activation_codes_the_input_is_rounded_to_what_the_engine_sees(served: torch.dtype) -> None:
    x = activations(served)
    found = fake_quant_activation(x, Activation.none, served=served, static=None)
    assert found.tolist() == [[float(rounded(v, served)) for v in row] for row in x.tolist()]


def test_a_static_scheme_without_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="needs scales from calibration"):
        fake_quant_activation(torch.ones(1, 4), Activation.tensor, served=torch.float32, static=None)


GRID = ActivationScale(scale=0.05, zero_point=-3)


@pytest.mark.parametrize("activation", list(Activation))
def test_bfloat16_inputs_are_computed_in_float32_and_rounded_once(activation: Activation) -> None:
    x = activations(torch.bfloat16).bfloat16()
    found = fake_quant_activation(x, activation, served=torch.bfloat16, static=GRID)
    wide = fake_quant_activation(x.float(), activation, served=torch.bfloat16, static=GRID)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wide.bfloat16())


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("activation", list(Activation))
def test_the_gradient_of_activations_is_the_upstream_gradient(activation: Activation, dtype: torch.dtype) -> None:
    x = activations(torch.bfloat16).to(dtype).requires_grad_()
    y = fake_quant_activation(x, activation, served=torch.bfloat16, static=GRID)
    upstream = normal(*x.shape, seed=9).to(dtype)
    y.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)  # also where codes are cut off: GRID covers a fifth of x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", [*INTEGER, "fp8_dynamic"])
def test_the_gradient_of_a_weight_is_the_upstream_gradient(scheme: str, dtype: torch.dtype) -> None:
    weight = normal(5, 64).to(dtype).requires_grad_()
    upstream = normal(5, 64, seed=9).to(dtype)
    fake_quant_weight(weight, quantization(scheme), served=torch.bfloat16).backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_straight_through_is_exactly_the_value() -> None:
    # x + (q - x) would be 0 here
    x = torch.tensor([1e8], requires_grad=True)
    y = straight_through(x, lambda _: torch.tensor([1.5]))
    assert y.item() == 1.5


# ---- static scales ------------------------------------------------------------------------------------------------


def engine_formula(grid: ActivationScale) -> tuple[float, int]:
    """What vLLM makes of scale and zero point when it rebuilds the ranges of fused layers, in float32."""
    scale, zero = f32(grid.scale), grid.zero_point
    rmax, rmin = scale * f32(127 - zero), scale * f32(-128 - zero)
    again = (rmax - rmin) / f32(255)
    return float(again), round(float(f32(-128) - rmin / again))


def random_ranges(count: int) -> list[tuple[float, float]]:
    rng = random.Random(0)
    ranges = []
    for i in range(count):
        size = 10 ** rng.uniform(-6, 5)
        low, high = sorted((rng.uniform(-1, 1) * size, rng.uniform(-1, 1) * size))
        if i % 5 == 0:  # after a SiLU or a norm ranges are lopsided
            low, high = -0.01 * abs(low), abs(high)
        if i % 7 == 0:
            low, high = 0.0, abs(high) + 1e-9
        if i % 11 == 0:
            low, high = -abs(low) - 1e-9, 0.0
        ranges.append((low, high))
    return ranges


def test_a_scale_covers_its_range_and_is_a_fixed_point_of_the_engines_formula() -> None:
    for low, high in random_ranges(5000):
        grid = scale_of_range(low, high)
        assert grid.scale == float(f32(grid.scale)) > 0
        assert -128 <= grid.zero_point <= 127
        assert engine_formula(grid) == (grid.scale, grid.zero_point), (low, high)
        width = max(high, 0.0) - min(low, 0.0)
        assert grid.scale == pytest.approx(width / 255, rel=2**-15)  # rounded up to 16 significant bits
        # the zero point is a whole code, so an end may lie half a step beyond the last one, and no more
        assert (-128 - grid.zero_point) * grid.scale <= min(low, 0.0) + 0.5001 * grid.scale
        assert (127 - grid.zero_point) * grid.scale >= max(high, 0.0) - 0.5001 * grid.scale


@pytest.mark.parametrize(
    ("low", "high"),
    # repeating the engine's formula from the first scale moves these on for ever, or for many rounds
    [(-0.011423244703982996, 0.8762774705894386), (-6056.500824154407, 18.725817507648813)],
)
def test_a_drifting_range_is_a_fixed_point_too(low: float, high: float) -> None:
    grid = scale_of_range(low, high)
    assert engine_formula(grid) == (grid.scale, grid.zero_point)
    plain = ActivationScale(scale=float((f32(high) - f32(low)) / f32(255)), zero_point=grid.zero_point)
    assert engine_formula(plain)[0] != plain.scale


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [
        (0.0, 255.0, 1.0, -128),
        (-128.0, 127.0, 1.0, 0),
        (-255.0, 0.0, 1.0, 127),
        (3.0, 510.0, 2.0, -128),  # 0 is always covered
        (-510.0, -3.0, 2.0, 127),
    ],
)
def test_scales_of_plain_ranges(low: float, high: float, scale: float, zero_point: int) -> None:
    assert scale_of_range(low, high) == ActivationScale(scale=scale, zero_point=zero_point)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 0.0),
        (math.nan, 1.0),
        (0.0, math.nan),
        (-math.inf, 1.0),
        (0.0, math.inf),
        (-3e38, 3e38),
        (0.0, 1e-37),  # 1 / scale would be infinite
        (2.0, -2.0),
    ],
)
def test_a_range_that_makes_no_scale_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="a scale needs a finite range above 0, got"):
        scale_of_range(low, high)


def test_a_token_too_small_to_divide_by_is_zero_and_not_nan() -> None:
    x = torch.full((1, 32), 1e-38)
    x[0, 0] = 4e-37
    for floating in (False, True):
        found = fake_quant_activation(x, Activation.token, served=torch.float32, floating=floating, static=None)
        assert torch.isfinite(found).all()
        assert found.abs().max() <= 4e-37 * 1.01
