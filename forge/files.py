"""Files that a user names: read only when they are regular files, and JSON in them refused in one line.

And Forge's own temporary folders, which do not outlive the process that made them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.errors import ConfigError


def check_regular(path: Path) -> None:
    """Refuse what would be read for ever, or never answer: pipes, sockets and devices.

    Raises:
        OSError: it is none, or cannot be looked at.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "is not a regular file", str(path))


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: in one line, why it is not JSON.
    """
    check_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(name: str) -> None:
    raise ValueError(f"holds {name}, which JSON does not know")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is gone afterwards; those that killed processes have left are removed first.

    Its owner holds a lock on a file in it, which the system takes back however the owner ends.
    """
    for lock in Path(tempfile.gettempdir()).glob("forge-*/.lock"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="forge-") as name:
        folder = Path(name)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "lock").rename(folder / ".lock")  # nobody finds it before it is locked
            yield folder


def expand(path: str | Path) -> Path:
    """A path with its leading ~ or ~user replaced.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: no user of that name has a home folder here; write the path in full") from None


def path_problem(path: str) -> str | None:
    """Why no file system of Linux can hold such a path; None if one can."""
    if "\0" in path:
        return "holds a null byte, which no path can"
    if any(len(os.fsencode(part)) > 255 for part in Path(path).parts) or len(os.fsencode(path)) > 4095:
        return f"is too long for a path ({len(path)} characters; a name in it may have 255 bytes, the whole 4095)"
    return None
