"""Checkpoints on disk: complete or absent, newest K kept.

    checkpoints/step-12/          renamed into place when everything in it is on disk
        trainer-00000-of-00002.safetensors …   master weights, moments, schedule: one file a rank
        state.json                              step, data order, calibration

safetensors and JSON only: nothing of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.buffer import DataOrder
from forge.errors import ConfigError, PartFailed

PARTIAL = ".partial"


@dataclass(kw_only=True, slots=True, frozen=True)
class RunState:
    """What the controller remembers across a restart."""

    step: int
    """Optimizer steps taken."""
    seed: int
    """Seed of data order and sampling; a run continues only under the same one."""
    prompts_per_step: int
    """Groups a step took."""
    order: DataOrder
    """Groups that were admitted and not trained, and the first that was not admitted."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """State of the calibration gate: live scales, earlier ones, rejections; empty without quantization."""


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: their parent folder.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def begin(self) -> Path:
        """A fresh folder for the trainer's files; not a checkpoint until `commit`."""
        partial = self.folder / f"writing{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: RunState) -> Path:
        """Make it a checkpoint, then remove what is older than the newest `keep`."""
        with (partial / "state.json").open("w") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(partial)
        final = self.folder / f"step-{state.step}"
        replaced = self.folder / f"replaced{PARTIAL}"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # the same step again: it stays on disk until the new one has its name
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _fsync_folder(self.folder)
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        found = [
            p
            for p in self.folder.glob("step-*")
            if p.name.removeprefix("step-").isdigit() and (p / "state.json").exists()
        ]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.complete()), None)


def read_state(checkpoint: Path) -> RunState:
    """The controller's part of a checkpoint.

    Raises:
        ConfigError: the folder is not a complete checkpoint.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((checkpoint / "state.json").read_text())
        return RunState(**{**found, "order": DataOrder(**found["order"])})
    raise ConfigError(
        f"resume={checkpoint}: not a complete checkpoint (it needs a readable state.json): give a step-N folder"
    )


def check_resumable(state: RunState, *, seed: int, prompts_per_step: int, steps: int) -> None:
    """Refuse to continue under settings that would silently change the data order, or with nothing left to do.

    Raises:
        ConfigError: naming each setting that differs.
    """
    problems = []
    if state.seed != seed:
        problems.append(f"seed={seed}, but the checkpoint was written under seed={state.seed}: use that one")
    if state.prompts_per_step != prompts_per_step:
        problems.append(
            f"prompts_per_step={prompts_per_step}, but the checkpoint was written under {state.prompts_per_step}: "
            "its data order cannot be continued otherwise"
        )
    if state.step >= steps:
        problems.append(f"steps={steps}, but the checkpoint has taken {state.step} already: raise steps to go on")
    if problems:
        raise ConfigError(problems)


def _fsync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise PartFailed("checkpoint", f"{folder}: {error.strerror}") from None
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
