"""Which layers a scheme takes, and what it refuses."""

from __future__ import annotations

import pytest

from forge.config import QUANT_SCHEMES, QuantConfig
from forge.errors import ConfigError
from forge.quant import SCHEMES, Quantization

SHAPES = {
    f"model.layers.{i}.{part}": shape
    for i in range(2)
    for part, shape in {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }.items()
} | {"lm_head": (49152, 576)}


def make(scheme: str = "int8_dynamic", **settings: object) -> Quantization:
    return Quantization(scheme=SCHEMES[scheme], **settings)  # type: ignore[arg-type]


def test_configuration_and_registry_name_the_same_schemes_for_rollouts() -> None:
    assert set(QUANT_SCHEMES) == {"none"} | {n for n, s in SCHEMES.items() if s.rollouts}


def test_all_projections_are_taken_and_the_head_never_is() -> None:
    plan = make(layers="lm_head|proj").plan(SHAPES)
    assert len(plan.quantized) == 14
    assert list(plan.left) == ["lm_head"]
    assert str(plan) == "quantized 14 of 15 linears"


def test_a_pattern_leaves_layers_out() -> None:
    plan = make(skip="down_proj").plan(SHAPES)
    assert [n for n in plan.left] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layers": "k_proj"}, ["self_attn: engines fuse k_proj, q_proj, v_proj", "they take k_proj"]),
        ({"skip": "up_proj"}, ["mlp: engines fuse gate_proj, up_proj", "they take gate_proj"]),
        ({"layers": "expert"}, ["selects none of the model's 15 linear layers"]),
        (
            {"scheme": "int4_weight", "group_size": 128},
            ["group_size=128", "width 576", "q_proj", "sizes for this model are 32, 64"],
        ),
        ({"scheme": "8da4w", "group_size": 256, "layers": "down"}, []),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(settings: dict[str, object], says: list[str]) -> None:
    quantization = make(**settings)  # type: ignore[arg-type]
    if not says:
        assert len(quantization.plan(SHAPES).quantized) == 2
        return
    with pytest.raises(ConfigError) as refused:
        quantization.plan(SHAPES)
    for text in says:
        assert text in str(refused.value)


def test_labels_tell_different_functions_apart() -> None:
    labels = {
        q.label
        for q in (
            make(),
            make("int8_static"),
            make("int4_weight"),
            make("int4_weight", group_size=64),
            make(skip="down"),
            make(layers="mlp"),
        )
    }
    assert len(labels) == 6


def test_no_scheme_is_no_quantization() -> None:
    assert Quantization.of(QuantConfig()) is None
    assert Quantization.of(QuantConfig(scheme="8da4w", group_size=64)) == make(
        "8da4w", group_size=64, skip=QuantConfig().skip
    )
