"""Our codes and scales as torchao's tensors: what torchao's kernels, vLLM's torchao layers and its files hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.quant.scheme import Quantization

INT4: Any = getattr(torch, "int4")  # noqa: B009  (torch has it, its stubs do not)


def base_config(quantization: Quantization) -> Any:
    """torchao's configuration of a scheme.

    Raises:
        KeyError: torchao has no such scheme.
    """
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    group = PerGroup(quantization.group_size)
    builders = {
        "int8_weight": lambda: Int8WeightOnlyConfig(set_inductor_config=False),
        "int4_weight": lambda: IntxWeightOnlyConfig(weight_dtype=INT4, granularity=group),
        "8da4w": lambda: Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=group),
    }
    return builders[quantization.scheme.name]()


def config_dict(quantization: Quantization) -> dict[str, Any]:
    """The configuration as config.json holds it."""
    from torchao.core.config import config_to_dict

    result: dict[str, Any] = config_to_dict(base_config(quantization))
    return result


def quantized_tensor(codes: Tensor, scale: Tensor, quantization: Quantization, *, served: torch.dtype) -> Tensor:
    """A torchao tensor of the weight, which `torch.nn.functional.linear` computes with.

    Args:
        codes: int8 [outputs, inputs]; int4 codes lie in [-8, 7].
        scale: [outputs, 1] or [outputs, groups].
        served: dtype that the layer computes in.
    """
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from torchao.quantization.quantize_.workflows import Int8Tensor

    if quantization.scheme.bits == 4:
        activation = "int8_asym_per_token" if quantization.scheme.name == "8da4w" else None
        return IntxUnpackedToInt8Tensor(
            codes,
            scale.to(served),
            torch.zeros(scale.shape, dtype=torch.int8, device=scale.device),
            INT4,
            (1, quantization.group_size),
            served,
            activation,  # plain text: torchao's reader of safetensors does not know its own enum
        )
    return Int8Tensor(codes, scale, block_size=[1, codes.shape[1]], dtype=served)
