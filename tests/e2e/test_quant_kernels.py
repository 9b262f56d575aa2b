"""The grids against vLLM's own CPU kernels, bit for bit, without an engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from forge.quant import SCHEMES, Activation, Quantization  # noqa: E402
from forge.quant.grid import dequantize, fake_quant_activation, weight_codes, weight_scale  # noqa: E402
from forge.types import ActivationScale  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ops() -> Any:
    import vllm._C
    from vllm import _custom_ops

    assert vllm._C is not None
    return _custom_ops


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)) * torch.arange(64)[:, None] / 10
    x[5, :80] = (torch.arange(80) - 40) * 0.5  # ties
    return x.to(dtype)  # the first row is all zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_quantized_as_the_kernel_does(ops: Any, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    codes, scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    ours = fake_quant_activation(x.float(), Activation.token, served=dtype, static=None)
    assert torch.equal(ours, codes.float() * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [(0.031, 17), (0.05, -100), (0.013, 127), (1.0, 1), (0.5, 0)])
def test_static_inputs_are_quantized_as_the_kernel_does(ops: Any, dtype: torch.dtype, grid: tuple[float, int]) -> None:
    x = inputs(dtype)
    static = ActivationScale(scale=float(torch.tensor(grid[0])), zero_point=grid[1])
    codes, scale, zero = ops.onednn_scaled_int8_quant(
        x, torch.tensor(static.scale), torch.tensor(grid[1], dtype=torch.int32), False
    )
    ours = fake_quant_activation(x.float(), Activation.tensor, served=dtype, static=static)
    assert torch.equal(ours, (codes.float() - zero) * scale)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_w8a8_layer_computes_our_function(ops: Any, scheme: str, dtype: torch.dtype) -> None:
    q = Quantization(scheme=SCHEMES[scheme])
    w = torch.randn(96, 576, generator=torch.Generator().manual_seed(1)) * 0.05
    weight_s = weight_scale(w, q, served=dtype)
    codes = weight_codes(w, weight_s, q)
    x, dynamic = inputs(dtype), scheme == "int8_dynamic"
    static = None if dynamic else ActivationScale(scale=0.03125, zero_point=9)
    handler = ops.create_onednn_scaled_mm(codes.t(), weight_s, dtype, dynamic, not dynamic, 32)
    xq, xs, xz = ops.onednn_scaled_int8_quant(
        x,
        None if static is None else torch.tensor(static.scale),
        None if static is None else torch.tensor(static.zero_point, dtype=torch.int32),
        dynamic,
    )
    theirs = torch.empty(64, 96, dtype=dtype)
    adjust = (codes.float().sum(1) * weight_s.squeeze(1))[None]
    ops.onednn_scaled_mm(handler, xq, theirs, xs, xz, adjust, None)
    ours = torch.nn.functional.linear(
        fake_quant_activation(x.float(), q.scheme.activation, served=dtype, static=static),
        dequantize(codes, weight_s, q, served=dtype),
    )
    # the kernel sums integers, we sum their scaled values in float32: 1e-5 of the largest output apart, then rounded
    allowed = 1e-5 * ours.abs().max() + (theirs.float().abs() * 2**-8 if dtype is torch.bfloat16 else 0)
    assert ((ours - theirs.float()).abs() <= allowed).all()


def test_a_w4a16_layer_computes_our_function(ops: Any) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
    from vllm.scalar_type import scalar_types

    q = Quantization(scheme=SCHEMES["int4_weight"])
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 0.05
    scale = weight_scale(w, q, served=torch.bfloat16)
    codes = weight_codes(w, scale, q)
    packed = pack_quantized_values_into_int32((codes.int() + 8).t().contiguous(), scalar_types.uint4b8, 1)
    packed = packed.view(128, -1, 2).permute(1, 0, 2).reshape(-1, 256).contiguous()
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    theirs = ops.cpu_gemm_wna16(
        input=x,
        q_weight=packed,
        scales=scale.bfloat16().t().contiguous(),
        zeros=None,
        bias=None,
        pack_factor=8,
        isa_hint="vec",
    )
    ours = x.float() @ dequantize(codes, scale, q, served=torch.bfloat16).t()
    assert torch.equal(theirs, ours.bfloat16())
