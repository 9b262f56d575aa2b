"""Files that a user names: read only when they are regular files, and JSON in them refused in one line."""

from __future__ import annotations

import json
import os
import stat
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
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


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
