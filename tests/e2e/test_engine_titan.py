"""The trainer against Hugging Face and against itself: real titan model, real FSDP2, real gloo ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytestmark = pytest.mark.filterwarnings("default")

Ranks = Callable[..., list[Any]]


def hf_logprobs(folder: Path, vocab: int) -> list[list[Any]]:
    """Log-probs of the same made-up episodes, unpacked, one sequence at a time."""
    source = (Path(__file__).parent / "rank.py").read_text().replace("\nmain()\n", "\n")
    scope: dict[str, Any] = {}
    exec(compile(source, "rank.py", "exec"), scope)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for group in scope["groups"](vocab):
        for e in group.episodes:
            ids = torch.tensor([e.prompt.token_ids + e.completion.token_ids])
            with torch.no_grad():
                lp = model(ids).logits[0].log_softmax(-1)
            first = len(e.prompt.token_ids) - 1
            values = [lp[first + i, t].item() for i, t in enumerate(e.completion.token_ids)]
            found.append([e.group, e.member, values])
    return found


def largest_difference(a: list[list[Any]], b: list[list[Any]]) -> float:
    assert [x[:2] for x in a] == [x[:2] for x in b]
    return max(abs(x - y) for (_, _, xs), (_, _, ys) in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True))


SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


FAMILIES = {
    "llama with biases": transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "llama 3 rope": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "qwen2": transformers.Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, tie_word_embeddings=True),
    "qwen3 with wide heads": transformers.Qwen3Config(**{**SMALL, "head_dim": 32}, tie_word_embeddings=False),
}


def test_every_family_gives_hugging_faces_logprobs(tmp_path: Path, train_ranks: Ranks) -> None:
    torch.manual_seed(0)
    actions = []
    for name, config in FAMILIES.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # large enough that every part of the computation shows
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
            else:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
        model.save_pretrained(tmp_path / name)
        actions += [{"do": "build", "overrides": [], "model": str(tmp_path / name)}, {"do": "logprobs"}]
    found = train_ranks(tmp_path / "qwen2", actions)
    for name, ours in zip(FAMILIES, found, strict=True):
        assert largest_difference(ours, hf_logprobs(tmp_path / name, 256)) < 1e-4, name


def test_sharing_prompts_changes_no_logprob(tiny: Path, train_ranks: Ranks) -> None:
    shared, alone = train_ranks(tiny, [{"do": "logprobs"}, {"do": "logprobs", "share": False}])
    for (_, _, a), (_, _, b) in zip(shared, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


LR = "trainer.lr=1e-3"
TWO_STEPS = [{"do": "step"}, {"do": "step"}]


@pytest.fixture(scope="module")
def whole_batches(tiny: Path, train_ranks: Ranks) -> Any:
    return train_ranks(tiny, TWO_STEPS, overrides=("trainer.micro_batch=12", LR))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loss_and_gradient_do_not_depend_on_ranks_or_micro_batches(
    ranks: int, tiny: Path, train_ranks: Ranks, whole_batches: Any
) -> None:
    sizes = (1, 2, 8)
    actions = [
        action
        for size in sizes
        for action in ({"do": "build", "overrides": [f"trainer.micro_batch={size}", LR]}, *TWO_STEPS)
    ]
    found = train_ranks(tiny, actions, ranks=ranks)
    for i, size in enumerate(sizes):
        for ours, reference in zip(found[2 * i : 2 * i + 2], whole_batches, strict=True):
            for key in ("loss/total", "trainer/grad_norm", "ratio/mean", "logprob_gap/max", "policy/entropy"):
                assert ours[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-6), (size, key)


def test_a_batch_without_signal_leaves_the_weights_alone_and_is_counted(tiny: Path, train_ranks: Ranks) -> None:
    before, step, after = train_ranks(tiny, [{"do": "weights"}, {"do": "step", "num_groups": 0}, {"do": "weights"}])
    assert step["trainer/skipped_empty"] == 1.0
    assert step["loss/total"] == 0.0
    assert before == after


def test_a_checkpoint_continues_the_same_losses_also_on_other_ranks(
    tiny: Path, tmp_path: Path, train_ranks: Ranks
) -> None:
    path = str(tmp_path / "state")
    lr = ("trainer.lr=1e-3", "trainer.warmup_steps=3", "trainer.decay=linear")
    listening, *_, saved, expected = train_ranks(
        tiny,
        [{"do": "listening"}, {"do": "step"}, {"do": "step"}, {"do": "save_state", "path": path}, {"do": "step"}],
        ranks=2,
        overrides=lr,
    )
    assert saved == 2
    assert listening == ["127.0.0.1"]  # nobody else's machine can join
    for ranks in (1, 2, 4):
        version, step = train_ranks(
            tiny, [{"do": "load_state", "path": path}, {"do": "step"}], ranks=ranks, overrides=lr
        )
        assert version == 2
        assert step["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)
        assert step["trainer/grad_norm"] == pytest.approx(expected["trainer/grad_norm"], rel=1e-5)
        assert step["trainer/lr"] == expected["trainer/lr"]


def test_the_saved_folder_holds_the_trained_weights_for_transformers(
    tiny: Path, tmp_path: Path, train_ranks: Ranks
) -> None:
    path = tmp_path / "export"
    *_, ours = train_ranks(
        tiny,
        [{"do": "step"}, {"do": "save_hf", "path": str(path)}, {"do": "logprobs"}],
        ranks=2,
        overrides=("trainer.lr=1e-2", "generator.dtype=float32"),
    )
    mine = {(g, m) for g, m, _ in ours}  # rank 0 reports its share of the episodes
    before, after = ([row for row in hf_logprobs(f, 512) if (row[0], row[1]) in mine] for f in (tiny, path))
    assert largest_difference(ours, before) > 0.1
    assert largest_difference(ours, after) < 1e-4
    names = {p.name for p in path.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"} <= names
    transformers.AutoTokenizer.from_pretrained(path)


def test_staging_counts_what_the_served_dtype_can_see(tiny: Path, train_ranks: Ranks) -> None:
    first, again, _, after = train_ranks(
        tiny, [{"do": "stage"}, {"do": "stage"}, {"do": "step"}, {"do": "stage"}], overrides=("trainer.lr=1e-2",)
    )
    assert first[0] == first[1] == 3_279_104
    assert again[0] == 0
    assert after[0] > 0.5 * after[1]
    assert "lm_head.weight" not in first[2]
    assert len(first[2]) == 38  # embedding, norm and 9 tensors in each of 4 layers


def test_a_folder_with_an_equal_lm_head_beside_a_tied_embedding_trains_the_same(
    tiny: Path, tmp_path: Path, train_ranks: Ranks
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "with-head"
    shutil.copytree(tiny, copy)
    weights = load_file(tiny / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, copy / "model.safetensors")
    assert train_ranks(copy, [{"do": "step"}]) == train_ranks(tiny, [{"do": "step"}])


def test_weights_that_do_not_fit_are_refused_by_name(tiny: Path, tmp_path: Path, train_ranks: Ranks) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "wrong"
    shutil.copytree(tiny, copy)
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    weights["model.extra.weight"] = torch.ones(2)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(AssertionError) as caught:
        train_ranks(copy, [{"do": "step"}])
    for part in (
        "model.norm.weight has shape (7,)",
        "model.extra.weight is in the folder",
        "layers.1.mlp.up_proj.weight is not",
    ):
        assert part in str(caught.value)
    assert json.loads((copy / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("scheme", ["int8_dynamic", "8da4w"])
def test_qat_trains_the_same_on_any_number_of_ranks(
    scheme: str, tiny: Path, train_ranks: Ranks, tmp_path: Path
) -> None:
    overrides = (f"quant.scheme={scheme}", "quant.qat.enabled=true", "quant.qat.start_step=1", "trainer.lr=1e-3",
                 "trainer.micro_batch=4")  # fmt: skip
    actions: list[dict[str, Any]] = [{"do": "step"}, {"do": "step"}, {"do": "stage"}, {"do": "weights"}]
    one = train_ranks(tiny, [*actions, {"do": "save_state", "path": str(tmp_path / "s")}], overrides=overrides)
    two = train_ranks(tiny, actions, ranks=2, overrides=overrides)
    assert [one[0]["quant/qat"], one[1]["quant/qat"]] == [0.0, 1.0]
    for a, b in zip(one[:2], two[:2], strict=True):
        assert a["loss/total"] == pytest.approx(b["loss/total"], rel=1e-4, abs=1e-6)
        assert a["trainer/grad_norm"] == pytest.approx(b["trainer/grad_norm"], rel=1e-3)
    assert one[3] == pytest.approx(two[3], rel=1e-5)
    names = one[2][2]
    assert names == two[2][2]
    assert any(n.endswith("weight_scale") for n in names)
    assert not any("fake" in n or "codes" in n for n in names)

    # an ordinary checkpoint: it continues, and it continues without QAT as well
    (version, step) = train_ranks(
        tiny, [{"do": "load_state", "path": str(tmp_path / "s")}, {"do": "step"}], overrides=overrides
    )
    assert (version, step["quant/qat"]) == (2, 1.0)
    (version, step) = train_ranks(
        tiny, [{"do": "load_state", "path": str(tmp_path / "s")}, {"do": "step"}], overrides=("trainer.lr=1e-3",)
    )
    assert version == 2
    assert "quant/qat" not in step


def test_qat_with_activation_checkpointing_changes_nothing(tiny: Path, train_ranks: Ranks) -> None:
    overrides = ("quant.scheme=int4_weight", "quant.qat.enabled=true")
    (plain,) = train_ranks(tiny, [{"do": "step"}], overrides=overrides)
    (again,) = train_ranks(tiny, [{"do": "step"}], overrides=(*overrides, "trainer.activation_checkpointing=true"))
    assert again["loss/total"] == pytest.approx(plain["loss/total"], rel=1e-6)
    assert again["trainer/grad_norm"] == pytest.approx(plain["trainer/grad_norm"], rel=1e-5)


def test_what_cannot_be_exported_is_refused_by_all_ranks_together(
    tiny: Path, train_ranks: Ranks, tmp_path: Path
) -> None:
    overrides = ("quant.scheme=int8_static",)
    target = str(tmp_path / "out")
    found = train_ranks(
        tiny,
        [
            {"do": "save_quantized", "path": target, "format": "torchao"},
            {"do": "save_quantized", "path": target, "format": "compressed-tensors"},
            {"do": "build", "overrides": ["quant.scheme=int8_dynamic"]},
            {"do": "save_quantized", "path": target, "format": "compressed-tensors"},
            {
                "do": "save_quantized",
                "path": str(tmp_path / "nan"),
                "format": "compressed-tensors",
                "poison": "layers.1.feed_forward.w2.weight",
            },
        ],
        ranks=2,
        overrides=overrides,
    )
    assert "int8_static cannot be written as torchao: it can be as compressed-tensors" in found[0]
    assert "no activation scale for model.layers.0" in found[1]
    assert found[2] == 28
    assert "model.layers.1.mlp.down_proj.weight (1 tensors) hold values that are not finite" in found[3]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
