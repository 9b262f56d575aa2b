"""A quantized model as files: what goes into the safetensors, into their metadata and into config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.errors import ModelFolderError
from forge.quant.grid import dequantize, weight_codes, weight_scale
from forge.quant.pack import compressed_tensors_config, engine_tensors, pack
from forge.quant.scheme import Format, Plan, Quantization
from forge.rounding import dithered
from forge.types import ActivationScale

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Contents:
    """A quantized folder before it is written."""

    tensors: Iterable[tuple[str, Tensor]]
    config: dict[str, Any]
    """Keys to set in config.json."""
    metadata: dict[str, str]
    """Of the safetensors files."""
    layers: list[dict[str, Any]]
    """One row a linear layer: what quantizing it cost; filled while `tensors` is drawn."""


def check_exportable(
    quantization: Quantization, plan: Plan, format: Format, scales: Mapping[str, ActivationScale]
) -> None:
    """Refuse what cannot be written, before anything is gathered.

    Raises:
        ConfigError: the scheme has no such format.
        ModelFolderError: a layer of a static scheme has no activation scale.
    """
    quantization.check_format(format)
    if quantization.scheme.static and (missing := sorted(set(plan.quantized) - set(scales))):
        raise ModelFolderError(f"no activation scale for {', '.join(missing[:5])} ({len(missing)} layers): calibrate")


def folder_contents(
    weights: Iterable[tuple[str, Tensor]],
    quantization: Quantization,
    plan: Plan,
    format: Format,
    *,
    scales: Mapping[str, ActivationScale],
    served: torch.dtype,
) -> Contents:
    """What a quantized folder of a model holds; `check_exportable` has passed.

    Args:
        weights: every weight, finite, by Hugging Face name, in the dtype the trainer computes in.
        scales: activation scales of a static scheme by module name.
        served: dtype of what is not quantized.
    """
    rows: list[dict[str, Any]] = []
    if format is Format.compressed_tensors:
        return Contents(
            tensors=_compressed(weights, quantization, plan, scales, served, rows),
            config={"quantization_config": compressed_tensors_config(quantization, plan)},
            metadata={},
            layers=rows,
        )
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    from forge.quant.torchao_tensors import config_dict, quantized_tensor

    whole: dict[str, Tensor] = {}
    for name, weight in weights:
        module = name.removesuffix(".weight")
        if module in plan.quantized:
            scale = weight_scale(weight, quantization, served=served)
            codes = weight_codes(weight, scale, quantization)
            rows.append(_layer(module, weight, quantization, served))
            whole[name] = quantized_tensor(codes, scale, quantization, served=served)
        else:
            whole[name] = dithered(weight, dtype=served)
    tensors, metadata = flatten_tensor_state_dict(whole)
    return Contents(
        tensors=tensors.items(),
        config={
            "quantization_config": {
                "quant_method": "torchao",
                "quant_type": {"default": config_dict(quantization)},
                "modules_to_not_convert": sorted({"lm_head", *plan.left}),
            }
        },
        metadata=metadata,
        layers=rows,
    )


def _compressed(
    weights: Iterable[tuple[str, Tensor]],
    quantization: Quantization,
    plan: Plan,
    scales: Mapping[str, ActivationScale],
    served: torch.dtype,
    rows: list[dict[str, Any]],
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        module = name.removesuffix(".weight")
        if module not in plan.quantized or module == name:
            yield name, dithered(weight, dtype=served)
            continue
        rows.append(_layer(module, weight, quantization, served))
        yield from engine_tensors(pack(module, weight, quantization, served=served), quantization, scales).items()


def _layer(module: str, weight: Tensor, quantization: Quantization, served: torch.dtype) -> dict[str, Any]:
    scale = weight_scale(weight, quantization, served=served)
    restored = dequantize(weight_codes(weight, scale, quantization), scale, quantization, served=served)
    error = restored - weight.float()
    return {
        "layer": module,
        "shape": list(weight.shape),
        "scheme": quantization.scheme.name,
        "weight_mean_abs_error": float(error.abs().mean()),
        "weight_relative_error": float(error.norm() / weight.float().norm().clamp(min=1e-30)),
        "output_relative_error": None,
        "range_over_std": None,
        "saturated_share": None,
    }
