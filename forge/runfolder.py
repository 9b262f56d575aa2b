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
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, ForgeError
from forge.metrics import NOT_FINITE
from forge.types import Episode, Group

log = logging.getLogger(__name__)

RETRY_LIMIT_BYTES = 16 * 2**20
"""How much of one record is kept in memory while it cannot be written; a full disk must not fill the memory too."""
REDACTED = '"<redacted>"'

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
        self._metrics = _Lines(self.metrics, warn)
        self._rollouts = _Lines(self.rollouts, warn)
        self._calibration = _Lines(self.calibration, warn)
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
        parent = Path(root).expanduser() / app
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
        clean, replaced = _strict(row)
        if replaced:
            clean[NOT_FINITE] = clean.get(NOT_FINITE, 0) + replaced
            self._not_finite += replaced
        if self._steps and step <= self._steps[-1]:
            self._metrics.edit(lambda rows: _merged(rows, clean))
        else:
            self._metrics.append([_json(clean)])
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
            return _json(value, indent)
        except ValueError:  # something is not finite: the slow way
            clean, replaced = _strict(value)
            self._not_finite += replaced
            return _json(clean, indent)

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomic(path, text)
        except OSError as error:
            reason = error.strerror or error
            raise ForgeError(f"{path} cannot be written ({reason}); free space or choose a place with out=") from error


def rollout_records(group: Group, *, version: int, mask_truncated: bool = False) -> Iterator[dict[str, Any]]:
    """The lineage of each episode of a group that a step on weights `version` consumed."""
    sampled = any(e.num_response_tokens for e in group.episodes)
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
            "min_version": group.min_version if sampled else None,
            "max_version": group.max_version if sampled else None,
            "age": version - group.min_version if sampled else None,
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


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file so that a reader, or a crash, finds the old text or all of the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


# Secrets ---------------------------------------------------------------------------------------------------------

_KEY_LINE = re.compile(
    r"""^(?P<indent>\s*(?:-\s+)?)(?P<quote>["']?)(?P<key>[\w.+/@-]+)(?P=quote)(?P<sep>\s*[:=]\s*)(?P<value>.*)$"""
)
_INLINE = re.compile(
    r"""(?P<head>(?P<quote>["']?)\b(?P<key>[\w.-]+)(?P=quote)\s*[:=]\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s,}\]&"']+)"""
)
_URL_LOGIN = re.compile(r"(?P<head>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)", re.IGNORECASE)
_HARMLESS = re.compile(r"""(?:null|none|~|true|false|""|''|\[\]|\{\}|[-+]?[\d_.]+(?:e[-+]?\d+)?)""", re.IGNORECASE)
_SECRET_WORDS = frozenset(
    "secret secrets password passwd authorization credentials apikey accesskey privatekey secretkey".split()
)
_TEXT_TOKENS = frozenset("eos bos pad unk mask sep cls end stop start special per id ids limit budget".split())
"""Words that make a key like `eos_token` or `token_ids` name a piece of text and not a credential."""


def is_secret(key: str) -> bool:
    """True for keys that name a credential: hf_token, api_key, wandbApiKey, password … but not max_new_tokens.

    Only whole words of the key count, so `tokenizer` and `tokens` are not secrets.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key).lower())
    if "token" in words and not _TEXT_TOKENS & set(words):
        return True
    return bool(_SECRET_WORDS & {*words, *(a + b for a, b in pairwise(words))})


def redact(text: str) -> str:
    """The configuration text with the values of secret keys, and passwords in URLs, blanked.

    Numbers, booleans and null stay: they are no credentials, and `token: null` says something useful.
    """
    lines: list[str] = []
    hidden: int | None = None  # indentation of a secret key whose value is on the lines below it
    for line in text.splitlines(keepends=True):
        body, end = line.rstrip("\r\n"), line[len(line.rstrip("\r\n")) :]
        depth = len(body) - len(body.lstrip())
        if hidden is not None and _belongs_to(hidden, body):
            continue
        hidden = None
        found = _KEY_LINE.match(body)
        if found and is_secret(found["key"]):
            value = found["value"].strip()
            if not value or value[0] in "|>":
                hidden = depth
                lines.append(f"{body[: found.start('value')].rstrip()} {REDACTED}{end}")
                continue
            if not _HARMLESS.fullmatch(value):
                lines.append(f"{body[: found.start('value')]}{REDACTED}{end}")
                continue
        lines.append(_redact_inline(body) + end)
    return "".join(lines)


def _belongs_to(depth: int, body: str) -> bool:
    """True for lines of the value of a key at that indentation: deeper, blank, or an item of its list."""
    stripped = body.lstrip()
    indent = len(body) - len(stripped)
    return not stripped or indent > depth or (indent == depth and stripped.startswith("- "))


def _redact_inline(body: str) -> str:
    """Blanks secrets in flow mappings (`{token: abc}`), in overrides (`- reward.api_key=abc`) and in URLs."""

    def blank(found: re.Match[str]) -> str:
        keep = not is_secret(found["key"]) or _HARMLESS.fullmatch(found["value"])
        return found[0] if keep else found["head"] + REDACTED

    return _URL_LOGIN.sub(rf"\g<head>{REDACTED[1:-1]}", _INLINE.sub(blank, body))


# Lines -----------------------------------------------------------------------------------------------------------


class _Lines:
    """Appends lines to a file so that every line in it is whole, whatever the disk does."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self.warn = warn
        self.failed = 0
        self.lost = 0
        self.waiting: deque[bytes] = deque()
        self._warned = False

    def append(self, lines: Iterable[str]) -> None:
        """Adds lines; those that cannot be written wait for the next call. Never raises."""
        try:
            # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
            self.waiting.extend(line.encode("utf-8", "backslashreplace") + b"\n" for line in lines)
        except (TypeError, ValueError) as error:  # a value no JSON can hold: this record is lost, the run is not
            self.lost += 1
            self._failure(error)
        if self.waiting:
            try:
                _append(self.path, b"".join(self.waiting))
                self.waiting.clear()
            except OSError as error:
                self._failure(error)
        size = sum(map(len, self.waiting))
        while size > RETRY_LIMIT_BYTES:
            size -= len(self.waiting.popleft())
            self.lost += 1

    def edit(self, change: Callable[[Iterator[dict[str, Any]]], Iterable[dict[str, Any]]]) -> None:
        """Replaces the file by what `change` makes of its rows, atomically. Never raises."""
        self.append([])
        if self.waiting:  # the file lacks rows, so there is nothing sound to edit
            self.lost += 1
            return
        if not self.path.exists():
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for row in change(read_lines(self.path)):
                    file.write(_json(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            self._failure(error)

    def _failure(self, error: Exception) -> None:
        self.failed += 1
        if not self._warned:
            self._warned = True
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            self.warn(
                f"{self.path} cannot be written ({reason}); the run goes on, lines are kept in memory and tried again"
            )


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a half-written line (a crash while writing) is left out."""
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _append(path: Path, data: bytes) -> None:
    """Adds all of `data` or nothing, on a fresh line."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # left by a crash
            size = _end_of_last_line(fd, size)
        os.lseek(fd, size, os.SEEK_SET)
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, data[written:])
        except OSError:
            os.ftruncate(fd, size)
            raise
        os.ftruncate(fd, size + written)
    finally:
        os.close(fd)


def _end_of_last_line(fd: int, size: int) -> int:
    block = 1 << 16
    while size > 0:
        start = max(0, size - block)
        newline = os.pread(fd, size - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        size = start
    return 0


def _json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; raises ValueError on NaN and infinities. What JSON has no type for is written as text."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # a NumPy or Torch scalar
    return item() if callable(item) else str(value)


def _strict(value: Any) -> tuple[Any, int]:
    """The value as strict JSON can hold it, and how many numbers became null for not being finite."""
    if isinstance(value, float):
        return (float(value), 0) if math.isfinite(value) else (None, 1)
    if isinstance(value, Mapping):
        items = [(str(key), *_strict(item)) for key, item in value.items()]
        return {key: item for key, item, _ in items}, sum(n for _, _, n in items)
    if isinstance(value, (list, tuple)):
        pairs = [_strict(item) for item in value]
        return [item for item, _ in pairs], sum(n for _, n in pairs)
    if value is None or isinstance(value, (str, int)):
        return value, 0
    return _strict(_plain(value))


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
