"""Names and refusals of the titan model; its numbers are in tests/e2e."""

from typing import Any

import pytest

from forge.engine_titan import leaves_a_rank_empty
from forge.engine_titan_model import hf_name, titan_config
from forge.errors import ModelFolderError

pytestmark = pytest.mark.filterwarnings("default")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("titan", "hf"),
    [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.11.attention.qkv_linear.wk.weight", "model.layers.11.self_attn.k_proj.weight"),
        ("layers.0.attention.qkv_linear.wq.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("layers.3.attention.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("layers.3.feed_forward.w2.weight", "model.layers.3.mlp.down_proj.weight"),
        ("layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_every_titan_name_is_one_hugging_face_name(titan: str, hf: str) -> None:
    assert hf_name(titan) == hf


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral"}, "model_type must be llama, qwen2 or qwen3, got 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type must be default or llama3, got 'yarn'"),
    ],
)
def test_what_would_not_be_computed_exactly_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFolderError, match=says):
        titan_config({**LLAMA, **change}, max_len=64, on_cpu=True)


def test_families_differ_in_biases_and_norms_alone() -> None:
    def attention(family: str, **extra: Any) -> Any:
        return titan_config({**LLAMA, "model_type": family, **extra}, max_len=64, on_cpu=True).layers[0].attention

    assert not attention("llama").qkv_linear.wq.bias
    assert attention("qwen2").qkv_linear.wq.bias
    assert not attention("qwen2").wo.bias
    assert attention("qwen3", head_dim=32).qk_norm is not None
    assert attention("llama").qk_norm is None


@pytest.mark.parametrize(
    ("rows", "ranks", "empty"),
    [(7, 3, False), (5, 4, True), (4, 3, True), (1, 1, False), (576, 2, False), (0, 2, True)],
)
def test_an_uneven_split_that_leaves_a_rank_without_rows_is_known(rows: int, ranks: int, empty: bool) -> None:
    assert leaves_a_rank_empty(rows, ranks) is empty
