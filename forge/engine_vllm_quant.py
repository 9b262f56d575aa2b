"""Quantized weights in a vLLM engine: how it starts without any, and how live ones are swapped in.

vLLM's own `reload_weights` is wrong for quantized layers on a CPU (0.32): the kernel's handle keeps pointing into the
tensors that were replaced. So every linear layer is built again as at start: parameters, loading, kernel preparation.
The functions that take a `worker` run in the process that holds the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forge.quant import Format, Plan, Quantization
from forge.quant.pack import compressed_tensors_config, engine_tensors, unpack_int4
from forge.types import ActivationScale

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused layers and the Hugging Face layers whose rows they hold, in order."""


def engine_arguments(quantization: Quantization, plan: Plan) -> dict[str, Any]:
    """Engine arguments that make vLLM build the scheme's layers for an unquantized folder.

    With compressed-tensors nothing is read from the folder: the first published version is the first weights. torchao
    in vLLM quantizes what it reads, and the first version replaces that.
    """
    if quantization.scheme.formats[0] is Format.compressed_tensors:
        return {
            "load_format": "dummy",
            "hf_overrides": {"quantization_config": compressed_tensors_config(quantization, plan)},
        }
    return {
        "quantization": "torchao",
        "hf_overrides": {"quantization_config_dict_json": json.dumps(torchao_config_dict(quantization, plan))},
    }


def torchao_config_dict(quantization: Quantization, plan: Plan) -> dict[str, Any]:
    """torchao's configuration as it stands in config.json, with the layers that are left out."""
    from torchao.core.config import config_to_dict
    from torchao.quantization import ModuleFqnToConfig

    from forge.quant.torchao_tensors import base_config

    base = base_config(quantization)
    names = {engine_name(n): None for n in plan.left}
    result: dict[str, Any] = config_to_dict(ModuleFqnToConfig({"_default": base, **names}))
    return result


def engine_name(module: str) -> str:
    """vLLM's name of the layer that holds a Hugging Face layer."""
    parent, _, leaf = module.rpartition(".")
    fused = next((f for f, members in FUSED.items() if leaf in members), leaf)
    return f"{parent}.{fused}" if parent else fused


def load_quantized(
    worker: Any, tensors: Mapping[str, Tensor], quantization: Quantization, scales: Mapping[str, ActivationScale]
) -> None:
    """Replace all weights of the model by those of a published version.

    Args:
        tensors: by Hugging Face name, low-bit ones as they travelled.
        scales: activation scales of the version, by module name.
    """
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    served = worker.model_runner.model_config.dtype
    torchao = quantization.scheme.formats[0] is Format.torchao
    if torchao:
        plain, packed = _split_torchao(tensors, quantization, served)
    else:
        plain, packed = engine_tensors(tensors, quantization, scales), {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(served)  # kernels take their output dtype from it
    try:
        with set_current_vllm_config(worker.vllm_config):
            rebuilt = [layer for name, layer in _linears(model) if name not in packed]
            for layer in rebuilt:
                _create_again(layer)
            for name, layer in _linears(model):
                if name in packed:
                    _replace_torchao(layer, packed[name])
            model.load_weights(iter(plain.items()))
            for layer in rebuilt:
                layer.quant_method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(before)


def _linears(model: Any) -> list[tuple[str, Any]]:
    from vllm.model_executor.layers.linear import LinearBase

    return [(n, m) for n, m in model.named_modules() if isinstance(m, LinearBase)]


def _create_again(layer: Any) -> None:
    """Give a layer fresh, loadable parameters; a bias is loadable already."""
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    for name in [n for n, _ in layer.named_parameters(recurse=False) if n != "bias"]:
        delattr(layer, name)
    # the plain attributes that a kernel left in place of parameters it has packed
    for name in ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
                 "input_scale", "input_zero_point", "azp_adj", "cpu_linear"):  # fmt: skip
        if name in layer.__dict__:
            del layer.__dict__[name]
        layer._parameters.pop(name, None)
    method = layer.quant_method
    layer.quant_method.create_weights(
        layer=layer,
        input_size_per_partition=layer.input_size_per_partition,
        output_partition_sizes=layer.output_partition_sizes,
        input_size=layer.input_size,
        output_size=layer.output_size,
        params_dtype=layer.params_dtype,
        weight_loader=(
            layer.weight_loader_v2 if type(method).__name__ in WEIGHT_LOADER_V2_SUPPORTED else layer.weight_loader
        ),
    )


def _split_torchao(
    tensors: Mapping[str, Tensor], quantization: Quantization, served: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Plain tensors, and the quantized tensor of every fused layer by vLLM's name."""
    from forge.quant.torchao_tensors import quantized_tensor

    plain: dict[str, Tensor] = {}
    rows: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_scale":
            continue
        scale = tensors.get(f"{module}.weight_scale")
        if scale is None:
            plain[name] = tensor
            continue
        codes = unpack_int4(tensor) if leaf == "weight_packed" else tensor
        rows.setdefault(engine_name(module), {})[module.rpartition(".")[2]] = (codes, scale)
    packed: dict[str, Tensor] = {}
    for name, members in rows.items():
        order = FUSED.get(name.rpartition(".")[2], tuple(members))
        codes = torch.cat([members[m][0] for m in order])
        scale = torch.cat([members[m][1] for m in order])
        packed[name] = quantized_tensor(codes, scale, quantization, served=served)
    return plain, packed


def _replace_torchao(layer: Any, weight: Tensor) -> None:
    from torchao.prototype.tensor_conversion.api import convert_to_packed_tensor_based_on_current_hardware

    layer.weight = torch.nn.Parameter(convert_to_packed_tensor_based_on_current_hardware(weight), requires_grad=False)
