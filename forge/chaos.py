"""What must hold of a run whatever was killed while it trained, and the draw of what is killed when.

Read from the run folder and the process table alone: a run cannot tell about itself that it is sound.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from forge.checkpoint import Checkpoints, read_state
from forge.errors import ConfigError
from forge.model_folder import read_header

CONTROLLER = "controller"
LOG = re.compile(r"/logs/(?P<part>.+)-(?P<rank>\d+)\.log$")
LOSS_TOLERANCE = 1e-6


@dataclass(kw_only=True, slots=True, frozen=True)
class Strike:
    """One kill."""

    victim: str
    """A part by the name of its log file ("generator-0"), "reward worker", or "controller"."""
    step: int
    """It comes after this step was reported; 0 is before the first."""
    delay_s: float
    number: signal.Signals
    """SIGKILL, or SIGSTOP for a process that hangs."""


def draw(random: Random, parts: Sequence[str], *, steps: int, can_hang: Sequence[str] = ()) -> Strike:
    """A random part at a random moment.

    Args:
        steps: of the run; the last one is not struck after, when there is nothing left to recover.
        can_hang: parts that may be stopped instead of killed.
    """
    victim = random.choice(list(parts))
    hangs = victim in can_hang and random.random() < 0.3
    return Strike(
        victim=victim,
        step=random.randrange(steps),
        delay_s=random.uniform(0.0, 1.0),
        number=signal.SIGSTOP if hangs else signal.SIGKILL,
    )


def processes(controller: int) -> dict[str, list[int]]:
    """Pids of a running job by part, found by the log file that a process writes; reward workers by their parent."""
    import psutil

    found: dict[str, list[int]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(controller).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                match = LOG.search(os.readlink(f"/proc/{child.pid}/fd/1"))
                if match is None:
                    continue
                worker = match["part"] == "reward" and "monarch" not in " ".join(child.cmdline())
                found.setdefault("reward worker" if worker else match["part"], []).append(child.pid)
    return found


def violations(
    run: Path,
    *,
    steps: int,
    prompts_per_step: int,
    group_size: int,
    age_bound: int,
    losses: Mapping[int, float] | None = None,
    checkpoints: bool = True,
) -> list[str]:
    """What does not hold of a finished run; empty when all does. For runs in strict order (`async.window=0`).

    Args:
        losses: by step, of the same run undisturbed; given only where it is reproducible (`async.max_age=0`).
        checkpoints: whether there must be any.
    """
    metrics = _lines(run / "metrics.jsonl")
    problems: list[str] = []
    if [m["step"] for m in metrics] != list(range(1, steps + 1)):
        problems.append(f"metrics have steps {[m['step'] for m in metrics]}, not 1 to {steps} once each")
    groups = Counter(e["group"] for e in _lines(run / "rollouts.jsonl"))
    wanted = range(steps * prompts_per_step)
    if lost := [g for g in wanted if groups[g] < group_size]:
        problems.append(f"groups {lost} were not trained whole")
    if twice := [g for g, count in groups.items() if count > group_size]:
        problems.append(f"groups {twice} were trained more than once")
    if extra := sorted(set(groups) - set(wanted)):
        problems.append(f"groups {extra} were never to be trained")
    for m in metrics:
        if m["age/max"] > age_bound:
            problems.append(f"step {m['step']} trained age {m['age/max']}, above the bound {age_bound}")
        loss = m["loss/total"]
        if loss is None or not math.isfinite(loss):
            problems.append(f"step {m['step']} has loss {loss}")
        elif losses is not None and abs(loss - losses[m["step"]]) > LOSS_TOLERANCE * max(1.0, abs(loss)):
            problems.append(f"step {m['step']} has loss {loss}, undisturbed it is {losses[m['step']]}")
    return problems + _bad_checkpoints(run / "checkpoints", needed=checkpoints)


def losses_of(run: Path) -> dict[int, float]:
    """Loss of every step."""
    return {m["step"]: m["loss/total"] for m in _lines(run / "metrics.jsonl")}


def _bad_checkpoints(folder: Path, *, needed: bool) -> list[str]:
    problems = []
    complete = Checkpoints(folder, keep=1).complete()
    if needed and not complete:
        problems.append("there is no complete checkpoint")
    for checkpoint in complete:
        try:
            read_state(checkpoint)
            for file in checkpoint.glob("*.safetensors"):
                read_header(file)
        except (ConfigError, ValueError, OSError) as error:
            problems.append(f"{checkpoint.name} cannot be loaded: {error}")
    return problems


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
