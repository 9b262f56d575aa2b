"""The grids against plain loops, closed forms and torchao."""

from __future__ import annotations

import pytest
import torch
from torchao.quantization import PerRow
from torchao.quantization.quantize_.workflows import Int8Tensor

from forge.quant import SCHEMES, Activation, Quantization
from forge.quant.grid import (
    dequantize,
    fake_quant_activation,
    fake_quant_weight,
    scale_of_range,
    weight_codes,
    weight_scale,
)
from forge.quant.torchao_tensors import quantized_tensor
from forge.types import ActivationScale

BF16, F32 = torch.bfloat16, torch.float32


def make(scheme: str, group_size: int = 32) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], group_size=group_size)


def weight(rows: int = 12, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_int8_codes_are_those_of_a_plain_loop() -> None:
    w, q = weight(3, 8), make("int8_dynamic")
    scale = weight_scale(w, q, served=BF16)
    codes = weight_codes(w, scale, q)
    for r in range(3):
        largest = max(abs(float(v)) for v in w[r])
        assert float(scale[r, 0]) == pytest.approx(largest / 127, rel=1e-6)
        for c in range(8):
            assert int(codes[r, c]) == round(float(w[r, c]) / (largest / 127))


def test_int4_scales_are_rounded_once_and_values_are_rounded_as_the_kernel_does() -> None:
    w, q = weight(4, 64), make("int4_weight")
    scale = weight_scale(w, q, served=BF16)
    assert scale.shape == (4, 2)
    expected = (w.reshape(4, 2, 32).abs().amax(-1) / 7.5).to(BF16).float()
    assert torch.equal(scale, expected)
    codes = weight_codes(w, scale, q)
    assert int(codes.min()) >= -8
    assert int(codes.max()) <= 7
    values = dequantize(codes, scale, q, served=BF16)
    assert torch.equal(values, (codes.float() * scale.repeat_interleave(32, 1)).to(BF16).float())


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_weight", "8da4w", "int8_weight", "fp8_dynamic"])
def test_zero_rows_and_groups_stay_zero(scheme: str) -> None:
    w, q = weight(), make(scheme)
    w[2] = 0
    w[3, :32] = 0
    scale = weight_scale(w, q, served=BF16)
    values = dequantize(weight_codes(w, scale, q), scale, q, served=BF16)
    assert torch.isfinite(values).all()
    assert (values[2] == 0).all()
    assert (values[3, :32] == 0).all()
    assert scale[2].abs().sum() == 0


def test_int8_codes_are_torchaos() -> None:
    w, q = weight(64, 96), make("int8_weight")
    theirs = Int8Tensor.from_hp(w, granularity=PerRow())
    scale = weight_scale(w, q, served=F32)
    # torchao takes max / 127.5, we take max / 127 as the serving kernels do; on one scale the codes must agree
    codes = weight_codes(w, theirs.scale.float(), q)
    assert torch.equal(codes, theirs.qdata)
    assert torch.allclose(scale, w.abs().amax(1, keepdim=True) / 127)


def test_asymmetric_tokens_are_torchaos_own() -> None:
    x, w, q = torch.randn(9, 64) * 3, weight(16, 64), make("8da4w")
    scale = weight_scale(w, q, served=F32)
    codes = weight_codes(w, scale, q)
    theirs = torch.nn.functional.linear(x, quantized_tensor(codes, scale, q, served=F32))
    ours = torch.nn.functional.linear(
        fake_quant_activation(x, Activation.token_asymmetric, served=F32, static=None),
        dequantize(codes, scale, q, served=F32),
    )
    assert torch.equal(ours, theirs)


def test_a_token_has_its_own_scale() -> None:
    x = torch.randn(5, 7, 32, dtype=BF16) * torch.rand(5, 7, 1, dtype=BF16) * 9
    x[0, 0] = 0
    found = fake_quant_activation(x.float(), Activation.token, served=BF16, static=None)
    for i in range(5):
        for j in range(7):
            largest = float(x[i, j].float().abs().max())
            for v, f in zip(x[i, j].tolist(), found[i, j].tolist(), strict=True):
                assert abs(f - v) <= largest / 127 / 2 + 1e-6
    assert (found[0, 0] == 0).all()


def test_static_codes_round_half_to_even_after_the_zero_point() -> None:
    grid = ActivationScale(scale=1.0, zero_point=1)
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, 200.0, -200.0]])
    found = fake_quant_activation(x, Activation.tensor, served=F32, static=grid)
    # 0.5 + 1 is a tie that goes to 2, 1.5 + 1 one that goes to 2; codes end at 127 and -128
    assert found.tolist() == [[1.0, 1.0, 3.0, -1.0, 126.0, -129.0]]


def test_static_needs_scales() -> None:
    with pytest.raises(ValueError, match="calibration"):
        fake_quant_activation(torch.ones(1, 2), Activation.tensor, served=F32, static=None)


def test_scales_cover_the_range_and_survive_the_engines_arithmetic() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3000):
        low, high = ((torch.rand(2, generator=generator) * 2 - 1) * 10 ** float(torch.rand(1) * 6 - 3)).tolist()
        low, high = min(low, high), max(low, high)
        if max(high, 0) - min(low, 0) < 1e-30:
            continue
        s = scale_of_range(low, high)
        scale, zero = torch.tensor(s.scale), torch.tensor(s.zero_point)
        assert -128 <= s.zero_point <= 127
        top, bottom = scale * (127 - zero), scale * (-128 - zero)
        assert float(top) >= max(high, 0) - s.scale
        assert float(bottom) <= min(low, 0) + s.scale
        again = (top - bottom) / 255
        assert float(again) == s.scale
        assert int((-128 - bottom / again).round()) == s.zero_point


@pytest.mark.parametrize("bounds", [(0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_that_gives_no_scale_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite range"):
        scale_of_range(*bounds)


@pytest.mark.parametrize("activation", list(Activation))
def test_gradients_pass_straight_through(activation: Activation) -> None:
    x = torch.randn(3, 32, requires_grad=True)
    w = weight(4, 32).requires_grad_()
    upstream = torch.randn(3, 32)
    grid = ActivationScale(scale=0.02, zero_point=3)
    fake_quant_activation(x, activation, served=BF16, static=grid).backward(upstream)
    assert torch.equal(x.grad, upstream)  # type: ignore[arg-type]
    fake_quant_weight(w, make("int4_weight"), served=BF16).backward(torch.ones(4, 32))
    assert torch.equal(w.grad, torch.ones(4, 32))  # type: ignore[arg-type]
