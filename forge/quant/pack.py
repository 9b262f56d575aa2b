"""Low-bit tensors as they travel and lie in files, named as compressed-tensors names them.

q_proj.weight ── int8_*        q_proj.weight int8 [o, i], q_proj.weight_scale float32 [o, 1]
                 int4, 8da4w   q_proj.weight_packed int32 [o, i/8], q_proj.weight_scale served dtype [o, i/group]
                 fp8_dynamic   q_proj.weight float8_e4m3fn [o, i], q_proj.weight_scale float32 [o, 1]
int8_static adds q_proj.input_scale float32 [1] and q_proj.input_zero_point int8 [1]: they are not weights, so they
travel in the manifest. What can be derived (weight_shape) does not travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forge.quant.grid import weight_codes, weight_scale
from forge.quant.scheme import Activation, Plan, Quantization
from forge.types import ActivationScale, TensorSpec

CODES_IN_INT32 = 8
"""int4 codes that one int32 holds."""


def pack(module: str, weight: Tensor, quantization: Quantization, *, served: torch.dtype) -> dict[str, Tensor]:
    """Low-bit tensors of a weight (or of a shard of its rows) by name.

    Args:
        module: Hugging Face name of the layer.
        weight: float [rows, inputs], in the dtype the trainer computes in.
    """
    scale = weight_scale(weight, quantization, served=served)
    on_grid = weight_codes(weight, scale, quantization)
    if quantization.scheme.bits == 4:
        return {f"{module}.weight_packed": pack_int4(on_grid), f"{module}.weight_scale": scale.to(served)}
    return {f"{module}.weight": on_grid, f"{module}.weight_scale": scale}


def codes(packed: Mapping[str, Tensor]) -> Tensor:
    """The codes [rows, inputs] among what `pack` made."""
    name, tensor = next(iter(packed.items()))
    return unpack_int4(tensor) if name.endswith("weight_packed") else tensor


def packed_specs(
    module: str, shape: tuple[int, int], quantization: Quantization, *, served: str
) -> dict[str, TensorSpec]:
    """Shapes and dtypes of what `pack` makes of a whole weight."""
    outputs, inputs = shape
    scheme = quantization.scheme
    groups = inputs // quantization.group_size if scheme.grouped else 1
    if scheme.bits == 4:
        weight = {f"{module}.weight_packed": TensorSpec(shape=(outputs, inputs // CODES_IN_INT32), dtype="int32")}
    else:
        dtype = "float8_e4m3fn" if scheme.floating else "int8"
        weight = {f"{module}.weight": TensorSpec(shape=(outputs, inputs), dtype=dtype)}
    scale = TensorSpec(shape=(outputs, groups), dtype=served if scheme.grouped else "float32")
    return {**weight, f"{module}.weight_scale": scale}


def quantized_specs(
    specs: Mapping[str, TensorSpec], quantization: Quantization, *, served: str
) -> dict[str, TensorSpec]:
    """What a published version holds, from the unquantized model's tensors; order is kept."""
    result: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        module = name.removesuffix(".weight")
        if is_linear(name, spec) and quantization.selects(module):
            outputs, inputs = spec.shape
            result |= packed_specs(module, (outputs, inputs), quantization, served=served)
        else:
            result[name] = spec
    return result


def linear_shapes(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer by module name."""
    return {
        name.removesuffix(".weight"): (spec.shape[0], spec.shape[1])
        for name, spec in specs.items()
        if is_linear(name, spec)
    }


def is_linear(name: str, spec: TensorSpec) -> bool:
    """True for the weight of a linear layer of a decoder (by Hugging Face's names)."""
    return len(spec.shape) == 2 and name.endswith(".weight") and "embed" not in name


def num_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Bytes of all tensors together."""
    return sum(math.prod(s.shape) * getattr(torch, s.dtype).itemsize for s in specs.values())


def pack_int4(values: Tensor) -> Tensor:
    """int4 codes [rows, inputs] in [-8, 7] as int32 [rows, inputs / 8]: code + 8, lowest bits first."""
    nibbles = (values.to(torch.int32) + 8).reshape(values.shape[0], -1, CODES_IN_INT32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    # disjoint bits: a sum in int32 (wrapping) is the bitwise or, and `sum` would widen to int64
    packed: Tensor = (nibbles << shifts).sum(-1, dtype=torch.int32)
    return packed


def unpack_int4(packed: Tensor) -> Tensor:
    """The int8 codes that `pack_int4` packed."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles - 8).to(torch.int8).reshape(packed.shape[0], -1)


def engine_tensors(
    tensors: Mapping[str, Tensor],
    quantization: Quantization,
    scales: Mapping[str, ActivationScale],
) -> dict[str, Tensor]:
    """A compressed-tensors checkpoint from the tensors that travelled: adds what was derived or in the manifest.

    Args:
        scales: by module name; empty unless the scheme is static.
    """
    full: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full[name] = tensor
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            full[f"{module}.weight_shape"] = torch.tensor(
                [tensor.shape[0], tensor.shape[1] * CODES_IN_INT32], dtype=torch.int64
            )
        if leaf == "weight_scale" and quantization.scheme.static:
            scale = scales[module]
            full[f"{module}.input_scale"] = torch.tensor([scale.scale], dtype=torch.float32)
            full[f"{module}.input_zero_point"] = torch.tensor([scale.zero_point], dtype=torch.int8)
    return full


def compressed_tensors_config(quantization: Quantization, plan: Plan) -> dict[str, Any]:
    """`quantization_config` of a compressed-tensors folder's config.json."""
    scheme = quantization.scheme
    kind = "float" if scheme.floating else "int"
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": kind,
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if scheme.grouped else "channel",
    }
    if scheme.grouped:
        weights["group_size"] = quantization.group_size
    inputs = None
    if scheme.activation is not Activation.none:
        inputs = {
            "num_bits": 8,
            "type": kind,
            "symmetric": scheme.activation is Activation.token,
            "dynamic": not scheme.static,
            "strategy": "tensor" if scheme.static else "token",
        }
    name = "pack-quantized" if scheme.grouped else "float-quantized" if scheme.floating else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head", *(n for n in plan.left if n != "lm_head")],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": name,
            }
        },
    }
