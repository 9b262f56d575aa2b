"""The grids against the kernels that serve them: vLLM's CPU operations, called without an engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.quant import SCHEMES, Activation, Quantization
from forge.quant.grid import dequantize, fake_quant_activation, scale_of_range, weight_codes, weight_scale
from forge.quant.layers import QuantLinear, convert, prepare
from forge.types import ActivationScale

pytestmark = pytest.mark.filterwarnings("default")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ZERO_POINTS = [-128, -127, -100, -3, 0, 1, 2, 17, 126, 127]


@pytest.fixture(scope="module")
def ops() -> Any:
    """vLLM's operations, compiled ones included."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm._C  # noqa: F401
    from vllm import _custom_ops

    return _custom_ops


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tricky(dtype: torch.dtype) -> Tensor:
    """Rows: random ones of several sizes, zeros, ties at a token scale of 1, one number alone, one sign."""
    x = normal(40, 256, seed=1) * torch.logspace(-3, 3, 40)[:, None]
    x[3] = 0
    x[4] = torch.arange(256) / 2 - 64.0
    x[4, 255] = 127.0
    x[5] = 0
    x[5, 17] = -0.37
    x[6] = x[6].abs()
    x[7] = -x[7].abs()
    return x.to(dtype)


# ---- activations --------------------------------------------------------------------------------------------------


@DTYPES
def test_int8_per_token_is_the_kernels_bit_for_bit(ops: Any, dtype: torch.dtype) -> None:
    x = tricky(dtype)
    codes, scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    ours = fake_quant_activation(x.float(), Activation.token, served=dtype, static=None)
    assert torch.equal(codes.float() * scale, ours)
    assert codes[3].eq(0).all()
    assert scale[3].item() == 0.0
    assert codes[4, 1:6].tolist() == [-64, -63, -62, -62, -62]  # of -63.5, -63, -62.5, -62, -61.5


@DTYPES
@pytest.mark.parametrize("zero_point", ZERO_POINTS)
def test_int8_with_static_scale_is_the_kernels_bit_for_bit(ops: Any, dtype: torch.dtype, zero_point: int) -> None:
    # scale 1 makes every other number of row 4 a tie; the others are usual scales, cut off and not
    for scale in (1.0, 0.031, 0.0137, 5.3):
        grid = ActivationScale(scale=float(torch.tensor(scale)), zero_point=zero_point)
        x = tricky(dtype)
        codes, _, _ = ops.onednn_scaled_int8_quant(
            x, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), False
        )
        ours = fake_quant_activation(x.float(), Activation.tensor, served=dtype, static=grid)
        assert torch.equal((codes.float() - zero_point) * torch.tensor(scale), ours)
        assert ours[3].eq(0).all()


@DTYPES
def test_calibrated_grids_are_served_as_they_are(ops: Any, dtype: torch.dtype) -> None:
    """The engine's own layer rebuilds scale and zero point from the ranges that they stand for."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig

    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=True, is_channelwise=True, input_symmetric=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the kernel takes its output's dtype from it
    try:
        for low, high in ((-1.7, 2.9), (-0.011423244703982996, 0.8762774705894386), (0.0, 3.1), (-4.4, 0.0)):
            layer = quant_linear("int8_static", dtype)
            layer.static = grid = scale_of_range(low, high)
            module = nn.Module()
            tensors = (
                layer.codes, layer.scale,
                torch.tensor([grid.scale], dtype=torch.float32), torch.tensor([grid.zero_point], dtype=torch.int8),
            )  # fmt: skip
            for name, tensor in zip(names, tensors, strict=False):
                module.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
            module.logical_widths = [layer.codes.shape[0]]  # type: ignore[assignment]
            kernel = CPUInt8ScaledMMLinearKernel(config, layer_param_names=names)
            kernel.process_weights_after_loading(module)
            assert float(module.input_scale) == grid.scale  # type: ignore[arg-type]
            assert int(module.input_zero_point) == grid.zero_point  # type: ignore[arg-type]
            x = (normal(33, 64, seed=4) * 1.3).to(dtype)
            assert_served(kernel.apply_weights(module, x, None), layer, x)
    finally:
        torch.set_default_dtype(before)


def test_the_kernel_rounds_once_when_it_adds_the_zero_point(ops: Any) -> None:
    """Where rounding the product first would give another code (once in a million numbers)."""
    for x, scale, zero_point, code in (
        (691.424560546875, 5.179210186004639, -123, 11),
        (5.212135314941406, 0.1708897054195404, -127, -97),
        (126.75838470458984, 4.024075984954834, 6, 37),
    ):
        row = torch.full((1, 64), x)
        codes, _, _ = ops.onednn_scaled_int8_quant(
            row, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), False
        )
        grid = ActivationScale(scale=scale, zero_point=zero_point)
        ours = fake_quant_activation(row, Activation.tensor, served=torch.float32, static=grid)
        assert codes.unique().tolist() == [code]
        assert torch.equal((codes.float() - zero_point) * torch.tensor(scale), ours)


# ---- products -----------------------------------------------------------------------------------------------------


def quant_linear(scheme: str, served: torch.dtype, *, outputs: int = 96, inputs: int = 64) -> QuantLinear:
    linear = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        linear.weight.copy_(normal(outputs, inputs, seed=2) * 0.05)
        linear.weight[7] = 0
    model = nn.ModuleDict({"o_proj": linear})
    prepare(model, Quantization(scheme=SCHEMES[scheme]), served=served)
    return convert(model)["o_proj"]


def assert_served(out: Tensor, layer: QuantLinear, x: Tensor, tolerance: float = 1e-5) -> None:
    """`out` is what the layer computes in float32, within the tolerance, rounded to the dtype of `out`."""
    assert out.dtype is x.dtype
    with torch.no_grad():
        ours = layer(x.float())
    low, high = ((ours + sign * tolerance).to(out.dtype) for sign in (-1, 1))
    assert ((low <= out) & (out <= high)).all(), f"differs by {(out.float() - ours).abs().max()}"


def scaled_mm(ops: Any, layer: QuantLinear, x: Tensor) -> Tensor:
    static = layer.static
    handler = ops.create_onednn_scaled_mm(layer.codes.t(), layer.scale, x.dtype, static is None, static is not None, 32)
    scale = zero = None
    if static is not None:
        scale, zero = torch.tensor(static.scale), torch.tensor(static.zero_point, dtype=torch.int32)
    codes, scale, zero = ops.onednn_scaled_int8_quant(x, scale, zero, static is None)
    out = torch.empty(x.shape[0], layer.codes.shape[0], dtype=x.dtype)
    adjust = layer.codes.float().sum(1)[None] * layer.scale.squeeze()
    ops.onednn_scaled_mm(handler, codes, out, scale, zero, adjust, None)
    return out


@DTYPES
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_int8_products_are_the_kernels(ops: Any, scheme: str, dtype: torch.dtype) -> None:
    layer = quant_linear(scheme, dtype)
    if scheme == "int8_static":
        layer.static = scale_of_range(-2.2, 2.8)
    x = normal(200, 64, seed=3).to(dtype)
    x[5] = 0
    out = scaled_mm(ops, layer, x)
    assert_served(out, layer, x)
    assert out[5].eq(0).all()
    assert out[:, 7].eq(0).all()  # its row of the weight is 0


@DTYPES
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_int8_products_are_exact_where_no_sum_is_rounded(ops: Any, scheme: str, dtype: torch.dtype) -> None:
    """With scales that are powers of two every product and sum is exact in float32, in any order of additions."""
    weight = normal(96, 64, seed=5).clamp(-1, 1) * 127 / 1024
    weight[:, 0] = 127 / 1024
    model = nn.ModuleDict({"o_proj": nn.Linear(64, 96, bias=False)})
    with torch.no_grad():
        model["o_proj"].weight.copy_(weight)  # type: ignore[operator]
    prepare(model, Quantization(scheme=SCHEMES[scheme]), served=dtype)
    layer = convert(model)["o_proj"]
    assert layer.scale.unique().tolist() == [2**-10]
    x = (normal(50, 64, seed=6).clamp(-1, 1) * 127 / 64).to(dtype)
    x[:, 3] = 127 / 64
    if scheme == "int8_static":
        layer.static = ActivationScale(scale=2**-6, zero_point=-5)
    with torch.no_grad():
        assert torch.equal(scaled_mm(ops, layer, x), layer(x.float()).to(dtype))


def wna16(ops: Any, codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
    from vllm.scalar_type import scalar_types

    inputs = codes.shape[1]
    unsigned = (codes.int() + 8).t().contiguous()
    packed = pack_quantized_values_into_int32(unsigned, scalar_types.uint4b8, 1)
    packed = packed.view(inputs, -1, 2).permute(1, 0, 2).reshape(-1, inputs * 2).contiguous()  # 16 outputs a block
    return ops.cpu_gemm_wna16(
        input=x,
        q_weight=packed,
        scales=scale.to(x.dtype).t().contiguous(),
        zeros=None,
        bias=None,
        pack_factor=8,
        isa_hint="vec",
    )


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_weights_are_the_kernels_bit_for_bit(ops: Any, group_size: int) -> None:
    """The identity as input reads the weight that the kernel multiplies with: code * scale rounded to bfloat16."""
    q = Quantization(scheme=SCHEMES["int4_weight"], group_size=group_size)
    weight = normal(64, 256, seed=7) * 0.05
    weight[9] = 0
    weight[10, :group_size] = 0
    scale = weight_scale(weight, q, served=torch.bfloat16)
    codes = weight_codes(weight, scale, q)
    out = wna16(ops, codes, scale, torch.eye(256, dtype=torch.bfloat16))
    assert torch.equal(out.t().float(), dequantize(codes, scale, q, served=torch.bfloat16))
    assert not torch.equal(out.t().float(), codes.float() * scale.repeat_interleave(group_size, 1))


def test_int4_products_are_the_kernels(ops: Any) -> None:
    layer = quant_linear("int4_weight", torch.bfloat16, outputs=96, inputs=128)
    x = normal(200, 128, seed=8).bfloat16()
    x[5] = 0
    out = wna16(ops, layer.codes, layer.scale, x)
    assert_served(out, layer, x)
    assert out[5].eq(0).all()
    # the bound is tight: without the rounding of code * scale a third of the outputs would be others
    unrounded = x.float() @ (layer.codes.float() * layer.scale.repeat_interleave(32, 1)).t()
    assert (unrounded.bfloat16() != out).float().mean() > 0.1
