"""JSON-lines files that stay whole and strict: no half line, no NaN, whatever the disk and the numbers do."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

RETRY_LIMIT_BYTES = 16 * 2**20
"""How much of one record is kept in memory while it cannot be written; a full disk must not fill the memory too."""


class Lines:
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
                    file.write(to_json(row) + "\n")
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


def read_lines(path: Path, *, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a half-written line (a crash while writing) is left out.

    Args:
        tail: read only the last so many bytes of a larger file, from the first line that begins there.
    """
    with path.open("rb") as file:
        if tail is not None and os.fstat(file.fileno()).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()
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


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; raises ValueError on NaN and infinities. What JSON has no type for is written as text."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # a NumPy or Torch scalar
    return item() if callable(item) else str(value)


def strict(value: Any) -> tuple[Any, int]:
    """The value as strict JSON can hold it, and how many numbers became null for not being finite."""
    if isinstance(value, float):
        return (float(value), 0) if math.isfinite(value) else (None, 1)
    if isinstance(value, Mapping):
        items = [(str(key), *strict(item)) for key, item in value.items()]
        return {key: item for key, item, _ in items}, sum(n for _, _, n in items)
    if isinstance(value, (list, tuple)):
        pairs = [strict(item) for item in value]
        return [item for item, _ in pairs], sum(n for _, n in pairs)
    if value is None or isinstance(value, (str, int)):
        return value, 0
    return strict(_plain(value))


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
