"""Prepare and convert: one function, whatever holds it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge.errors import ConfigError
from forge.quant import SCHEMES, Quantization
from forge.quant.grid import weight_codes, weight_scale
from forge.quant.layers import FakeQuantLinear, convert, prepare
from forge.quant.torchao_tensors import quantized_tensor
from forge.types import ActivationScale

ALL = ["int8_dynamic", "int8_static", "int4_weight", "8da4w", "int8_weight", "fp8_dynamic"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(64, 96)
        self.gate_proj = nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64)
        self.lm_head = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def block(scheme: str, served: torch.dtype) -> tuple[Block, dict[str, FakeQuantLinear]]:
    torch.manual_seed(0)
    model = Block()
    prepared = prepare(model, Quantization(scheme=SCHEMES[scheme]), served=served)
    for layer in prepared.values():
        layer.static = ActivationScale(scale=0.03, zero_point=-5) if scheme == "int8_static" else None
    return model, prepared


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_the_converted_model_computes_what_the_prepared_one_did(scheme: str, served: torch.dtype) -> None:
    model, prepared = block(scheme, served)
    x = torch.randn(11, 64)
    plain = model(x)
    torch.manual_seed(0)
    assert torch.equal(plain, Block()(x)), "switched off, a prepared layer is a plain one"
    for layer in prepared.values():
        layer.enabled = True
    fake = model(x)
    assert not torch.equal(fake, plain)
    assert len(convert(model)) == 3
    assert torch.equal(model(x), fake)


@pytest.mark.parametrize("scheme", ["int8_weight", "int4_weight", "8da4w", "int8_dynamic"])
def test_torchaos_own_tensors_compute_the_prepared_function(scheme: str) -> None:
    model, prepared = block(scheme, torch.float32)
    for name, layer in prepared.items():
        layer.enabled = True
        x = torch.randn(7, layer.in_features)
        q = layer.quantization
        scale = weight_scale(layer.weight, q, served=torch.float32)
        tensor = quantized_tensor(weight_codes(layer.weight, scale, q), scale, q, served=torch.float32)
        with torch.no_grad():
            theirs, ours = F.linear(x, tensor, layer.bias), layer(x)
        if scheme in ("int4_weight", "8da4w"):
            assert torch.equal(ours, theirs), name
        elif scheme == "int8_weight":  # torchao scales the product once, we multiply scaled values: a rounding apart
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), name
        else:  # torchao's scale of a token is max / 127.5, that of the serving kernels max / 127: other grids
            assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.02, name


def test_names_stay_and_gradients_reach_the_weights() -> None:
    names = list(dict(Block().named_parameters()))
    model, prepared = block("int4_weight", torch.bfloat16)
    assert list(dict(model.named_parameters())) == names
    for layer in prepared.values():
        layer.enabled = True
    model(torch.randn(5, 64)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_each_is_done_exactly_once() -> None:
    model, _ = block("int8_dynamic", torch.bfloat16)
    with pytest.raises(ConfigError, match="prepared already"):
        prepare(model, Quantization(scheme=SCHEMES["int8_dynamic"]), served=torch.bfloat16)
    convert(model)
    with pytest.raises(ConfigError, match="no prepared layer"):
        convert(model)
    with pytest.raises(ConfigError, match="no prepared layer"):
        convert(Block())


def test_a_static_layer_without_scales_computes_nothing() -> None:
    model, prepared = block("int8_static", torch.bfloat16)
    for layer in prepared.values():
        layer.enabled, layer.static = True, None
    with pytest.raises(ValueError, match="calibration"):
        model(torch.randn(2, 64))
