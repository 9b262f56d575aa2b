"""`prepare` and `convert`: a model's linear layers with fake-quantized, then with really quantized weights.

prepare(model, …)   nn.Linear ── FakeQuantLinear   same parameter, same name; trainable; can be switched
convert(model)      FakeQuantLinear ── QuantLinear  codes and scales; computes the same function
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.errors import ConfigError
from forge.quant.grid import (
    dequantize,
    fake_quant_activation,
    fake_quant_weight,
    weight_codes,
    weight_scale,
)
from forge.quant.scheme import Quantization
from forge.types import ActivationScale


class FakeQuantLinear(nn.Linear):
    """A linear layer that computes on the scheme's grid while it is `enabled`, and plainly while it is not."""

    quantization: Quantization
    served: torch.dtype
    enabled: bool
    static: ActivationScale | None

    @classmethod
    def of(cls, linear: nn.Linear, quantization: Quantization, *, served: torch.dtype) -> FakeQuantLinear:
        """Take over a layer's parameters, also on the meta device."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.quantization, new.served, new.enabled, new.static = quantization, served, False, None
        return new

    def forward(self, input: Tensor) -> Tensor:
        if not self.enabled:
            return F.linear(input, self.weight, self.bias)
        scheme = self.quantization.scheme
        x = fake_quant_activation(
            input, scheme.activation, served=self.served, floating=scheme.floating, static=self.static
        )
        return F.linear(x, fake_quant_weight(self.weight, self.quantization, served=self.served), self.bias)


class QuantLinear(nn.Module):
    """A linear layer that holds codes and scales alone and computes what the serving kernel computes.

    Args:
        codes: int8 or float8 [outputs, inputs].
        scale: float32 [outputs, 1] or [outputs, groups].
    """

    codes: Tensor
    scale: Tensor

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        quantization: Quantization,
        *,
        served: torch.dtype,
        static: ActivationScale | None,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.quantization, self.served, self.static = quantization, served, static

    def forward(self, input: Tensor) -> Tensor:
        scheme = self.quantization.scheme
        x = fake_quant_activation(
            input, scheme.activation, served=self.served, floating=scheme.floating, static=self.static
        )
        weight = dequantize(self.codes, self.scale, self.quantization, served=self.served)
        return F.linear(x, weight.to(x.dtype), self.bias)  # type: ignore[arg-type]


def prepare(
    model: nn.Module, quantization: Quantization, *, served: torch.dtype, name_of: Callable[[str], str] = str
) -> dict[str, FakeQuantLinear]:
    """Replace the selected linear layers by fake-quantized ones, switched off; parameter names do not change.

    Args:
        served: dtype that the rollout engine computes in.
        name_of: Hugging Face module name of a module of the model.

    Returns:
        the prepared layers by Hugging Face module name, in the model's order.

    Raises:
        ConfigError: the model is prepared already, or the scheme does not fit its layers.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if any(isinstance(m, FakeQuantLinear) for m in linears.values()):
        raise ConfigError("the model is prepared already: convert it before it is prepared again")
    shapes = {name_of(name): (m.out_features, m.in_features) for name, m in linears.items()}
    chosen = quantization.plan(shapes).quantized
    prepared: dict[str, FakeQuantLinear] = {}
    for name, linear in linears.items():
        if name_of(name) in chosen:
            prepared[name_of(name)] = new = FakeQuantLinear.of(linear, quantization, served=served)
            _replace(model, name, new)
    return prepared


def convert(model: nn.Module) -> dict[str, QuantLinear]:
    """Replace every prepared layer by its quantized form.

    Returns:
        the quantized layers by module name.

    Raises:
        ConfigError: there is no prepared layer: the model was never prepared, or is converted already.
    """
    found = list(prepared_layers(model))
    if not found:
        raise ConfigError("the model has no prepared layer: prepare it first, and convert it once")
    converted: dict[str, QuantLinear] = {}
    for name, layer in found:
        scale = weight_scale(layer.weight, layer.quantization, served=layer.served)
        converted[name] = new = QuantLinear(
            weight_codes(layer.weight, scale, layer.quantization),
            scale,
            None if layer.bias is None else layer.bias.detach(),
            layer.quantization,
            served=layer.served,
            static=layer.static,
        )
        _replace(model, name, new)
    return converted


def prepared_layers(model: nn.Module) -> Iterator[tuple[str, FakeQuantLinear]]:
    """Every prepared layer with its module name, in the model's order."""
    return ((n, m) for n, m in model.named_modules() if isinstance(m, FakeQuantLinear))


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(parent) if parent else model
    setattr(owner, leaf, new)
