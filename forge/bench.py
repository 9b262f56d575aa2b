"""Benchmarks as claims: a ratio of ours to a peer or a limit, measured alternately in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(kw_only=True, slots=True, frozen=True)
class Claim:
    """One measured ratio."""

    claim: str
    """What is compared with what; names the peer or limit."""
    ours: float
    """Median of ours."""
    peer: float
    """Median of the peer."""
    unit: str
    ratio: float
    """ours / peer: for times and bytes the smaller is better, for throughput the larger."""
    runs: int
    """Runs of each side that the medians are taken over."""


async def alternate(
    ours: Callable[[], Awaitable[float]], peer: Callable[[], Awaitable[float]], *, runs: int
) -> tuple[list[float], list[float]]:
    """Measure both sides `runs` times, taking turns at going first, after one unmeasured run of each."""
    await ours()
    await peer()
    a: list[float] = []
    b: list[float] = []
    for i in range(runs):
        for side, results in ((ours, a), (peer, b)) if i % 2 == 0 else ((peer, b), (ours, a)):
            results.append(await side())
    return a, b


def claim(text: str, ours: Sequence[float], peer: Sequence[float], unit: str) -> Claim:
    """A claim from the measurements of both sides."""
    mine, theirs = statistics.median(ours), statistics.median(peer)
    return Claim(claim=text, ours=mine, peer=theirs, unit=unit, ratio=mine / theirs, runs=len(ours))


def write_claims(claims: Sequence[Claim], path: Path) -> None:
    """Write claims as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(c) for c in claims], indent=2) + "\n")


def table(claims: Sequence[Claim]) -> str:
    """Claims as aligned text."""
    head = ("claim", "ours", "peer", "unit", "ratio", "runs")
    rows = [(c.claim, f"{c.ours:.4g}", f"{c.peer:.4g}", c.unit, f"{c.ratio:.3f}", str(c.runs)) for c in claims]
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in (head, *rows)
    )
