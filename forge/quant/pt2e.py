"""Static int8 by PT2E: a model folder becomes one torch.export file for Inductor on x86 or Arm CPUs.

    transformers model ── torch.export ── observers (prepare) ── rows (calibrate) ── convert ── torch.export ── .pt2

It succeeds the eager fbgemm / qnnpack flow and TorchScript. The file computes logits of a whole sequence, token ids
int64 [1, L] to float32 [1, L, V], for any L of 2 to `max_len`.

A fresh process imports `torch.ao.quantization.fx._decomposed`, which registers the file's operators, before it calls
`torch.export.load`.
"""

from __future__ import annotations

import os
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge.errors import ConfigError, DataError, ModelFolderError, PartFailed

ARCHITECTURES = ("x86", "arm")


@dataclass(kw_only=True, slots=True, frozen=True)
class Pt2Report:
    """What was written, and how far it is from the float model on the calibration rows."""

    arch: str
    quantized: int
    """Linear layers that are quantized."""
    linears: int
    left: tuple[str, ...]
    """Linear layers that stay float."""
    kl: float
    """Mean KL(float || quantized), nats a token."""
    logprob_gap: float
    """Mean |difference of log-probs| of the rows' own tokens."""
    argmax_agreement: float
    seconds: float
    peak_rss_gib: float
    file_bytes: int


class _Logits(nn.Module):
    """A causal model as a function of token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False).logits
        return logits


def export_pt2(
    folder: Path,
    rows: Sequence[tuple[int, ...]],
    *,
    arch: str,
    target: Path,
    max_len: int,
    skip: str = "lm_head",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pt2Report:
    """Quantize a checked model folder and write the .pt2 file, complete or not at all.

    Args:
        rows: token ids to calibrate on, each of 2 to `max_len` tokens.
        arch: "x86" or "arm": whose Inductor quantizer annotates the graph.
        skip: regular expression of linear layers that stay float.
        on_progress: called with (rows calibrated, all rows).

    Raises:
        ConfigError: another arch, or a skip that leaves nothing.
        DataError: no rows, or rows that are too short or too long.
        ModelFolderError: a weight that is not finite.
        PartFailed: torch.export cannot capture the model, or an observer never saw a value.
    """
    _check(rows, arch=arch, max_len=max_len)
    start = time.perf_counter()
    model = _load(folder)
    vocabulary = _vocabulary(model)
    if strange := [i for i, r in enumerate(rows) if not 0 <= min(r) <= max(r) < vocabulary]:
        raise DataError(f"row {strange[0]} holds token ids outside the model's vocabulary of {vocabulary}")
    names = [n for n, m in model.model.named_modules() if isinstance(m, nn.Linear)]
    chosen = [n for n in names if not re.search(skip, n)]
    if not chosen:
        raise ConfigError(f"skip={skip!r} leaves none of {len(names)} linear layers to quantize")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export and PT2E announce their own deprecations
        expected = [model(torch.tensor([r])) for r in rows]
        try:
            converted = _convert(model, rows, arch, chosen, max_len, on_progress)
        except RuntimeError as error:  # what torch.export raises for a graph it cannot capture
            raise PartFailed("pt2e", f"the model cannot be captured or converted: {str(error)[:400]}") from error
        partial = target.with_name(f"partial-{target.name}")
        torch.export.save(converted, partial)
        restored = torch.export.load(partial).module()  # what is compared is what was written
        found = [restored(torch.tensor([r])) for r in rows]
    os.replace(partial, target)
    kl = gap = agree = 0.0
    count = 0
    for row, a, b in zip(rows, expected, found, strict=True):
        true, other = torch.log_softmax(a[0].float(), -1), torch.log_softmax(b[0].float(), -1)
        kl += float((true.exp() * (true - other)).sum())
        own = (true - other)[:-1].gather(-1, torch.tensor(row[1:])[:, None])
        gap += float(own.abs().sum()) * len(row) / max(len(row) - 1, 1)
        agree += float((true.argmax(-1) == other.argmax(-1)).sum())
        count += len(row)
    return Pt2Report(
        arch=arch,
        quantized=len(chosen),
        linears=len(names),
        left=tuple(n for n in names if n not in chosen),
        kl=kl / count,
        logprob_gap=gap / count,
        argmax_agreement=agree / count,
        seconds=time.perf_counter() - start,
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        file_bytes=target.stat().st_size,
    )


def _check(rows: Sequence[tuple[int, ...]], *, arch: str, max_len: int) -> None:
    if arch not in ARCHITECTURES:
        raise ConfigError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if not rows:
        raise DataError("PT2E calibrates on rows of token ids, and there are none: give data")
    bad = [i for i, r in enumerate(rows) if not 2 <= len(r) <= max_len]
    if bad:
        raise DataError(
            f"rows to calibrate on must have 2 to {max_len} tokens; row {bad[0]} has {len(rows[bad[0]])} "
            f"({len(bad)} of {len(rows)} rows)"
        )


def _load(folder: Path) -> _Logits:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelFolderError(f"{folder}: {name} holds values that are not finite: nothing is exported")
    return _Logits(model)


def _vocabulary(model: _Logits) -> int:
    inner: Any = model.model
    size: int = inner.get_input_embeddings().num_embeddings
    return size


def _convert(
    model: _Logits,
    rows: Sequence[tuple[int, ...]],
    arch: str,
    chosen: Sequence[str],
    max_len: int,
    on_progress: Callable[[int, int], None],
) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    length = torch.export.Dim("length", min=2, max=max_len)
    example = (torch.tensor([rows[0]]),)
    shapes = ({1: length},)
    captured = torch.export.export(model, example, dynamic_shapes=shapes).module()
    prepared = prepare_pt2e(captured, _quantizer(arch, chosen))
    for i, row in enumerate(rows):
        prepared(torch.tensor([row]))
        on_progress(i + 1, len(rows))
    if silent := sorted(_silent(prepared.named_modules())):
        raise PartFailed("pt2e", f"observers that saw no finite range: {', '.join(silent[:5])} ({len(silent)})")
    converted = convert_pt2e(prepared)
    used = {str(node.target) for node in converted.graph.nodes if node.op == "get_attr"}
    for name in [n for n, _ in converted.named_parameters() if n not in used]:  # float weights that codes replaced
        owner, _, leaf = name.rpartition(".")
        delattr(converted.get_submodule(owner), leaf)
    return torch.export.export(converted, example, dynamic_shapes=shapes)


def _quantizer(arch: str, chosen: Sequence[str]) -> Any:
    """The architecture's quantizer, told of the chosen layers alone."""
    if arch == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        config = x86.get_default_x86_inductor_quantization_config()
    else:
        from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer as arm

        quantizer = arm.ArmInductorQuantizer()
        config = arm.get_default_arm_inductor_quantization_config()
    for name in chosen:
        quantizer.set_module_name_qconfig(f"model.{name}", config)
    return quantizer


def _silent(modules: Iterable[tuple[str, nn.Module]]) -> Iterable[str]:
    for name, module in modules:
        low, high = getattr(module, "min_val", None), getattr(module, "max_val", None)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            seen = low.numel() > 0 and bool(torch.isfinite(low).all() and torch.isfinite(high).all())
            if not seen or not bool((high > low).any()):
                yield name
