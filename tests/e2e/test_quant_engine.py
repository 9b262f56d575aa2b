"""Quantized vLLM engines with live weights: they compute the prepared model, swap, and refuse what is not theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forge.config import load_config
from forge.engine_vllm import VllmEngine
from forge.errors import WeightsMismatch
from forge.quant import Quantization
from forge.quant.calibration import Observer
from forge.quant.grid import scale_of_range
from forge.quant.layers import convert, prepare
from forge.quant.pack import pack
from forge.types import Manifest

pytestmark = pytest.mark.filterwarnings("default")

SEQUENCES = [tuple((17 * i + 5 * j) % 500 for j in range(20 + i)) for i in range(6)]


class Served:
    """One scheme's engine beside the prepared model in float32."""

    def __init__(self, scheme: str, tiny: Path) -> None:
        config = load_config("grpo", ["model=tiny", f"quant.scheme={scheme}"])
        quantization = Quantization.of(config.quant)
        assert quantization is not None
        self.quantization = quantization
        self.model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
        self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.plain = self.logprobs()
        self.layers = prepare(self.model, self.quantization, served=torch.bfloat16)
        observers = {n: Observer() for n in self.layers}
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, o=observers[n]: o.update(args[0]))
            for n, layer in self.layers.items()
        ]
        self.logprobs()
        for hook in hooks:
            hook.remove()
        self.scales = {n: scale_of_range(o.low, o.high) for n, o in observers.items()}
        for n, layer in self.layers.items():
            layer.enabled, layer.static = True, self.scales[n]
        self.prepared = self.logprobs()
        convert(self.model)
        self.converted = self.logprobs()
        self.engine = VllmEngine(config, tiny)

    @torch.no_grad()
    def logprobs(self) -> list[list[float]]:
        found = []
        for s in SEQUENCES:
            lp = self.model(torch.tensor([s])).logits[0, :-1].log_softmax(-1)
            found.append(lp.gather(-1, torch.tensor(s[1:])[:, None]).flatten().tolist())
        return found

    def tensors(self, factor: float = 1.0) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, w in self.weights.items():
            module = name.removesuffix(".weight")
            if module in self.layers:
                made |= pack(module, w * factor, self.quantization, served=torch.bfloat16)
            else:
                made[name] = w.bfloat16()
        return made

    def manifest(self, version: int) -> Manifest:
        return Manifest(
            version=version,
            tensors=self.engine.expected,
            num_bytes=0,
            changed_share=1.0,
            scheme=self.quantization.label,
            scales=self.scales if self.quantization.scheme.static else {},
        )


def mean_gap(a: Any, b: Any) -> float:
    differences = [abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return sum(differences) / len(differences)


@pytest.fixture(scope="module", params=["int8_dynamic", "int8_static", "int4_weight", "8da4w", "int8_weight"])
def served(request: pytest.FixtureRequest, tiny: Path) -> Served:
    return Served(request.param, tiny)


def test_the_engine_serves_the_prepared_model(served: Served) -> None:
    served.engine.load(served.manifest(1), served.tensors())
    found = served.engine.score(SEQUENCES)
    assert served.converted == served.prepared
    # bfloat16 against float32 moves codes, so quantized activations leave about 0.005 on this model
    assert mean_gap(found, served.prepared) < 0.009
    if served.quantization.scheme.grouped:
        assert mean_gap(found, served.prepared) < mean_gap(found, served.plain) / 5


def test_a_swap_takes_effect_and_back_is_bit_equal(served: Served) -> None:
    served.engine.load(served.manifest(1), served.tensors())
    first = served.engine.score(SEQUENCES)
    served.engine.load(served.manifest(2), served.tensors(factor=1.7))
    second = served.engine.score(SEQUENCES)
    assert mean_gap(first, second) > 0.05
    served.engine.load(served.manifest(3), served.tensors())
    assert served.engine.score(SEQUENCES) == first


def test_another_scheme_is_refused_and_the_old_version_stays(served: Served) -> None:
    served.engine.load(served.manifest(1), served.tensors())
    first = served.engine.score(SEQUENCES)
    with pytest.raises(WeightsMismatch, match="published as something else; version 1 stays live"):
        served.engine.load(replace(served.manifest(2), scheme="something else"), served.tensors())
    with pytest.raises(WeightsMismatch, match="published as unquantized"):
        served.engine.load(replace(served.manifest(2), scheme=""), served.tensors())
    broken = served.tensors()
    name = next(n for n in broken if n.endswith("weight_scale"))
    broken[name] = broken[name][:1]
    with pytest.raises(WeightsMismatch, match=f"{name} is"):
        served.engine.load(served.manifest(2), broken)
    if served.quantization.scheme.static:
        with pytest.raises(WeightsMismatch, match="no activation scale for model.layers.0"):
            served.engine.load(replace(served.manifest(2), scales={}), served.tensors())
    assert served.engine.version == 1
    assert served.engine.score(SEQUENCES) == first
