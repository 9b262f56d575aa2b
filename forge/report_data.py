"""What the files of a run folder say, read for a report; whatever is missing or damaged is left out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from forge.jsonl import read_lines

MOST_ROLLOUT_BYTES = 512 * 2**20
"""Of a rollouts.jsonl larger than this only the end is read; the page says so."""

LARGEST = 1e300
"""Beyond this a sum or a difference of two values would overflow; nothing that a run measures comes near it."""

Points = list[tuple[float, float]]


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """What the files of a run say."""

    title: str
    config: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """metrics.jsonl, one row a step."""
    summary: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    calibration: list[dict[str, Any]] = field(default_factory=list)
    episodes: int = 0
    """Lines of rollouts.jsonl that were read."""
    partly: bool = False
    """rollouts.jsonl was too large to be read from its beginning."""
    finishes: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    """Why episodes were not trained."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What scoring failures said."""
    first: list[dict[str, Any]] = field(default_factory=list)
    """A few episodes of the first step."""
    last: list[dict[str, Any]] = field(default_factory=list)
    """A few episodes of the last step."""

    def points(self, key: str) -> Points:
        """(step, value) of the steps that have a finite value."""
        return [(float(row["step"]), float(row[key])) for row in self.rows if is_finite(row.get(key))]

    def total(self, key: str) -> float:
        """Sum of a metric over the steps."""
        return math.fsum(y for _, y in self.points(key))


def read_run(folder: Path) -> RunRecord:
    """Reads all of a run's files that are there; lines and files that cannot be read are left out."""
    record = RunRecord(title=f"{folder.resolve().parent.name} / {folder.resolve().name}")
    with suppress(OSError):
        record.config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    rows = [row for row in _rows(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]
    by_step = {row["step"]: row for row in rows if is_finite(row["step"])}
    record.rows = [by_step[step] for step in sorted(by_step)]
    record.calibration = list(_rows(folder / "calibration.jsonl"))
    summary, samples = _json(folder / "summary.json"), _json(folder / "samples.json")
    record.summary = summary if isinstance(summary, dict) else {}
    record.samples = [s for s in samples if isinstance(s, dict)] if isinstance(samples, list) else []
    _read_rollouts(folder / "rollouts.jsonl", record)
    return record


def _read_rollouts(path: Path, record: RunRecord) -> None:
    with suppress(OSError):
        record.partly = path.stat().st_size > MOST_ROLLOUT_BYTES
    first_step: int | None = None
    last_step: int | None = None
    for row in _rows(path, tail=MOST_ROLLOUT_BYTES):
        record.episodes += 1
        record.finishes[str(row.get("finish_reason"))] += 1
        if row.get("dropped"):
            record.drops[str(row["dropped"])] += 1
        if row.get("failure"):
            record.reasons[str(row["failure"])[:200]] += 1
        step = row.get("step")
        if not isinstance(step, int):
            continue
        kept = {key: row.get(key) for key in ("step", "question", "answer", "text", "reward", "prompt_id")}
        first_step = step if first_step is None else first_step
        if step == first_step and len(record.first) < 4:
            record.first.append(kept)
        if step != last_step:
            last_step, record.last = step, []
        if len(record.last) < 4:
            record.last.append(kept)


def _rows(path: Path, tail: int | None = None) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        yield from read_lines(path, tail=tail)


def _json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return None


def is_finite(value: object) -> TypeGuard[float]:
    """True for a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
