"""Low-bit tensors: their bits against compressed-tensors' own packer, their shapes, bytes and configuration."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy, QuantizationType

from forge.quant import SCHEMES, Quantization
from forge.quant.grid import weight_codes, weight_scale
from forge.quant.pack import (
    codes,
    compressed_tensors_config,
    engine_tensors,
    is_linear,
    linear_shapes,
    num_bytes,
    pack,
    pack_int4,
    packed_specs,
    quantized_specs,
    unpack_int4,
)
from forge.types import ActivationScale, TensorSpec

SERVED = pytest.mark.parametrize("served", ["float32", "bfloat16"])
SERVABLE = [s.name for s in SCHEMES.values() if s.rollouts]
COMPRESSED = ["int8_dynamic", "int8_static", "int4_weight", "fp8_dynamic"]


def quantization(scheme: str, group_size: int = 32) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], group_size=group_size)


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05


def every_int4(rows: int, width: int) -> torch.Tensor:
    return torch.randint(-8, 8, (rows, width), generator=torch.Generator().manual_seed(1)).to(torch.int8)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[n].dtype is b[n].dtype and torch.equal(a[n].to(torch.float64), b[n].to(torch.float64)) for n in a
    )


def test_int4_round_trip_and_bits_are_compressed_tensors() -> None:
    values = every_int4(31, 128)
    packed = pack_int4(values)
    assert packed.dtype is torch.int32
    assert torch.equal(packed, pack_to_int32(values, 4))
    assert torch.equal(unpack_int4(packed), values)
    assert torch.equal(unpack_from_int32(packed, 4, values.shape), values)


def test_the_bits_of_one_int32() -> None:
    # code + 8 from the lowest bits up: 0 1 2 3 4 5 6 15 is 0xf6543210, a negative int32
    packed = pack_int4(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8))
    assert packed.tolist() == [[0xF6543210 - 2**32]]
    assert unpack_int4(packed).tolist() == [[-8, -7, -6, -5, -4, -3, -2, 7]]


@SERVED
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("scheme", SERVABLE)
def test_specs_are_what_packing_gives(scheme: str, group_size: int, served: str) -> None:
    q = quantization(scheme, group_size)
    packed = pack("a.o_proj", weights(48, 128), q, served=getattr(torch, served))
    found = {n: TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in packed.items()}
    specs = packed_specs("a.o_proj", (48, 128), q, served=served)
    assert found == specs
    assert list(found) == list(specs)
    assert num_bytes(specs) == sum(t.nbytes for t in packed.values())


@SERVED
@pytest.mark.parametrize("scheme", SERVABLE)
def test_what_is_packed_is_the_grids_codes_and_scales(scheme: str, served: str) -> None:
    q, dtype = quantization(scheme), getattr(torch, served)
    weight = weights(48, 128)
    packed = pack("a.o_proj", weight, q, served=dtype)
    scale = weight_scale(weight, q, served=dtype)
    assert torch.equal(codes(packed).float(), weight_codes(weight, scale, q).float())
    # in the dtype that travels, yet to the bit: group scales were rounded to it before the codes were made
    assert torch.equal(packed["a.o_proj.weight_scale"].float(), scale)


@pytest.mark.parametrize("scheme", SERVABLE)
def test_packed_shards_of_rows_are_the_packed_whole(scheme: str) -> None:
    q = quantization(scheme)
    weight = weights(24, 64)
    weight[3] = 0
    whole = pack("a.o_proj", weight, q, served=torch.bfloat16)
    shards = [pack("a.o_proj", w, q, served=torch.bfloat16) for w in weight.split([1, 16, 7])]
    joined = {n: torch.cat([s[n].view(torch.uint8) for s in shards]) for n in whole}
    assert {n: t.tolist() for n, t in joined.items()} == {n: t.view(torch.uint8).tolist() for n, t in whole.items()}


@pytest.mark.parametrize(
    ("scheme", "share"),
    # of the 2 bytes of a bfloat16: int8 is 1 and 4 bytes a row; int4 is 1/2 and 2 bytes for each group of 32
    [("int8_dynamic", 0.52), ("int8_static", 0.52), ("int8_weight", 0.52), ("fp8_dynamic", 0.52)]
    + [("int4_weight", 0.29), ("8da4w", 0.29)],
)
@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576)])
def test_bytes(scheme: str, share: float, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    plain = num_bytes({"w": TensorSpec(shape=shape, dtype="bfloat16")})
    assert plain == 2 * outputs * inputs
    size = num_bytes(packed_specs("w", shape, quantization(scheme), served="bfloat16"))
    if scheme in ("int4_weight", "8da4w"):
        assert size == outputs * inputs // 2 + 2 * outputs * inputs // 32
    else:
        assert size == outputs * inputs + 4 * outputs
    assert size <= share * plain


SPECS = {
    "model.embed_tokens.weight": TensorSpec(shape=(100, 64), dtype="bfloat16"),
    "model.layers.0.self_attn.o_proj.weight": TensorSpec(shape=(64, 64), dtype="bfloat16"),
    "model.layers.0.self_attn.o_proj.bias": TensorSpec(shape=(64,), dtype="bfloat16"),
    "model.layers.0.input_layernorm.weight": TensorSpec(shape=(64,), dtype="bfloat16"),
    "lm_head.weight": TensorSpec(shape=(100, 64), dtype="bfloat16"),
}


def test_specs_of_a_model_replace_the_quantized_weights_alone_and_keep_the_order() -> None:
    o_proj = "model.layers.0.self_attn.o_proj"
    specs = quantized_specs(SPECS, quantization("int4_weight"), served="bfloat16")
    assert list(specs) == [
        "model.embed_tokens.weight",
        f"{o_proj}.weight_packed",
        f"{o_proj}.weight_scale",
        *list(SPECS)[2:],
    ]
    assert specs[f"{o_proj}.weight_packed"] == TensorSpec(shape=(64, 8), dtype="int32")
    assert specs[f"{o_proj}.weight_scale"] == TensorSpec(shape=(64, 2), dtype="bfloat16")
    assert all(specs[n] == SPECS[n] for n in specs if n in SPECS)
    assert linear_shapes(SPECS) == {o_proj: (64, 64), "lm_head": (100, 64)}
    assert [n for n, s in SPECS.items() if is_linear(n, s)] == [f"{o_proj}.weight", "lm_head.weight"]


def test_an_engine_gets_the_shape_that_did_not_travel() -> None:
    packed = pack("a.o_proj", weights(48, 128), quantization("int4_weight"), served=torch.bfloat16)
    full = engine_tensors(packed | {"a.norm.weight": torch.ones(3)}, quantization("int4_weight"), {})
    assert set(full) == {"a.o_proj.weight_packed", "a.o_proj.weight_scale", "a.o_proj.weight_shape", "a.norm.weight"}
    assert full["a.o_proj.weight_shape"].tolist() == [48, 128]
    assert full["a.o_proj.weight_shape"].dtype is torch.int64
    assert all(full[n] is t for n, t in packed.items())


def test_an_engine_gets_static_scales_from_the_manifest() -> None:
    q = quantization("int8_static")
    packed = pack("a.o_proj", weights(8, 64), q, served=torch.bfloat16)
    packed |= pack("b.o_proj", weights(8, 64), q, served=torch.bfloat16)
    scales = {
        "a.o_proj": ActivationScale(scale=0.25, zero_point=-7),
        "b.o_proj": ActivationScale(scale=2.0, zero_point=3),
    }
    full = engine_tensors(packed, q, scales)
    assert len(full) == 8
    for name, scale in scales.items():
        assert full[f"{name}.input_scale"].tolist() == [scale.scale]
        assert full[f"{name}.input_scale"].dtype is torch.float32
        assert full[f"{name}.input_zero_point"].tolist() == [scale.zero_point]
        assert full[f"{name}.input_zero_point"].dtype is torch.int8
    with pytest.raises(KeyError, match=r"b\.o_proj"):  # rather than serving a layer without its scale
        engine_tensors(packed, q, {"a.o_proj": scales["a.o_proj"]})


@pytest.mark.parametrize("scheme", ["int8_dynamic", "fp8_dynamic"])
def test_nothing_is_added_where_nothing_is_derived(scheme: str) -> None:
    packed = pack("a.o_proj", weights(8, 64), quantization(scheme), served=torch.bfloat16)
    assert same(engine_tensors(packed, quantization(scheme), {}), packed)


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_the_configuration_is_one_that_compressed_tensors_accepts(scheme: str) -> None:
    q = quantization(scheme, 64)
    written = compressed_tensors_config(q, q.plan({"a.o_proj": (64, 64), "b.gate": (8, 64), "lm_head": (100, 64)}))
    parsed = QuantizationConfig.model_validate(written)
    group = parsed.config_groups["group_0"]
    assert group.targets == ["Linear"]
    kind = QuantizationType.FLOAT if scheme == "fp8_dynamic" else QuantizationType.INT
    assert (group.weights.num_bits, group.weights.type) == (q.scheme.bits, kind)
    assert group.weights.symmetric
    assert not group.weights.dynamic
    if scheme == "int4_weight":
        assert (group.weights.strategy, group.weights.group_size) == (QuantizationStrategy.GROUP, 64)
        assert group.input_activations is None
    else:
        assert group.weights.strategy == QuantizationStrategy.CHANNEL
        static = scheme == "int8_static"
        inputs = group.input_activations
        assert inputs.strategy == (QuantizationStrategy.TENSOR if static else QuantizationStrategy.TOKEN)
        assert (inputs.num_bits, inputs.type, inputs.dynamic) == (8, kind, not static)
        assert inputs.symmetric is not static
    assert group.output_activations is None
    assert written["quant_method"] == "compressed-tensors"


def test_layers_that_are_left_are_ignored_and_the_head_always_is() -> None:
    q = Quantization(scheme=SCHEMES["int8_dynamic"], skip="gate$")
    plan = q.plan({"a.o_proj": (64, 64), "b.gate": (8, 64), "lm_head": (100, 64)})
    assert compressed_tensors_config(q, plan)["ignore"] == ["lm_head", "b.gate"]
    plan = q.plan({"a.o_proj": (64, 64)})  # a tied head is no layer of its own, but an engine builds one
    assert compressed_tensors_config(q, plan)["ignore"] == ["lm_head"]
