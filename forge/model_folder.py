"""The check a Hugging Face model folder passes before anything is loaded from it.

Reads config.json, the tokenizer's presence and the headers of the safetensors files; no weights, no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge.errors import ModelFolderError
from forge.files import check_regular, path_problem, read_json
from forge.jsonl import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model types Forge trains, with their architecture."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format; more means the file is something else."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DIGESTS = "forge_digests.json"
"""In folders that Forge wrote: {"sha256": digest of every other file of the folder by name}."""
REPORTS = ("parity.json", "layers.json", "layers.md", "layers.png")
"""Files that describe a folder, and are not copied with its model."""

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Of weights that can be trained, with the bytes of an element."""
_OPTIONAL_SIZES = ("head_dim", "num_key_value_heads", "max_position_embeddings")
_SHOWN = 5  # names listed of many


def check_model_folder(path: Path) -> None:
    """Refuse a folder that cannot be trained from, naming everything wrong with it at once.

    Raises:
        ModelFolderError: one line for each missing or broken file, unsupported family, quantized or pickled
            checkpoint, or disagreement between configuration, index and shards.
    """
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ModelFolderError(f"model folder {path} {found}: give a Hugging Face folder, or `forge fetch smollm2`")
    problems: list[str] = []
    config = _check_config(path, problems)
    _check_tokenizer(path, problems)
    tensors = _check_weights(path, problems)
    if config is not None and tensors is not None:
        problems.extend(_disagreements(config, tensors))
    if problems:
        raise ModelFolderError([f"{path}: {problem}" for problem in problems])


def weight_map(path: Path) -> dict[str, str]:
    """Which file of a checked folder each tensor is read from; where there is an index, it decides."""
    index = path / INDEX
    if index.exists():
        found: dict[str, str] = read_json(index)["weight_map"]
        return found
    return dict.fromkeys(read_header(path / SINGLE), SINGLE)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Header of a safetensors file by tensor name: dtype, shape, data_offsets.

    Raises:
        ValueError: in one line, what the file is instead.
    """
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError("is a Git LFS pointer, not the weights: run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"is cut short or not safetensors ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
            wrong = next((name for name, t in header.items() if not _fills_its_place(t)), None)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ValueError("has a broken header") from error
    if end != size:
        raise ValueError(f"has {size} bytes where its header promises {end}: copy it again")
    if wrong is not None:
        raise ValueError(f"has a header in which shape, dtype and place of {wrong} do not agree: copy it again")
    tensors: dict[str, dict[str, Any]] = header
    return tensors


def _fills_its_place(tensor: Mapping[str, Any]) -> bool:
    """Whether the bytes between a tensor's offsets are those of its shape; of unknown dtypes only their sign is."""
    start, end = tensor["data_offsets"]
    size = _DTYPES.get(tensor["dtype"])
    if not (all(type(n) is int and n >= 0 for n in tensor["shape"]) and 0 <= start <= end):
        return False
    return size is None or end - start == math.prod(tensor["shape"]) * size


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_digests(folder: Path) -> None:
    """Write the digest of every file of a folder into it."""
    found = {f.name: sha256(f) for f in sorted(folder.iterdir()) if f.name != DIGESTS}
    write_atomic(folder / DIGESTS, json.dumps({"sha256": found}, indent=1) + "\n")


def check_digests(folder: Path) -> int:
    """Compare every file of a folder that Forge wrote with its digest.

    Returns:
        number of files compared.

    Raises:
        ModelFolderError: files that are missing, damaged, or have no digest.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ModelFolderError(f"{folder} {found}: give a folder that Forge exported quantized")
    path = folder / DIGESTS
    try:
        listed: dict[str, str] = read_json(path)["sha256"]
        if not listed or not all(isinstance(value, str) for value in listed.values()):
            raise ValueError
        if any(path_problem(name) or "/" in name or name in ("", ".", "..") for name in listed):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelFolderError(f"{folder}: {DIGESTS} is missing or damaged, so nothing can be compared") from None
    problems = [f"{folder}: {n} is missing" for n in listed if not (folder / n).is_file()]
    problems += [
        f"{folder}: {n} is damaged: its content differs from what was written; copy it again"
        for n, value in listed.items()
        if (folder / n).is_file() and sha256(folder / n) != value
    ]
    known = {*listed, DIGESTS}
    problems += [
        f"{folder}: {f.name} was not written with the others" for f in sorted(folder.iterdir()) if f.name not in known
    ]
    if problems:
        raise ModelFolderError(problems)
    return len(listed)


def _check_config(path: Path, problems: list[str]) -> dict[str, Any] | None:
    config = _read_object(path / "config.json", problems)
    if config is None:
        return None
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        problems.append(f"config.json: model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
        config = None
    else:
        named = config.get("architectures") or [FAMILIES[family]]
        if named != [FAMILIES[family]]:
            problems.append(f"config.json: architectures must be [{FAMILIES[family]!r}] for {family}, got {named}")
        given = [*_SIZES, *(key for key in _OPTIONAL_SIZES if config.get(key) is not None)]
        sizes = [key for key in given if type(config.get(key)) is not int or config[key] < 1]
        if sizes:
            problems.append(f"config.json: {', '.join(sizes)} must be whole numbers above 0")
            config = None
        else:
            problems.extend(f"config.json: {problem}" for problem in not_computed(config))
    if config is not None and config.get("quantization_config") is not None:
        kind = config["quantization_config"]
        method = kind.get("quant_method") if isinstance(kind, Mapping) else kind
        problems.append(
            f"config.json: the model is already quantized (quantization_config {method!r}): "
            "start from the unquantized model, Forge quantizes it"
        )
    return config


def not_computed(config: Mapping[str, Any]) -> Iterator[str]:
    """What the trainer would not compute as the configuration says."""
    odd = [k for k in ("rope_scaling", "rope_parameters") if not isinstance(config.get(k) or {}, Mapping)]
    if odd:
        yield f"{', '.join(odd)} must be JSON objects or null"
        return
    heads, keys = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if not config.get("head_dim") and config["hidden_size"] % heads:
        yield f"hidden_size {config['hidden_size']} must be a multiple of num_attention_heads {heads}"
    if heads % keys:
        yield f"num_attention_heads {heads} must be a multiple of num_key_value_heads {keys}"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act must be silu, got {config['hidden_act']!r}"
    if config.get("use_sliding_window"):
        yield "use_sliding_window must be false: sliding-window layers are not computed by the trainer"
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        yield f"RoPE type must be default or llama3, got {kind!r}: the trainer does not compute it exactly"


def _check_tokenizer(path: Path, problems: list[str]) -> None:
    if (path / "tokenizer.json").exists():
        _read_object(path / "tokenizer.json", problems)
    elif not (path / "tokenizer.model").exists():
        problems.append("tokenizer.json is missing: copy it from where the model came")
    _read_object(path / "tokenizer_config.json", problems)
    if (path / "generation_config.json").exists():
        _read_object(path / "generation_config.json", problems)


def _check_weights(path: Path, problems: list[str]) -> dict[str, dict[str, Any]] | None:
    """All tensors of the folder, or None when a file is missing or broken."""
    files = {file.name: file for file in sorted(path.glob("*.safetensors"))}
    if (path / INDEX).exists():  # engines read by it where there is one
        return _check_shards(path, files, problems)
    if "model.safetensors" in files:
        return _read_headers([files["model.safetensors"]], problems)
    pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(path.glob(pattern))]
    if (path / "adapter_config.json").exists():
        problems.append("holds an adapter, not a model: merge it into its base model and save that")
    elif files:
        problems.append(f"{INDEX} is missing: it says which of the {len(files)} safetensors files holds what")
    elif pickled:
        problems.append(
            f"only pickled weights ({_some(pickled)}), which can run code when they are read: "
            "convert them to safetensors"
        )
    else:
        problems.append("no weights: model.safetensors is missing")
    return None


def _check_shards(path: Path, files: Mapping[str, Path], problems: list[str]) -> dict[str, dict[str, Any]] | None:
    index = _read_object(path / INDEX, problems)
    if index is None:
        return None
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        problems.append(f"{INDEX}: weight_map must map tensor names to files")
        return None
    before = len(problems)
    shards = sorted(set(listed.values()))
    for shard in shards:
        if shard not in files:
            names = [name for name, where in listed.items() if where == shard]
            problems.append(f"{shard} is missing; {INDEX} puts {len(names)} tensors in it ({_some(names)})")
    tensors: dict[str, dict[str, Any]] = {}
    for shard in (s for s in shards if s in files):
        held = _read_headers([files[shard]], problems)
        if held is None:
            continue
        names = [name for name, where in listed.items() if where == shard and name not in held]
        if names:
            problems.append(f"{shard} lacks {len(names)} tensors that {INDEX} puts in it ({_some(names)})")
        extra = [name for name in held if listed.get(name) != shard]
        if extra:
            problems.append(f"{shard} holds {len(extra)} tensors that {INDEX} does not put in it ({_some(extra)})")
        tensors.update(held)
    return tensors if len(problems) == before else None


def _read_headers(files: Iterable[Path], problems: list[str]) -> dict[str, dict[str, Any]] | None:
    tensors: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            tensors.update(read_header(file))
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
            return None
        except ValueError as error:
            problems.append(f"{file.name} {error}")
            return None
    return tensors


def _disagreements(config: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if config["num_hidden_layers"] > len(tensors):
        layers = config["num_hidden_layers"]
        yield f"config.json has num_hidden_layers {layers}, the weights have {len(tensors)} tensors"
        return
    needed = dict(_needed(config))
    missing = sorted(needed.keys() - tensors.keys())
    if missing:
        yield f"the weights lack {len(missing)} tensors that config.json implies ({_some(missing)})"
    odd = sorted({str(t.get("dtype")) for t in tensors.values()} - _DTYPES.keys())
    if odd:
        yield f"weights of type {', '.join(odd)}: must be {', '.join(sorted(_DTYPES))}; start from an unquantized model"
    for name, shape in needed.items():
        if name in tensors and tensors[name].get("shape") != shape:
            yield f"{name} has shape {tensors[name].get('shape')}, config.json says {shape}"


def _needed(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every weight that a configuration implies."""
    width, hidden, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    yield "model.embed_tokens.weight", [config["vocab_size"], width]
    yield "model.norm.weight", [width]
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", [config["vocab_size"], width]
    parts = {
        "self_attn.q_proj": [heads * head_dim, width],
        "self_attn.k_proj": [keys, width],
        "self_attn.v_proj": [keys, width],
        "self_attn.o_proj": [width, heads * head_dim],
        "mlp.gate_proj": [hidden, width],
        "mlp.up_proj": [hidden, width],
        "mlp.down_proj": [width, hidden],
        "input_layernorm": [width],
        "post_attention_layernorm": [width],
    }
    if config["model_type"] == "qwen3":
        parts |= {"self_attn.q_norm": [head_dim], "self_attn.k_norm": [head_dim]}
    for layer in range(config["num_hidden_layers"]):
        yield from ((f"model.layers.{layer}.{part}.weight", shape) for part, shape in parts.items())


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = read_json(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: copy it from where the model came")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path.name} is not JSON: {error}")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"{path.name} must hold a JSON object, found {type(content).__name__}")
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
