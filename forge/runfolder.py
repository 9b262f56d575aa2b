"""The folder of a run and the records in it.

    runs/<app>/<name or time>/
    ├── config.yaml         the resolved configuration, secrets blanked
    ├── metrics.jsonl       one strict-JSON line a step, in order, none missing and none twice
    ├── rollouts.jsonl      one line an episode: tokens, log-probs, versions, reward, why kept or dropped
    ├── calibration.jsonl   one line a calibration
    ├── samples.json        held-out answers before and after
    ├── summary.json        written once at the end; atomic
    ├── report.html         the run as pictures
    └── logs/  checkpoints/  export/  tensorboard/

Records never stop a run: a line that cannot be written is kept in memory and tried again with the next one, the
failure is counted, and the first one is warned about. Only what is written at the start (the folder, the
configuration) or at the end (the summary) raises, since without it the run has no record at all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, ForgeError
from forge.files import expand
from forge.jsonl import Lines, read_lines, strict, to_json, write_atomic
from forge.metrics import NOT_FINITE
from forge.redact import redact
from forge.types import Episode, Group

log = logging.getLogger(__name__)


_NAME = re.compile(r"[\w][\w.+=,@ -]*")
_LOCK = ".lock"


class RunFolder:
    """A run's folder, open for writing by one process at a time. Made by `create`."""

    def __init__(self, path: Path, *, warn: Callable[[str], None] | None = None) -> None:
        """Opens an existing folder.

        Args:
            path: the run's own folder.
            warn: receives each warning once; by default they are logged.

        Raises:
            ConfigError: the folder cannot be written, or another process is writing to it.
        """
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.calibration = path / "calibration.jsonl"
        self.samples = path / "samples.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.tensorboard = path / "tensorboard"
        self._lock = _take_lock(path)
        self._not_finite = 0
        try:
            for directory in (self.logs, self.checkpoints):
                directory.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(_unwritable(path, error)) from error
        warn = warn or log.warning
        self._metrics = Lines(self.metrics, warn)
        self._rollouts = Lines(self.rollouts, warn)
        self._calibration = Lines(self.calibration, warn)
        self._steps = _steps(self.metrics)

    @classmethod
    def create(
        cls, root: Path, app: str, name: str | None, resume: bool = False, *, warn: Callable[[str], None] | None = None
    ) -> RunFolder:
        """Makes and opens `root/app/name`, or `root/app/<time>` without a name.

        Args:
            resume: an existing folder of that name is continued; otherwise it is refused unless it is empty.

        Raises:
            ConfigError: the name cannot be a folder name, is taken, in use, or the place cannot be written.
        """
        parent = expand(root) / app
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"name must be one folder name of letters, digits and -_.+=,@ (got {name!r}); "
                f"the place is chosen with out=, now {str(root)!r}"
            )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _timestamped(parent) if name is None else parent / name
            path.mkdir(exist_ok=True)
            taken = [entry for entry in os.listdir(path) if entry != _LOCK]
        except OSError as error:
            raise ConfigError(_unwritable(parent, error)) from error
        if taken and not resume:
            raise ConfigError(
                f"name={name} is taken: {path} holds {', '.join(sorted(taken)[:3])}{' …' if len(taken) > 3 else ''}. "
                f"Continue it with resume=auto, choose another name, leave the name out, or remove the folder"
            )
        return cls(path, warn=warn)

    def write_config(self, text: str) -> None:
        """Writes config.yaml with secrets blanked. Raises ForgeError when it cannot."""
        self._write(self.config, redact(text))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json in one step: a reader finds the old one or all of the new one. Raises ForgeError."""
        self._write(self.summary, self._dumps(summary, indent=2) + "\n")

    def write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples.json: id, question, answer, before, after, reward_before, reward_after of held-out rows."""
        self._write(self.samples, self._dumps(list(samples), indent=2) + "\n")

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Adds a step's row; `row["step"]` is the step's 1-based number.

        A row of a step that is there already is merged into it, whenever it arrives: an evaluation that ends two
        steps late belongs to the step it evaluated. Values that are not finite become null, and
        `metrics/not_finite` of the row says how many.
        """
        step = int(row["step"])
        clean, replaced = strict(row)
        if replaced:
            clean[NOT_FINITE] = clean.get(NOT_FINITE, 0) + replaced
            self._not_finite += replaced
        if self._steps and step <= self._steps[-1]:
            self._metrics.edit(lambda rows: _merged(rows, clean))
        else:
            self._metrics.append([to_json(clean)])
        if step not in self._steps:
            self._steps = sorted([*self._steps, step])

    def append_rollouts(self, groups: Iterable[Group], *, version: int, mask_truncated: bool = False) -> None:
        """Adds one line for each episode of the groups that a step consumed, the dropped ones included.

        Args:
            version: weights the step trained; the step's number is `version + 1`.
            mask_truncated: completions that a length limit cut off are not trained.
        """
        self._rollouts.append(
            self._dumps(record)
            for group in groups
            for record in rollout_records(group, version=version, mask_truncated=mask_truncated)
        )

    def append_calibration(self, row: Mapping[str, Any]) -> None:
        """Adds one calibration: the scales proposed, what was measured, accepted or rejected and why."""
        self._calibration.append([self._dumps(row)])

    def truncate_after(self, step: int) -> tuple[int, ...]:
        """Forgets all records of later steps, and half-written lines; what a resume from `step` calls first.

        Returns:
            the steps in 1..step that have no metrics row (a crash lost them before they reached the disk).
        """
        self._metrics.edit(lambda rows: _one_a_step(rows, step))
        for sink in (self._rollouts, self._calibration):
            sink.edit(lambda rows: (row for row in rows if _step(row) <= step))
        self._steps = _steps(self.metrics)
        return tuple(sorted(set(range(1, step + 1)) - set(self._steps)))

    def statistics(self) -> dict[str, float]:
        """Writes that failed, lines lost for good, lines waiting for a retry, values replaced by null."""
        sinks = (self._metrics, self._rollouts, self._calibration)
        return {
            "records/failed_writes": float(sum(s.failed for s in sinks)),
            "records/lost_lines": float(sum(s.lost for s in sinks)),
            "records/waiting_lines": float(sum(len(s.waiting) for s in sinks)),
            "records/not_finite": float(self._not_finite),
        }

    def close(self) -> None:
        """Writes what still waits and lets another process open the folder."""
        for sink in (self._metrics, self._rollouts, self._calibration):
            sink.append([])
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _dumps(self, value: Any, indent: int | None = None) -> str:
        try:
            return to_json(value, indent)
        except ValueError:  # something is not finite: the slow way
            clean, replaced = strict(value)
            self._not_finite += replaced
            return to_json(clean, indent)

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomic(path, text)
        except OSError as error:
            reason = error.strerror or error
            raise ForgeError(f"{path} cannot be written ({reason}); free space or choose a place with out=") from error


def rollout_records(group: Group, *, version: int, mask_truncated: bool = False) -> Iterator[dict[str, Any]]:
    """The lineage of each episode of a group that a step on weights `version` consumed."""
    sampled = any(e.num_response_tokens for e in group.episodes)
    oldest, newest = (group.min_version, group.max_version) if sampled else (None, None)
    age = None if oldest is None else version - oldest
    for e in group.episodes:
        dropped = _why_not_trained(group, e, mask_truncated)
        yield {
            "step": version + 1,
            "group": group.index,
            "member": e.member,
            "prompt_id": e.prompt.id,
            "kept": dropped is None,
            "dropped": dropped,
            "reward": e.reward,
            "rewards": dict(e.rewards),
            "failure": e.failure,
            "advantage": e.advantage,
            "trained_version": version,
            "min_version": oldest,
            "max_version": newest,
            "age": age,
            "replica": e.completion.replica,
            "finish_reason": e.completion.finish_reason.value,
            "prompt_tokens": len(e.prompt.token_ids),
            "question": e.prompt.question,
            "answer": e.prompt.answer,
            "text": e.completion.text,
            "token_ids": list(e.completion.token_ids),
            "logprobs": list(e.completion.logprobs),
            "versions": list(e.completion.versions),
        }


# Rows ------------------------------------------------------------------------------------------------------------


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _steps(path: Path) -> list[int]:
    """Steps that have a row, ascending."""
    if not path.exists():
        return []
    try:
        return sorted({_step(row) for row in read_lines(path)})
    except OSError:
        return []


def _one_a_step(rows: Iterable[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """The newest row of each step up to `last`, in order."""
    by_step = {_step(row): row for row in rows if 1 <= _step(row) <= last}
    return [by_step[step] for step in sorted(by_step)]


def _merged(rows: Iterable[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    by_step = {_step(row): row for row in rows}
    step = _step(new)
    by_step[step] = by_step.get(step, {}) | new
    return [by_step[s] for s in sorted(by_step)]


def _why_not_trained(group: Group, episode: Episode, mask_truncated: bool) -> str | None:
    if group.dropped is not None:
        return group.dropped
    if episode.failure is not None:
        return "scoring_failed"
    if episode.num_response_tokens == 0:
        return "no_tokens"
    return "truncated" if mask_truncated and episode.truncated else None


# The folder itself -----------------------------------------------------------------------------------------------


def _timestamped(parent: Path) -> Path:
    """A new folder named after the time; runs started in the same second get -2, -3 …"""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _take_lock(path: Path) -> int | None:
    """Keeps a second process out for as long as this one lives, however it ends.

    A record lock: a forked child does not inherit it, so that a leftover worker cannot block a resume.
    """
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(_unwritable(path, error)) from error
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except (BlockingIOError, PermissionError) as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"{path} is in use by another run (process {owner}); wait for it, stop it, or choose another name"
        ) from error
    except OSError:
        log.debug("no file locks in %s", path, exc_info=True)  # some network file systems have none
    return fd


def _unwritable(path: Path, error: OSError) -> str:
    return f"runs are kept in {path}, which cannot be written ({error.strerror or error}); choose a place with out="
