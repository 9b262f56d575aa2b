"""The check of a model folder names everything wrong at once, and reads no weights."""

import json
import shutil

import pytest

from forge.errors import ModelFolderError
from forge.fetch import fetch
from forge.model_folder import INDEX, check_model_folder, read_header


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return fetch("tiny", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    return tmp_path / "model"


def problems(folder):
    with pytest.raises(ModelFolderError) as caught:
        check_model_folder(folder)
    assert all(p.startswith(f"{folder}: ") for p in caught.value.problems)
    return [p.removeprefix(f"{folder}: ") for p in caught.value.problems]


def edit(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def write_safetensors(path, names, dtype="BF16"):
    header = {name: {"dtype": dtype, "shape": [1], "data_offsets": [2 * i, 2 * i + 2]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 2 * len(names))


def shard(folder):
    """The same tensors in three shards with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    halves = {"model-00001-of-00002.safetensors": names[1:20], "model-00002-of-00002.safetensors": names[20:]}
    held = {"model-0.safetensors": names[:1], **halves}
    for file, part in held.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in held.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return halves


def test_a_whole_folder_passes(folder):
    check_model_folder(folder)
    shard(folder)
    check_model_folder(folder)


def test_a_missing_folder_and_a_file_are_one_line(tmp_path):
    with pytest.raises(ModelFolderError, match=r"model folder .*none does not exist: give a Hugging Face folder"):
        check_model_folder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match=r"model folder .*file is a file"):
        check_model_folder(tmp_path / "file")


def test_everything_missing_is_listed_at_once(tmp_path):
    assert problems(tmp_path) == [
        "config.json is missing: copy it from where the model came",
        "tokenizer.json is missing: copy it from where the model came",
        "tokenizer_config.json is missing: copy it from where the model came",
        "no weights: model.safetensors is missing",
    ]


def test_files_that_are_not_json_are_named(folder):
    (folder / "config.json").write_text('{"model_type": ')
    (folder / "tokenizer.json").write_text("[]")
    found = problems(folder)
    assert found[0].startswith("config.json is not JSON: Expecting value")
    assert found[1] == "tokenizer.json must hold a JSON object, found list"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "config.json: model_type must be one of llama, qwen2, qwen3, got 'gemma3'"),
        ({"model_type": ...}, "config.json: model_type must be one of llama, qwen2, qwen3, got None"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "config.json: architectures must be ['LlamaForCausalLM'] for llama, got ['LlamaForSequenceClassification']",
        ),
        ({"hidden_size": "256"}, "config.json: hidden_size must be whole numbers above 0"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "config.json: the model is already quantized (quantization_config 'gptq'): "
            "start from the unquantized model, Forge quantizes it",
        ),
        ({"vocab_size": 500}, "model.embed_tokens.weight has shape [512, 256], config.json says [500, 256]"),
        (
            {"num_hidden_layers": 5, "tie_word_embeddings": False},
            "the weights lack 10 tensors that config.json implies (lm_head.weight, "
            "model.layers.4.input_layernorm.weight, model.layers.4.mlp.down_proj.weight, "
            "model.layers.4.mlp.gate_proj.weight, model.layers.4.mlp.up_proj.weight and 5 more)",
        ),
    ],
)
def test_a_configuration_that_cannot_be_trained_is_refused(folder, changes, message):
    edit(folder, **changes)
    assert problems(folder) == [message]


def test_a_folder_of_pickled_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (found,) = problems(folder)
    assert found.startswith("only pickled weights (pytorch_model.bin), which can run code")
    assert found.endswith("convert them to safetensors")


def test_an_adapter_is_not_a_model(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    assert problems(folder) == ["holds an adapter, not a model: merge it into its base model and save that"]


def test_weights_of_a_quantized_type_are_refused(folder):
    names = read_header(folder / "model.safetensors")
    edit(folder, hidden_size=1, vocab_size=1)
    write_safetensors(folder / "model.safetensors", list(names), dtype="I8")
    found = problems(folder)
    assert found[0] == "weights of type I8: must be BF16, F16, F32; start from an unquantized model"


def test_a_download_cut_short_is_noticed_from_the_size(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    (found,) = problems(folder)
    size = len(data)
    assert found == f"model.safetensors has {size - 1000} bytes where its header promises {size}: copy it again"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the weights: run `git lfs pull`"),
        (b"", "is cut short or not safetensors (0 bytes)"),
        (b"\xff" * 64, "is cut short or not safetensors (64 bytes)"),
        (b"\x02" + b"\0" * 7 + b"[]", "has a broken header"),
        (b"\x0b" + b"\0" * 7 + b'{"a": null}', "has a broken header"),
    ],
)
def test_something_else_in_place_of_the_weights_is_named(folder, content, message):
    (folder / "model.safetensors").write_bytes(content)
    assert problems(folder) == [f"model.safetensors {message}"]


def test_a_missing_shard_is_named_with_what_it_should_hold(folder):
    halves = shard(folder)
    name = "model-00002-of-00002.safetensors"
    (folder / name).unlink()
    (found,) = problems(folder)
    assert found.startswith(f"{name} is missing; {INDEX} puts {len(halves[name])} tensors in it ({halves[name][0]}, ")


def test_index_and_shards_that_disagree_are_named(folder):
    halves = shard(folder)
    name = "model-00001-of-00002.safetensors"
    write_safetensors(folder / name, [*halves[name][1:], "model.extra.weight"])
    assert problems(folder) == [
        f"{name} lacks 1 tensors that {INDEX} puts in it ({halves[name][0]})",
        f"{name} holds 1 tensors that {INDEX} does not put in it (model.extra.weight)",
    ]


def test_shards_without_an_index_are_refused(folder):
    shard(folder)
    (folder / INDEX).unlink()
    assert problems(folder) == [f"{INDEX} is missing: it says which of the 3 safetensors files holds what"]


@pytest.mark.parametrize("content", ["{", '{"weight_map": []}', "{}"])
def test_a_broken_index_is_refused(folder, content):
    shard(folder)
    (folder / INDEX).write_text(content)
    (found,) = problems(folder)
    assert found.startswith(INDEX)


def test_the_index_says_which_file_a_tensor_is_read_from(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    from forge.model_folder import weight_map

    save_file({"a": np.zeros(2, np.float32), "stale": np.zeros(1, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    assert weight_map(tmp_path) == {"b": "model.safetensors"}
    where = {"a": "one.safetensors", "b": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert weight_map(tmp_path) == where


def test_a_header_that_contradicts_itself_is_refused(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"BF16"', b'"F32" '))
    (found,) = problems(folder)
    assert "shape, dtype and place of" in found


def test_values_of_odd_types_in_config_json_are_refused(folder):
    for key, value in (
        ("rope_scaling", [1]),
        ("model_type", ["llama"]),
        ("head_dim", "x"),
        ("max_position_embeddings", "x"),
    ):
        before = (folder / "config.json").read_text()
        edit(folder, **{key: value})
        (found,) = problems(folder)
        assert key in found
        (folder / "config.json").write_text(before)
    edit(folder, num_hidden_layers=10**8)
    (found,) = problems(folder)
    assert "num_hidden_layers 100000000, the weights have" in found


def test_an_index_decides_also_beside_a_single_file(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "nosuch.safetensors"}}')
    (found,) = problems(folder)
    assert found.startswith("nosuch.safetensors is missing")
