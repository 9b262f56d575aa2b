"""Tensors that travel: layout, sizes, and what an engine's checkpoint holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig

from forge.quant import SCHEMES, Quantization
from forge.quant.pack import (
    codes,
    compressed_tensors_config,
    engine_tensors,
    num_bytes,
    pack,
    pack_int4,
    packed_specs,
    quantized_specs,
    unpack_int4,
)
from forge.types import ActivationScale, TensorSpec

NAMES = ["int8_dynamic", "int8_static", "int4_weight", "8da4w", "int8_weight", "fp8_dynamic"]
BF16 = torch.bfloat16


def make(scheme: str) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme])


def weight() -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(3)) * 0.1


def test_int4_codes_are_packed_as_compressed_tensors_packs_them() -> None:
    values = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    assert torch.equal(unpack_int4(pack_int4(values)), values)
    assert torch.equal(pack_int4(values), pack_to_int32(values, 4))


@pytest.mark.parametrize("scheme", NAMES)
def test_a_manifest_names_exactly_what_is_packed(scheme: str) -> None:
    q = make(scheme)
    packed = pack("m.q_proj", weight(), q, served=BF16)
    specs = {n: TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in packed.items()}
    assert specs == packed_specs("m.q_proj", (48, 64), q, served="bfloat16")
    assert codes(packed).shape == (48, 64)


@pytest.mark.parametrize("scheme", NAMES)
def test_shards_of_rows_are_packed_as_the_whole_is(scheme: str) -> None:
    q, w = make(scheme), weight()
    whole = pack("m.q_proj", w, q, served=BF16)
    parts = [pack("m.q_proj", part, q, served=BF16) for part in w.split([20, 20, 8])]
    for name, tensor in whole.items():
        joined = torch.cat([p[name] for p in parts])
        assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(("scheme", "most"), [("int8_dynamic", 0.52), ("int4_weight", 0.29), ("8da4w", 0.29)])
def test_published_bytes(scheme: str, most: float) -> None:
    share = num_bytes(packed_specs("m", (576, 1536), make(scheme), served="bfloat16")) / (576 * 1536 * 2)
    assert share <= most


def test_what_is_not_quantized_is_published_as_it_was() -> None:
    plain = {
        "model.embed_tokens.weight": TensorSpec(shape=(100, 64), dtype="bfloat16"),
        "model.layers.0.self_attn.q_proj.weight": TensorSpec(shape=(48, 64), dtype="bfloat16"),
        "model.layers.0.self_attn.q_proj.bias": TensorSpec(shape=(48,), dtype="bfloat16"),
        "model.norm.weight": TensorSpec(shape=(64,), dtype="bfloat16"),
        "lm_head.weight": TensorSpec(shape=(100, 64), dtype="bfloat16"),
    }
    found = quantized_specs(plain, make("int8_dynamic"), served="bfloat16")
    changed = {n for n in found if plain.get(n) != found[n]}
    assert changed == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
    }
    width = {"int8": 1, "bfloat16": 2, "float32": 4}
    assert num_bytes(found) == sum(math.prod(s.shape) * width[s.dtype] for s in found.values())


def test_an_engine_gets_shapes_and_static_scales_beside_the_codes() -> None:
    int4 = engine_tensors(pack("m", weight(), make("int4_weight"), served=BF16), make("int4_weight"), {})
    assert int4["m.weight_shape"].tolist() == [48, 64]
    static = make("int8_static")
    full = engine_tensors(
        pack("m", weight(), static, served=BF16), static, {"m": ActivationScale(scale=0.25, zero_point=-3)}
    )
    assert full["m.input_scale"].tolist() == [0.25]
    assert full["m.input_zero_point"].tolist() == [-3]
    assert full["m.input_zero_point"].dtype == torch.int8


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static", "int4_weight", "fp8_dynamic"])
def test_the_configuration_is_one_that_compressed_tensors_reads(scheme: str) -> None:
    q = make(scheme)
    config: dict[str, Any] = compressed_tensors_config(q, q.plan({"a.o_proj": (64, 64), "lm_head": (9, 64)}))
    read = QuantizationConfig.model_validate({k: v for k, v in config.items() if v is not None})
    (group,) = read.config_groups.values()
    assert group.weights.num_bits == q.scheme.bits
    assert (group.input_activations is not None) == (scheme != "int4_weight")
    assert read.ignore == ["lm_head"]
