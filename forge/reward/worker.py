"""The process that runs a reward, one episode at a time.

Protocol over one duplex pipe, in order: the pool sends the reward (cloudpickle) and the memory limit; the worker
answers {"ready": true} or {"error": …} and ends. Then for every pickled episode one JSON reply: {"reward", "rewards"}
or {"error"}. Replies are JSON and not pickles, so that nothing which happens here can run code in the pool's process.

The worker is started as `python -c` with the pool's `sys.path`: unlike a multiprocessing child it does not import the
caller's `__main__` again, so it works in a notebook, in a script without a main guard and below Monarch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from forge.reward.base import Reward, read_result

MAX_ERROR = 500
"""Characters of an error that are sent back; a reply must fit the pipe's buffer so that sending never blocks."""
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20


def main(descriptor: int, parent: int) -> None:
    """Serve until the pipe closes.

    Args:
        descriptor: inherited file descriptor of the pipe.
        parent: process id of the pool; the worker ends at once when that process is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with contextlib.closing(Connection(descriptor)) as pipe, contextlib.suppress(EOFError, BrokenPipeError):
        try:
            payload, memory_mb = pickle.loads(pipe.recv_bytes())
            reward: Reward = pickle.loads(payload)
            reward.setup()
        except Exception as error:
            _send(pipe, {"error": _told(error)})
            return
        _limit_memory(memory_mb)
        _send(pipe, {"ready": True})
        while True:
            message = pipe.recv_bytes()
            try:
                value, parts = read_result(reward(pickle.loads(message)), reward.name)
                _send(pipe, {"reward": value, "rewards": parts})
            except MemoryError:
                _send(pipe, {"error": f"out of memory: it asked for more than {memory_mb} MiB", "spent": True})
                return
            except (Exception, SystemExit, GeneratorExit, KeyboardInterrupt) as error:
                _send(pipe, {"error": _told(error)})


def _limit_memory(memory_mb: int) -> None:
    """Allow the address space that the process has now plus `memory_mb`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * _MIB
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _send(pipe: Connection, reply: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(reply).encode())


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR]


BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from forge.reward.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""What `python -c` runs, with the arguments descriptor, parent and sys.path as JSON."""


def command(descriptor: int) -> list[str]:
    """The command line of a worker whose pipe is `descriptor`."""
    return [sys.executable, "-c", BOOT, str(descriptor), str(os.getpid()), json.dumps(sys.path)]
