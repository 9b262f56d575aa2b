"""Checkpoints on disk: complete or absent, newest K kept.

    checkpoints/step-12/          renamed into place when everything in it is on disk
        trainer-00000-of-00002.safetensors …   master weights, moments, schedule: one file a rank
        state.json                              step, data order, calibration

safetensors and JSON only: nothing of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.buffer import DataOrder
from forge.errors import ConfigError, PartFailed
from forge.files import read_json
from forge.model_folder import read_header

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
        self._replaced = folder / f"replaced{PARTIAL}"
        with contextlib.suppress(ConfigError, OSError):  # killed while a checkpoint took the place of its namesake
            self._replaced.rename(folder / f"step-{read_state(self._replaced).step}")

    def begin(self) -> Path:
        """A fresh folder for the trainer's files; not a checkpoint until `commit`.

        Raises:
            PartFailed: it cannot be made.
        """
        self.discard()
        partial = self.folder / f"writing{PARTIAL}"
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise PartFailed("checkpoint", f"{partial} cannot be made: {error.strerror}") from None
        return partial

    def commit(self, partial: Path, state: RunState) -> Path:
        """Make it a checkpoint, then remove what is older than the newest `keep`.

        Raises:
            PartFailed: a file of it is cut short, or the disk refuses; older checkpoints stay.
        """
        try:
            for part in partial.glob("*.safetensors"):
                read_header(part)
            with (partial / "state.json").open("w") as file:
                json.dump(asdict(state), file)
                file.flush()
                os.fsync(file.fileno())
            _fsync_folder(partial)
            final = self.folder / f"step-{state.step}"
            shutil.rmtree(self._replaced, ignore_errors=True)
            if final.exists():  # the same step again: it stays on disk until the new one has its name
                final.rename(self._replaced)
            partial.rename(final)
            shutil.rmtree(self._replaced, ignore_errors=True)
            _fsync_folder(self.folder)
        except (OSError, ValueError) as error:
            raise PartFailed("checkpoint", f"step {state.step}: {error}") from None
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def discard(self) -> None:
        """Remove what was begun and not committed, to give its space back."""
        shutil.rmtree(self.folder / f"writing{PARTIAL}", ignore_errors=True)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        found = [
            p
            for p in self.folder.glob("step-*")
            if p.name.removeprefix("step-").isdecimal() and (p / "state.json").exists()
        ]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.complete()), None)


class BackgroundSaves:
    """Writes one checkpoint at a time beside training. A save that fails is warned about and counted, and costs no
    earlier checkpoint; the next one is tried as usual.

    Args:
        snapshot: copies the state of training; the only part that training waits for.
        write: writes the copy into a folder.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        snapshot: Callable[[], Awaitable[RunState]],
        write: Callable[[Path], Awaitable[object]],
        warn: Callable[[str], None],
    ) -> None:
        self.checkpoints, self._snapshot, self._write, self._warn = checkpoints, snapshot, write, warn
        self._writing: asyncio.Task[Path] | None = None
        self.failed = 0
        """Saves that did not become a checkpoint."""
        self.seconds: dict[str, float] = {}
        """Of the last save: "copy", in which training waits, and "write", beside it."""

    async def start(self) -> None:
        """Copy the state and begin to write it, once the save before is done."""
        await self.settle()
        start = time.perf_counter()
        state = await self._snapshot()
        self.seconds["copy"] = time.perf_counter() - start
        self._writing = asyncio.create_task(self._finish(state))

    async def settle(self) -> None:
        """Wait for the save that is being written."""
        try:
            await self.result()
        except PartFailed as error:
            self._warn(f"{error}; this checkpoint is missing, earlier ones are whole")

    async def result(self) -> Path | None:
        """The checkpoint that is being written; None if there is none.

        Raises:
            PartFailed: it could not be written.
        """
        if self._writing is None:
            return None
        try:
            final = await asyncio.shield(self._writing)
        except PartFailed:
            self._writing = None
            self.failed += 1
            raise
        self._writing = None
        return final

    async def _finish(self, state: RunState) -> Path:
        start = time.perf_counter()
        try:
            partial = self.checkpoints.begin()
            await self._write(partial)
            final = await asyncio.to_thread(self.checkpoints.commit, partial, state)
        except PartFailed:
            self.checkpoints.discard()
            raise
        self.seconds["write"] = time.perf_counter() - start
        return final


def read_state(checkpoint: Path) -> RunState:
    """The controller's part of a checkpoint.

    Raises:
        ConfigError: the folder is not a complete checkpoint.
    """
    reason = "state.json is missing or holds something else"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = read_json(checkpoint / "state.json")
        state = RunState(**{**found, "order": DataOrder(**found["order"])})
        order = state.order
        whole = [state.step, state.seed, state.prompts_per_step, order.next_group, *order.pending]
        if all(type(n) is int and n >= 0 for n in whole) and isinstance(state.calibration, dict):
            reason = "a file of the trainer is missing or damaged"
            for file in trainer_files(checkpoint):
                read_header(file)
            return state
    raise ConfigError(f"resume={checkpoint}: not a complete checkpoint ({reason}): give a step-N folder of a run")


def trainer_file(rank: int, ranks: int) -> str:
    """Name of a rank's file in a checkpoint."""
    return f"trainer-{rank:05d}-of-{ranks:05d}.safetensors"


def trainer_files(checkpoint: Path) -> list[Path]:
    """The files of all ranks that wrote a checkpoint, in order.

    Raises:
        FileNotFoundError: one is missing, or there is none.
    """
    found = sorted(checkpoint.glob("trainer-*-of-*.safetensors"))
    if [f.name for f in found] != [trainer_file(rank, len(found)) for rank in range(len(found))] or not found:
        raise FileNotFoundError(f"{checkpoint} has not the trainer's files of all ranks: {[f.name for f in found]}")
    return found


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
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
