"""prepare and convert: what a model computes on the grid is what the converted model and torchao's tensors compute."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.errors import ConfigError
from forge.quant import SCHEMES, Quantization
from forge.quant.grid import fake_quant_weight, scale_of_range
from forge.quant.layers import FakeQuantLinear, QuantLinear, convert, prepare, prepared_layers
from forge.quant.torchao_tensors import quantized_tensor

SERVED = pytest.mark.parametrize("served", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SERVABLE = [s.name for s in SCHEMES.values() if s.rollouts]
STATIC = scale_of_range(-1.5, 2.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=True)
        self.k_proj = nn.Linear(64, 64, bias=True)
        self.v_proj = nn.Linear(64, 64, bias=True)
        self.o_proj = nn.Linear(64, 64, bias=False)
        self.down_proj = nn.Linear(64, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.softmax(self.q_proj(x) * self.k_proj(x), -1) + self.v_proj(x)
        return F.silu(self.down_proj(x + self.o_proj(mixed)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 64)
        self.layers = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(96, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


NAMES = [f"layers.0.{n}_proj" for n in ("q", "k", "v", "o", "down")]
IDS = torch.arange(20).reshape(2, 10)


@pytest.fixture
def model() -> Small:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small()


def quantization(scheme: str, skip: str = "") -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], skip=skip)


def switch_on(layers: dict[str, FakeQuantLinear]) -> None:
    for layer in layers.values():
        layer.enabled, layer.static = True, STATIC


@pytest.mark.parametrize("scheme", SERVABLE)
def test_parameters_keep_name_identity_and_order(model: Small, scheme: str) -> None:
    before = dict(model.named_parameters())
    layers = prepare(model, quantization(scheme), served=torch.bfloat16)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[n] is before[n] for n in before)
    assert list(layers) == NAMES
    assert [n for n, _ in prepared_layers(model)] == NAMES
    assert type(model.lm_head) is nn.Linear


def test_names_are_hugging_faces_where_the_model_has_others(model: Small) -> None:
    layers = prepare(
        model,
        quantization("int8_dynamic", skip="model[.]layers[.]0[.]o_"),
        served=torch.float32,
        name_of="model.".__add__,
    )
    assert list(layers) == [f"model.{n}" for n in NAMES if "o_proj" not in n]
    assert [n for n, _ in prepared_layers(model)] == [n for n in NAMES if "o_proj" not in n]


def test_a_model_on_the_meta_device_can_be_prepared() -> None:
    with torch.device("meta"):
        model = Small()
    layers = prepare(model, quantization("int4_weight"), served=torch.float32)
    assert all(layer.weight.device.type == "meta" for layer in layers.values())


@pytest.mark.parametrize("scheme", SERVABLE)
def test_switched_off_it_is_the_plain_model(model: Small, scheme: str) -> None:
    plain = model(IDS)
    layers = prepare(model, quantization(scheme), served=torch.bfloat16)
    assert torch.equal(model(IDS), plain)
    switch_on(layers)
    assert not torch.equal(model(IDS), plain)


@SERVED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["model-float32", "model-bfloat16"])
@pytest.mark.parametrize("scheme", SERVABLE)
def test_prepared_and_converted_model_compute_the_same(
    model: Small, scheme: str, dtype: torch.dtype, served: torch.dtype
) -> None:
    model.to(dtype)
    layers = prepare(model, quantization(scheme), served=served)
    switch_on(layers)
    with torch.no_grad():
        prepared = model(IDS)
        converted = convert(model)
        assert torch.equal(model(IDS), prepared)
    assert list(converted) == NAMES
    assert not list(prepared_layers(model))
    left = {n for n, _ in model.named_parameters()}
    assert left == {"embed_tokens.weight", "lm_head.weight"}  # a converted layer holds codes and scales alone


@pytest.mark.parametrize("scheme", SERVABLE)
def test_the_grid_is_close_to_the_weights(model: Small, scheme: str) -> None:
    """Sanity of the above, which a constant would pass, too: half a step of the grid, and the cut-off of int4."""
    q = quantization(scheme)
    layer = prepare(model, q, served=torch.float32)["layers.0.o_proj"]
    error = (fake_quant_weight(layer.weight, q, served=torch.float32) - layer.weight).abs().max()
    # weights are uniform in +-1/8; the widest steps of e4m3 are 32 of 448
    step = 1 / 8 / (7.5 if q.scheme.bits == 4 else 448 / 32 if q.scheme.floating else 127)
    assert 0.3 * step < error < 0.51 * step


def served_by_torchao(layer: QuantLinear, x: Tensor, served: torch.dtype) -> Tensor:
    weight = quantized_tensor(layer.codes, layer.scale, layer.quantization, served=served)
    return F.linear(x.to(served), weight, layer.bias)  # type: ignore[arg-type]


def rows(count: int = 50) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


@SERVED
@pytest.mark.parametrize("scheme", ["int4_weight", "8da4w"])
def test_int4_layers_compute_exactly_what_torchaos_tensors_do(model: Small, scheme: str, served: torch.dtype) -> None:
    model.to(served)
    switch_on(prepare(model, quantization(scheme), served=served))
    with torch.no_grad():
        prepared = {n: layer(rows().to(served)) for n, layer in prepared_layers(model)}
        for name, layer in convert(model).items():
            assert torch.equal(served_by_torchao(layer, rows(), served), prepared[name])


def test_int8_weights_compute_what_torchaos_tensor_does(model: Small) -> None:
    """Not exactly: torchao multiplies by the scale after it has summed, so the sums round elsewhere."""
    switch_on(prepare(model, quantization("int8_weight"), served=torch.float32))
    with torch.no_grad():
        prepared = {n: layer(rows()) for n, layer in prepared_layers(model)}
        for name, layer in convert(model).items():
            torch.testing.assert_close(
                served_by_torchao(layer, rows(), torch.float32), prepared[name], rtol=0, atol=1e-5
            )


def test_int8_weights_served_in_bfloat16_differ_by_the_engines_two_roundings(model: Small) -> None:
    """The trainer computes in float32 on the grid served in bfloat16. torchao's sum and its product with the scale are
    rounded to bfloat16, by at most 2^-8 each: nothing else may differ."""
    switch_on(prepare(model, quantization("int8_weight", skip="[qkv]_proj"), served=torch.bfloat16))
    with torch.no_grad():
        prepared = {n: layer(rows(500)) for n, layer in prepared_layers(model)}
        for name, layer in convert(model).items():
            ours, theirs = prepared[name], served_by_torchao(layer, rows(500), torch.bfloat16).float()
            assert ((theirs - ours).abs() <= (2**-7 + 2**-16) * ours.abs() + 1e-6).all()


def test_int8_activations_of_torchao_are_another_function(model: Small) -> None:
    """Why int8_dynamic is not written as torchao: there a token's scale is max / 127.5 and code 128 is cut to 127;
    the engines' int8 kernels, and so the grid, take max / 127."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import Int8Tensor, QuantizeTensorToInt8Kwargs

    layer = prepare(model, quantization("int8_dynamic"), served=torch.float32)["layers.0.o_proj"]
    x = rows()
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    on_torchaos_grid = (x * (1 / scale)).round().clamp(-128, 127) * scale
    expected = F.linear(on_torchaos_grid, fake_quant_weight(layer.weight, layer.quantization, served=torch.float32))
    layer.enabled = True
    ours = layer(x)
    codes = convert(model)["layers.0.o_proj"]
    theirs = F.linear(
        x,
        Int8Tensor(
            codes.codes,
            codes.scale,
            block_size=[1, codes.codes.shape[1]],
            dtype=torch.float32,
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(granularity=PerRow()),
        ),
    )
    torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-5)
    assert 1e-3 < (theirs - ours).norm() / ours.norm() < 0.02


def test_prepared_twice_is_refused(model: Small) -> None:
    prepare(model, quantization("int8_weight"), served=torch.float32)
    with pytest.raises(ConfigError, match="the model is prepared already: convert it before"):
        prepare(model, quantization("int8_weight"), served=torch.float32)


def test_converting_what_is_not_prepared_is_refused(model: Small) -> None:
    with pytest.raises(ConfigError, match="the model has no prepared layer: prepare it first"):
        convert(model)
    prepare(model, quantization("int8_weight"), served=torch.float32)
    convert(model)
    with pytest.raises(ConfigError, match="convert it once"):
        convert(model)


def test_a_scheme_that_does_not_fit_changes_nothing(model: Small) -> None:
    q = Quantization(scheme=SCHEMES["int4_weight"], group_size=128)
    with pytest.raises(ConfigError, match="quant.group_size=128 does not divide the width 64"):
        prepare(model, q, served=torch.float32)
    assert not list(prepared_layers(model))


def test_a_static_layer_without_scales_raises(model: Small) -> None:
    layers = prepare(model, quantization("int8_static"), served=torch.float32)
    model(IDS)  # switched off it needs none
    for layer in layers.values():
        layer.enabled = True
    with pytest.raises(ValueError, match="needs scales from calibration"):
        model(IDS)
    converted = convert(model)
    with pytest.raises(ValueError, match="needs scales from calibration"):
        model(IDS)
    assert converted[NAMES[0]].static is None


def test_scales_of_a_static_layer_are_kept(model: Small) -> None:
    switch_on(prepare(model, quantization("int8_static"), served=torch.float32))
    assert all(layer.static == STATIC for layer in convert(model).values())


@pytest.mark.parametrize("scheme", SERVABLE)
def test_gradients_reach_every_parameter(model: Small, scheme: str) -> None:
    switch_on(prepare(model, quantization(scheme), served=torch.bfloat16))
    model(IDS).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.count_nonzero() > 0, name


@pytest.mark.parametrize("scheme", SERVABLE)
def test_the_gradient_is_that_of_the_layer_at_the_grids_values(model: Small, scheme: str) -> None:
    """Straight through: the weight's gradient is upstream^T x with x on its grid, the input's is upstream W on its."""
    q = quantization(scheme)
    layers = prepare(model, q, served=torch.float32)
    switch_on(layers)
    layer = layers["layers.0.q_proj"]
    x, upstream = rows(7).requires_grad_(), rows(57)[50:]
    layer(x).backward(upstream)
    weight = fake_quant_weight(layer.weight, q, served=torch.float32).detach()
    with torch.no_grad():
        eye = copy.deepcopy(layer)  # the identity as weight gives the activations' grid back
        eye.weight = nn.Parameter(torch.eye(64))
        eye.bias = None  # type: ignore[assignment]
        on_grid = eye(x)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-5, atol=1e-5)
    # the identity's own grid holds 1 up to a rounding, but for int4, whose largest code is 7 of 7.5
    one = float(fake_quant_weight(torch.eye(64), q, served=torch.float32)[0, 0])
    torch.testing.assert_close(layer.weight.grad, upstream.T @ (on_grid / one), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(layer.bias.grad, upstream.sum(0), rtol=1e-5, atol=1e-5)


def test_a_bias_is_kept_as_it_is(model: Small) -> None:
    block = model.layers[0]
    assert isinstance(block, Block)
    bias = block.q_proj.bias
    before = bias.detach().clone()
    layers = prepare(model, quantization("int8_dynamic"), served=torch.bfloat16)
    assert layers["layers.0.q_proj"].bias is bias
    assert layers["layers.0.o_proj"].bias is None
    converted = convert(model)
    assert torch.equal(converted["layers.0.q_proj"].bias, before)
    assert converted["layers.0.o_proj"].bias is None
    zero = torch.zeros(1, 64)
    assert torch.equal(converted["layers.0.q_proj"](zero), before[None])
