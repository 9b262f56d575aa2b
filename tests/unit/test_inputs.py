"""What a run is given is refused before anything starts, each in a readable line."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from forge.config import load_config
from forge.errors import ConfigError, DataError, ModelFolderError, RefusedInput
from forge.fetch import fetch
from forge.inputs import check_inputs

pytestmark = pytest.mark.filterwarnings("default")  # transformers warns of its own affairs

SMALL = ("model=tiny", "prompts_per_step=2", "group_size=4", "trainer.micro_batch=4", "sampling.max_new_tokens=8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(fetch("tiny"), tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refused(kind: type[RefusedInput], *overrides: str) -> str:
    with pytest.raises(kind) as caught:
        check_inputs(load_config("grpo", [*SMALL, "data.rows=40", *overrides]), None)
    return str(caught.value)


def rows(tmp_path: Path, *answers: object) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))
    return f"data={file}"


def test_good_input_gives_model_and_data(folder: Path) -> None:
    config = load_config("grpo", [*SMALL, f"model={folder}", "model.max_len=128", "data.rows=40"])
    model, dataset, resume = check_inputs(config, None)
    assert (model, resume) == (folder, None)
    assert len(dataset) + len(dataset.heldout) == 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rope_parameters": {"rope_type": "foo"}}, "RoPE type must be default or llama3, got 'foo'"),
        ({"num_attention_heads": 7, "head_dim": None}, "hidden_size 256 must be a multiple of num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"intermediate_size": 5}, "mlp.down_proj.weight has shape [256, 768], config.json says [256, 5]"),
        ({"max_position_embeddings": 16}, "the model has 16 positions"),
    ],
)
def test_a_model_that_would_not_be_computed_as_it_says_is_refused(
    changes: dict[str, object], says: str, folder: Path
) -> None:
    edit(folder, **changes)
    assert says in refused(ModelFolderError, f"model={folder}", "model.max_len=128")


def test_a_model_of_the_hub_says_what_to_download() -> None:
    with pytest.raises(ModelFolderError, match="download Qwen/Qwen3-0.6B .* and give model.path"):
        check_inputs(load_config("grpo", ["model=qwen3_0_6b"]), None)


def test_another_task_takes_no_settings_of_the_default_one() -> None:
    config = load_config("grpo", [*SMALL, "data=task", "data.task=chain_sum", "data.rows=20", "data.heldout=0"])
    assert len(check_inputs(config, None)[1]) == 20


def test_a_broken_generation_config_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json" in refused(ModelFolderError, f"model={folder}")


def test_answers_that_the_reward_cannot_grade_are_refused_or_skipped_and_counted(tmp_path: Path) -> None:
    data = rows(tmp_path, "1", "2", "see the figure on page 3", "4", "5", "6")
    message = refused(DataError, data)
    assert "1 of 6 rows cannot be graded by reward.name=math" in message
    assert "rows.jsonl:3" in message
    config = load_config("grpo", [*SMALL, data, "data.skip_bad_rows=true", "data.heldout=0"])
    _, dataset, _ = check_inputs(config, None)
    assert len(dataset) == 5
    assert [s.id for s in dataset.skipped] == ["rows.jsonl:3"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys; sys.exit(0)", "cannot be imported (SystemExit: 0)"),
        ("raise ValueError('two\\nlines')", "cannot be imported (ValueError: two lines)"),
        ("class X: pass", "is not a subclass of forge.reward.Reward"),
        ("", "has no 'X'"),
    ],
)
def test_a_reward_module_that_fails_is_refused_in_one_line(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_reward.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_reward", raising=False)
    message = refused(ConfigError, "reward.name=users_reward:X")
    assert says in message
    assert "\n" not in message


def test_a_reward_module_that_is_not_found_says_where_to_put_it() -> None:
    assert "put that folder on PYTHONPATH" in refused(ConfigError, "reward.name=no_such_module_here:X")
