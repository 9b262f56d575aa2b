"""Monarch, and the only file that knows it: processes, actors, calls, and their end.

A part of Forge is a mesh of processes with one actor in each. Everything a worker process needs before it imports
torch (environment, log file, signals) is set in `_bootstrap`, which runs there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by Monarch's runtime when it loads. Frames: the default of 10 GiB is kept, but TorchStore prints and rewrites it
# unless it is set. Logs: Monarch's own go to files under /tmp by default and its errors to the terminal.
FRAME_LIMIT = "HYPERACTOR_CODEC_MAX_FRAME_LENGTH"
os.environ.setdefault(FRAME_LIMIT, str(10 * 2**30))
os.environ.setdefault("MONARCH_FILE_LOG", "off")
os.environ.setdefault("MONARCH_STDERR_LOG", "off")
os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "WARNING")

import monarch.actor as _monarch  # noqa: E402
from monarch._src.actor.actor_mesh import ActorError  # noqa: E402
from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint, this_host  # noqa: E402

from forge.errors import ForgeError, PartDied, PartFailed  # noqa: E402

__all__ = [
    "Actor",
    "Part",
    "concurrent_endpoint",
    "current_rank",
    "endpoint",
    "host",
    "names_the_dead",
    "spawn",
]

try:
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
except ImportError:  # moved between Monarch versions
    from monarch.actor import SupervisionError

log = logging.getLogger(__name__)

_MALLOPT = {
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 64 * 2**20),
    "M_MMAP_MAX": (-4, 0),
    "M_ARENA_MAX": (-8, 1),
}
"""Parameters of mallopt(3) by their names in malloc.h: never trim, grow in large pieces, no mmap, one arena."""
PARENT_POLL_S = 1.0
"""How often a worker looks whether its controller still lives."""
STOP_TIMEOUT_S = 5.0
"""How long a part may take to stop before its processes are killed."""


@dataclass(kw_only=True, slots=True)
class Part:
    """A mesh of processes and the actor that runs in each of them."""

    name: str
    """"generator 0", "trainer" …, for messages."""
    procs: Any
    actor: Any
    pids: list[int]

    async def call(self, endpoint: str, *args: Any) -> list[Any]:
        """Call an endpoint on every process; results in rank order.

        Raises:
            ForgeError: what the endpoint raised, as it was.
            PartFailed: any other exception there.
            PartDied: a process of the part is gone.
        """
        with self._errors(endpoint):
            result = await getattr(self.actor, endpoint).call(*args)
            return [value for _, value in result.items()]

    async def call_one(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint of a part that has one process. Raises as `call`."""
        with self._errors(endpoint):
            return await getattr(self.actor, endpoint).call_one(*args)

    @contextlib.contextmanager
    def _errors(self, endpoint: str) -> Iterator[None]:
        try:
            with names_the_dead(self.name, endpoint):
                yield
        except ActorError as error:
            if isinstance(error.exception, ForgeError):
                raise error.exception from None
            raise PartFailed(
                self.name, f"{endpoint} failed: {error.exception!r}\n{error.exception_formatted}"
            ) from None

    async def stop(self) -> None:
        """End the processes: ask, wait STOP_TIMEOUT_S, then kill."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.procs.stop(), STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL whatever of the part is still there."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def names_the_dead(name: str, doing: str) -> Iterator[None]:
    """Around every call that reaches another process: its death is a PartDied of `name`, not Monarch's error."""
    try:
        yield
    except SupervisionError:
        raise PartDied(name, f"its process died during {doing}; its log is in logs/ of the run folder") from None


@functools.cache
def host() -> Any:
    """The host mesh of this machine.

    Monarch's runtime starts here and announces its own log file on the terminal; that one line is let go. It would end
    the controller when a process dies: whoever calls the part is told instead, and says which it was.
    """
    _monarch.unhandled_fault_hook = lambda failure: log.info("%s", failure)
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return this_host()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


async def spawn(
    name: str,
    actor: type[Actor],
    *args: Any,
    count: int = 1,
    log_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    gpus: range | None = None,
) -> Part:
    """Start `count` processes with one `actor(*args)` in each.

    Args:
        name: of the part; log files are `log_dir`/<name>-<rank>.log.
        env: variables set there before anything else is imported.
        gpus: GPUs of this host for the part, the same number for each process; None leaves them as they are.
    """
    slug = name.replace(" ", "-")
    log = str(log_dir / slug) if log_dir else None
    setup = _Bootstrap(env=dict(env or {}), log=log, parent=os.getpid(), gpus=gpus, count=count)
    procs = host().spawn_procs(per_host={"ranks": count}, bootstrap=setup, name=slug)
    with names_the_dead(name, "its start"):
        await procs.initialized
        probe = procs.spawn(f"{slug}_pid", _Pid)
        pids = [pid for _, pid in (await probe.pid.call()).items()]
    return Part(name=name, procs=procs, actor=procs.spawn(slug, actor, *args), pids=pids)


class _Pid(Actor):
    """Tells its process id, so that the controller can be sure a process is gone."""

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()


@dataclass(slots=True)
class _Bootstrap:
    """Runs first in a new worker process."""

    env: dict[str, str]
    log: str | None
    parent: int
    gpus: range | None
    count: int

    def __call__(self) -> None:
        os.environ.update(self.env)
        tempfile.tempdir = None  # chosen before TMPDIR was known
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus_of(current_rank().rank, self.count, self.gpus)
        # Parts share the machine's cores: a thread that waits at a barrier must not spin on one.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        _keep_freed_memory()
        if self.log is not None:
            rank = current_rank().rank
            descriptor = os.open(f"{self.log}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        threading.Thread(target=_die_with, args=(self.parent,), name="parent-watch", daemon=True).start()


def gpus_of(rank: int, count: int, gpus: range) -> str:
    """CUDA_VISIBLE_DEVICES of one process: an equal share of the part's GPUs.

    Example: gpus_of(1, 2, range(4, 8)) is "6,7".
    """
    share = len(gpus) // count
    return ",".join(map(str, gpus[rank * share : (rank + 1) * share]))


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of giving it back: tensors of the same sizes come again every step,
    and faulting their pages in anew costs a CPU trainer about a tenth of its time. Other C libraries ignore it."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOPT.values():
            mallopt(parameter, value)


def _die_with(parent: int) -> None:
    """End this process when its controller is gone, however that happened."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(PARENT_POLL_S)
