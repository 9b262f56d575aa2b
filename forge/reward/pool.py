"""Scoring episodes in worker processes that can be killed.

    score(episode) ── queue ── slot thread ── pipe ── worker process (forge.reward.worker)

Each slot is a thread that owns one worker and its pipe; slots share no lock, so a worker that hangs, dies or runs out
of memory costs the episode that it was scoring and nothing else. A slot that loses its worker starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, PartFailed
from forge.reward.base import Reward
from forge.reward.worker import command

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import TracebackType

    from forge.types import Episode

START_LIMIT_S = 120.0
"""For starting one worker: importing the reward's libraries on a loaded machine, once per worker."""
CLOSED = "the reward pool was closed"


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardStatistics:
    """Counts since the pool was made."""

    scored: int
    """Episodes that got a reward."""
    failed: int
    """Episodes that got none, timeouts and crashes included."""
    timeouts: int
    """Failed because the time limit passed; the worker was killed."""
    crashes: int
    """Failed because the worker process died."""


@dataclass(slots=True)
class _Counts:
    scored: int = 0
    failed: int = 0
    timeouts: int = 0
    crashes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RewardPool:
    """Scores episodes with one reward in `workers` processes.

    Args:
        reward: copied to every worker; a class defined in a notebook or in `__main__` travels by value.
        workers: processes, and so the episodes that are scored at the same time.
        timeout_s: for one call, from the moment the worker gets the episode. Loading the reward does not count.
        memory_mb: address space in MiB that a worker may use beyond what it holds once the reward is loaded.

    Raises:
        ConfigError: a limit is not positive, or the reward cannot be copied to another process.
    """

    def __init__(self, reward: Reward, *, workers: int, timeout_s: float, memory_mb: int) -> None:
        problems = [
            f"{name} = {value!r}: must be above 0"
            for name, value in (("workers", workers), ("timeout_s", timeout_s), ("memory_mb", memory_mb))
            if not value > 0
        ]
        if problems:
            raise ConfigError(problems)
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[tuple[Episode, Future[Episode]] | None] = queue.SimpleQueue()
        self._counts = _Counts()
        self._closed = threading.Event()
        hello = pickle.dumps((_pickled(reward), memory_mb))
        self._slots = [_Slot(hello, self._closed) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"reward slot {index}", daemon=True)
            for index, slot in enumerate(self._slots)
        ]
        for thread in self._threads:
            thread.start()

    async def start(self) -> None:
        """Wait until every worker has loaded the reward. Optional: workers start with the pool and `score` waits.

        Raises:
            PartFailed: the reward cannot be loaded in a worker, so no episode could ever be scored.
        """
        await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(slot.first_start)) for slot in self._slots))

    async def score(self, episode: Episode) -> Episode:
        """The episode with `reward` and `rewards` set, or with `reward` None and `failure` saying why.

        Consumes one worker while it runs; waits for a free one. Never raises for a fault of the reward: an exception,
        a hang, a crash, or a result that is no finite number fail this episode alone. When cancelled before a worker
        took it, the episode is not scored; later, the call in the worker runs to its end and its result is dropped.
        """
        if self._closed.is_set():
            return replace(episode, reward=None, rewards={}, failure=CLOSED)
        done: Future[Episode] = Future()
        self._jobs.put((episode, done))
        if self._closed.is_set():
            self._drain()
        return await asyncio.wrap_future(done)

    def statistics(self) -> RewardStatistics:
        """Counts so far."""
        counts = self._counts
        with counts.lock:
            return RewardStatistics(
                scored=counts.scored, failed=counts.failed, timeouts=counts.timeouts, crashes=counts.crashes
            )

    def close(self) -> None:
        """Kill every worker and wait until they are gone. Episodes still waiting fail; calling it again is harmless."""
        self._closed.set()
        for slot in self._slots:
            slot.kill()
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._drain()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, slot: _Slot) -> None:
        """One slot's thread: start the worker, then score until the pool is closed."""
        slot.start_first()
        while (job := self._jobs.get()) is not None:
            episode, done = job
            if done.set_running_or_notify_cancel():
                done.set_result(self._score_in(slot, episode))
        slot.kill()

    def _score_in(self, slot: _Slot, episode: Episode) -> Episode:
        counts = self._counts
        try:
            reply = slot.call(pickle.dumps(episode), self._timeout_s)
        except Exception as error:  # nothing that an episode holds may end the slot
            reply = {"error": f"the episode could not be sent to a worker ({type(error).__name__}: {error})"}
        with counts.lock:
            if "reward" in reply:
                counts.scored += 1
                return replace(episode, reward=reply["reward"], rewards=reply["rewards"], failure=None)
            counts.failed += 1
            counts.timeouts += reply.get("kind") == "timeout"
            counts.crashes += reply.get("kind") == "crash"
        return replace(episode, reward=None, rewards={}, failure=reply["error"])

    def _drain(self) -> None:
        """Fail what is still queued after closing."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and job[1].set_running_or_notify_cancel():
                    job[1].set_result(replace(job[0], reward=None, rewards={}, failure=CLOSED))


class _Slot:
    """One worker process and its pipe. Used by one thread, except for `kill`."""

    def __init__(self, hello: bytes, closed: threading.Event) -> None:
        self._hello = hello
        self._closed = closed
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self.first_start: Future[None] = Future()

    def start_first(self) -> None:
        """Start the worker and report the outcome in `first_start`."""
        try:
            self._start()
            self.first_start.set_result(None)
        except Exception as error:
            self.first_start.set_exception(error)

    def call(self, message: bytes, timeout_s: float) -> dict[str, Any]:
        """Score one pickled episode; the reply, or {"error", "kind"}."""
        try:
            pipe = self._ready_pipe()
            try:
                pipe.send_bytes(message)
            except BrokenPipeError:  # it died between two calls, through no fault of this episode
                self.kill()
                pipe = self._ready_pipe()
                pipe.send_bytes(message)
        except (PartFailed, OSError) as error:
            self.kill()
            return self._lost(str(error))
        try:
            if not pipe.poll(timeout_s):
                self.kill()
                return {"error": f"timeout: the reward took longer than {timeout_s:g} s", "kind": "timeout"}
            reply: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._lost(f"crash: {_ended(self.kill())}")
        if reply.get("spent"):
            self.kill()
        return reply

    def kill(self) -> int | None:
        """End the worker and everything that it started; its exit status when it had already ended."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait() if code is None else code

    def _lost(self, reason: str) -> dict[str, Any]:
        return {"error": CLOSED} if self._closed.is_set() else {"error": reason, "kind": "crash"}

    def _ready_pipe(self) -> Connection:
        if self._process is None or self._pipe is None:
            self._start()
        assert self._pipe is not None
        return self._pipe

    def _start(self) -> None:
        """Start a worker and wait until it has loaded the reward.

        Raises:
            PartFailed: it could not.
        """
        if self._pipe is not None:
            self._pipe.close()
        ours, theirs = multiprocessing.Pipe()
        self._pipe = ours
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with contextlib.closing(theirs), self._lock:
            if self._closed.is_set():
                raise PartFailed("reward", CLOSED)
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        try:
            ours.send_bytes(self._hello)
            if not ours.poll(START_LIMIT_S):
                self.kill()
                raise PartFailed("reward", f"a worker did not load the reward within {START_LIMIT_S:g} s")
            reply = json.loads(ours.recv_bytes())
        except (EOFError, OSError):
            code = self.kill()
            reason = CLOSED if self._closed.is_set() else f"a worker ended while it loaded the reward: {_ended(code)}"
            raise PartFailed("reward", reason) from None
        if "error" in reply:
            self.kill()
            raise PartFailed("reward", f"the reward cannot be loaded in a worker: {reply['error']}")


def _pickled(reward: Reward) -> bytes:
    """The reward with its class by value where the class cannot be imported elsewhere."""
    import cloudpickle  # type: ignore[import-untyped]

    if not isinstance(reward, Reward):
        raise ConfigError(f"the reward is of type {type(reward).__name__}; subclass forge.reward.Reward")
    try:
        payload: bytes = cloudpickle.dumps(reward)
    except Exception as error:
        raise ConfigError(
            f"the reward {type(reward).__name__} cannot be copied to a worker process "
            f"({type(error).__name__}: {error}); open files, locks and connections in setup() instead of __init__"
        ) from error
    return payload


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"
