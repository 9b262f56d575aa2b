"""Schemes as data, and which layers of a model one applies to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forge.config import QUANT_SCHEMES, QuantConfig
from forge.errors import ConfigError
from forge.quant import GROUP_SIZES, SCHEMES, Activation, Format, Quantization

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shapes(blocks: int = 2, *, width: int = 576, hidden: int = 1536) -> dict[str, tuple[int, int]]:
    """Linear layers of a Llama with so many blocks."""
    result: dict[str, tuple[int, int]] = {}
    for b in range(blocks):
        result |= {f"model.layers.{b}.self_attn.{n}": (width, width) for n in ATTENTION}
        result |= {f"model.layers.{b}.mlp.{n}": (hidden, width) for n in MLP[:2]}
        result[f"model.layers.{b}.mlp.down_proj"] = (width, hidden)
    result["lm_head"] = (49152, width)
    return result


def quantization(scheme: str = "int8_dynamic", **settings: Any) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], **settings)


def refused(q: Quantization, of: dict[str, tuple[int, int]]) -> str:
    with pytest.raises(ConfigError) as caught:
        q.plan(of)
    return str(caught.value)


def test_what_a_run_can_ask_for_is_what_rollouts_serve() -> None:
    assert {n for n, s in SCHEMES.items() if s.rollouts} == set(QUANT_SCHEMES) - {"none"}


def test_every_scheme_is_filed_under_its_name_and_exports_to_something() -> None:
    for name, scheme in SCHEMES.items():
        assert scheme.name == name
        assert scheme.summary
        assert scheme.formats
        assert scheme.bits in (4, 8)


@pytest.mark.parametrize(
    ("name", "bits", "grouped", "activation", "served_as"),
    [
        ("int8_dynamic", 8, False, Activation.token, Format.compressed_tensors),
        ("int8_static", 8, False, Activation.tensor, Format.compressed_tensors),
        ("int4_weight", 4, True, Activation.none, Format.compressed_tensors),
        ("8da4w", 4, True, Activation.token_asymmetric, Format.torchao),
        ("int8_weight", 8, False, Activation.none, Format.torchao),
        ("fp8_dynamic", 8, False, Activation.token, Format.compressed_tensors),
        ("x86_static", 8, False, Activation.tensor, Format.pt2),
        ("arm_static", 8, False, Activation.tensor, Format.pt2),
    ],
)
def test_the_registry(name: str, bits: int, grouped: bool, activation: Activation, served_as: Format) -> None:
    scheme = SCHEMES[name]
    assert (scheme.bits, scheme.grouped, scheme.activation) == (bits, grouped, activation)
    assert scheme.formats[0] is served_as
    assert scheme.static is (activation is Activation.tensor)
    assert scheme.floating is (name == "fp8_dynamic")
    assert scheme.needs_gpu is (name == "fp8_dynamic")


def test_the_registry_is_complete() -> None:
    assert list(SCHEMES) == [
        "int8_dynamic", "int8_static", "int4_weight", "8da4w", "int8_weight", "fp8_dynamic", "x86_static", "arm_static"
    ]  # fmt: skip


def test_a_configuration_becomes_a_quantization() -> None:
    assert Quantization.of(QuantConfig()) is None
    config = QuantConfig(scheme="int4_weight", group_size=64, layers="mlp", skip="down")
    assert Quantization.of(config) == quantization("int4_weight", group_size=64, layers="mlp", skip="down")


def test_everything_but_the_head_is_quantized_by_default() -> None:
    plan = quantization().plan(shapes())
    assert list(plan.quantized) == [n for n in shapes() if n != "lm_head"]
    assert plan.quantized["model.layers.1.mlp.down_proj"] == (576, 1536)
    assert plan.left == {"lm_head": (49152, 576)}
    assert str(plan) == "quantized 14 of 15 linears"


def test_layers_and_skip_are_searched_in_the_whole_name() -> None:
    plan = quantization(layers="mlp", skip=r"layers\.0\.").plan(shapes())
    assert list(plan.quantized) == [f"model.layers.1.mlp.{n}" for n in MLP]
    assert len(plan.left) == 12
    q = quantization(skip=r"router|mlp[.]gate$")
    assert not q.selects("model.layers.0.mlp.gate")
    assert q.selects("model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize("layers", [".*", "lm_head", "lm_head|down_proj", "embed"])
def test_head_and_embedding_are_never_quantized(layers: str) -> None:
    q = quantization(layers=layers)
    assert not q.selects("lm_head")
    assert not q.selects("model.embed_tokens")


def test_a_projection_that_engines_fuse_is_not_split_from_its_family() -> None:
    said = refused(quantization(skip="v_proj"), shapes(1))
    assert "model.layers.0.self_attn: engines fuse k_proj, q_proj, v_proj" in said
    assert "they take k_proj, q_proj" in said
    said = refused(quantization(layers="attn|up_proj"), shapes(1))
    assert "model.layers.0.mlp: engines fuse gate_proj, up_proj" in said
    assert "they take up_proj" in said


def test_many_split_blocks_are_counted() -> None:
    lines = refused(quantization(skip="k_proj"), shapes(9)).splitlines()
    assert len(lines) == 6
    assert "and 4 more blocks" in lines[-1]


def test_a_family_that_is_left_out_as_a_whole_is_fine() -> None:
    plan = quantization(skip="[qkv]_proj").plan(shapes(1))
    assert list(plan.quantized) == ["model.layers.0.self_attn.o_proj", *(f"model.layers.0.mlp.{n}" for n in MLP)]


def test_a_group_size_that_does_not_divide_names_layers_and_valid_sizes() -> None:
    said = refused(quantization("int4_weight", group_size=128), shapes(1))
    assert "quant.group_size=128 does not divide the width 576 of model.layers.0.self_attn.q_proj" in said
    assert "and 2 more" in said  # six layers of width 576; 128 divides the 1536 of down_proj
    assert "down_proj" not in said
    assert said.endswith("valid sizes for this model are 32, 64")
    for size in GROUP_SIZES:
        if size in (32, 64):
            quantization("int4_weight", group_size=size).plan(shapes(1))
        else:
            refused(quantization("int4_weight", group_size=size), shapes(1))


def test_no_valid_group_size_names_the_way_out() -> None:
    said = refused(quantization("8da4w", group_size=32), {"a.o_proj": (8, 40), "b.o_proj": (8, 64)})
    assert "does not divide the width 40 of a.o_proj: valid sizes for this model are none" in said
    assert "leave these layers out with quant.skip" in said
    quantization("8da4w", group_size=32, skip="^a").plan({"a.o_proj": (8, 40), "b.o_proj": (8, 64)})


def test_schemes_without_groups_take_any_width() -> None:
    quantization("int8_static", group_size=128).plan({"a.o_proj": (8, 41)})


def test_selecting_nothing_is_refused() -> None:
    said = refused(quantization(layers="self_atn"), shapes())
    assert "quant.layers='self_atn' with quant.skip='' selects none of the model's 15 linear layers" in said
    assert "'model.layers.0.self_attn.q_proj' should match" in said
    assert "0 linear layers" in refused(quantization(), {})


def test_a_label_differs_when_any_setting_does() -> None:
    base = quantization("int4_weight")
    others = [
        *(replace(base, scheme=s) for s in SCHEMES.values() if s is not base.scheme),
        replace(base, group_size=64),
        replace(base, layers="mlp"),
        replace(base, skip="mlp"),
    ]
    labels = {q.label for q in (base, *others)}
    assert len(labels) == len(others) + 1
    assert "" not in labels  # the empty label means unquantized
    assert replace(base).label == base.label
    # without groups the size means nothing, so it makes no other function
    assert quantization("int8_static", group_size=64).label == quantization("int8_static").label
