"""Runs Python that nobody vouches for, in a process that may compute and write in one temporary folder.

    run_python ── files ── confined.py gives up its powers, runs the program ── killed, folder removed ── Outcome

Linux on x86-64 and arm64, with Landlock (kernel 5.13) and seccomp; no root and no namespaces are needed, so it works
in containers. Where the kernel lacks them it refuses; it never runs a program unprotected. What a program can still
do: use a processor until its time is over, read the interpreter's own files, and ask whether a path exists.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forge.errors import ConfigError
from forge.sandbox import confined

MAX_TEXT = 64 * 1024
"""Bytes of a program's output that are read."""
FILE_MIB = 4
"""Largest file of a program, its output included."""
MAX_FOLDER_BYTES, MAX_FOLDER_FILES = 64 << 20, 1000
"""What a program may leave in its folder before it is killed."""
POLL_S = 0.01


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    """Exit status; negative: the signal that ended it."""
    stdout: str
    """First 64 KiB of what it printed; bytes that are no UTF-8 are replaced."""
    stderr: str
    failure: str | None
    """Why it was killed ("timeout", "files"); None when it ended by itself."""


def sandbox_problem() -> str | None:
    """Why this machine cannot run the sandbox; None when it can."""
    if sys.platform != "linux" or platform.machine() not in confined.AUDIT_ARCH:
        return f"needs Linux on x86-64 or arm64, this is {sys.platform} on {platform.machine()}"
    if (version := confined.landlock_version()) < 1:
        return (
            f"needs Landlock (Linux 5.13 and later), and this kernel ({os.uname().release}) says it has none: {version}"
        )
    return None


def run_python(code: str, *, stdin: str = "", timeout_s: float, memory_mb: int) -> Outcome:
    """Run a program in a fresh interpreter with the standard library and nothing else.

    Args:
        timeout_s: of wall time, its start included.
        memory_mb: address space in MiB beyond the bare interpreter's.

    Raises:
        ConfigError: this machine cannot confine it; nothing was run.
    """
    if (problem := sandbox_problem()) is not None:
        raise ConfigError(f"running code of a model {problem}: use another reward on this machine")
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="forge-sandbox-") as scratch:
        place, folder = Path(scratch), Path(scratch) / "folder"
        folder.mkdir()
        (place / "program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        (place / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        limits = [str(memory_mb), str(math.ceil(timeout_s) + 1), str(FILE_MIB)]
        files = [(place / "stdin", "rb"), (place / "out", "wb"), (place / "err", "wb")]
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(path.open(mode)) for path, mode in files)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", confined.__file__, str(place / "program.py"), *limits, *_readable()],
                cwd=folder, env={}, stdin=given, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        try:
            failure = _watch(process, folder, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        outcome = Outcome(status=status, stdout=_text(place / "out"), stderr=_text(place / "err"), failure=failure)
    if status == confined.REFUSED and outcome.stderr.startswith("the sandbox could not be closed"):
        raise ConfigError(f"running code of a model is not possible here: {outcome.stderr.strip()}")
    return outcome


def _watch(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> str | None:
    """Wait for the end; why it must be killed, if it must."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return "timeout"
        if _too_much(folder):
            return "files"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return None


def _too_much(folder: Path) -> bool:
    size = count = 0
    for path, _, files in os.walk(folder):
        for name in files:
            count += 1
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_size
            if count > MAX_FOLDER_FILES or size > MAX_FOLDER_BYTES:
                return True
        count += 1
    return False


@cache
def _readable() -> tuple[str, ...]:
    """Folders that an interpreter without packages reads: its library, and shared libraries of the system."""
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    wanted = (*own, "/lib", "/lib64", "/usr/lib", "/usr/lib64")
    return tuple(dict.fromkeys(str(Path(p).resolve()) for p in wanted if Path(p).is_dir()))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_TEXT).decode("utf-8", errors="replace")
