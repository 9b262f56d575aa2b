"""Writes Hugging Face model folders: complete or absent, with a digest of every file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.model_folder import INDEX, REPORTS, write_digests

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4 * 2**30
"""Largest safetensors file of a written folder."""


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    target: Path,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a model folder, with every other file of a source folder beside them.

    Args:
        tensors: by Hugging Face name; written in this order, in files of at most SHARD_BYTES.
        source: its configuration, tokenizer, chat template and whatever else is copied.
        target: replaced if it exists; what is written appears complete or not at all.
        config: keys to set in config.json.
        metadata: of the safetensors files, beside their format.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        ours = file.name in REPORTS or file.name.startswith("forge_")
        weights = file.suffix in (".bin", ".gguf", ".safetensors", ".pt", ".pth") or file.name == INDEX
        if file.is_file() and not ours and not weights:
            shutil.copyfile(file, partial / file.name)
    if config:
        path = partial / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}, indent=2) + "\n")
    _write_shards(tensors, partial, {"format": "pt", **(metadata or {})})
    write_digests(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    names: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(shard, folder / f"{len(names)}.shard", metadata=metadata)
        names.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(names) == 1:
        (folder / "0.shard").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, members in enumerate(names):
        final = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{i}.shard").rename(folder / final)
        weight_map |= dict.fromkeys(members, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
