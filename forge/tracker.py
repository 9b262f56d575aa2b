"""Where metrics are drawn besides metrics.jsonl: TensorBoard, Weights & Biases.

    controller ── log(step, metrics) ── Trackers ──┬── TensorBoardTracker   a file in the run folder, written at once
                                                   └── WandbTracker         a thread of its own; the controller
                                                                            never waits for the network

A tracker is a view of the run and cannot stop it: one that fails is switched off with a warning, and counted.
Both libraries are loaded only when asked for.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

log = logging.getLogger(__name__)

Warn = Callable[[str], None]


class Tracker(Protocol):
    """Something that shows metrics."""

    name: str
    """How warnings call it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one step; may raise."""

    def close(self) -> None:
        """Hands over what is left and lets go, in bounded time; may raise."""


class Trackers:
    """Several trackers as one that never raises."""

    def __init__(self, trackers: list[Tracker], *, warn: Warn | None = None, failures: int = 0) -> None:
        self.active = list(trackers)
        self.failures = failures
        """Trackers that failed, at opening or later."""
        self._warn = warn or log.warning

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Passes the finite numbers among `metrics` to every tracker that still works."""
        numbers = {key: float(value) for key, value in metrics.items() if _is_number(value)}
        for tracker in list(self.active):
            try:
                tracker.log(step, numbers)
            except Exception as error:  # any vendor's failure: the run goes on without that view
                self.active.remove(tracker)
                self._failed(tracker, error)

    def close(self) -> None:
        """Closes all of them, each within its own bounded time."""
        while self.active:
            tracker = self.active.pop()
            try:
                tracker.close()
            except Exception as error:  # as above
                self._failed(tracker, error)

    def statistics(self) -> dict[str, float]:
        """Number of trackers that failed."""
        return {"trackers/failed": float(self.failures)}

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self.failures += 1
        self._warn(f"{tracker.name} is switched off ({_reason(error)}); the run goes on, metrics.jsonl has everything")


def open_trackers(
    directory: Path,
    *,
    tensorboard: bool = False,
    wandb: bool = False,
    project: str = "forge",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    after_step: int = 0,
    warn: Warn | None = None,
) -> Trackers:
    """Opens the trackers asked for; one that cannot be opened is left out with a warning and counted.

    Args:
        directory: the run folder; everything a tracker keeps on disk goes into it.
        project: project of Weights & Biases.
        name: name of the run there; by default that of the folder.
        config: the resolved configuration, without secrets, for display.
        after_step: last step that is kept after a resume; later points drawn by an earlier try are hidden.
    """
    notify = warn or log.warning
    wanted: dict[str, Callable[[], Tracker]] = {}
    if tensorboard:
        wanted["TensorBoard"] = lambda: TensorBoardTracker(directory / "tensorboard", after_step=after_step)
    if wandb:
        wanted["Weights & Biases"] = lambda: WandbTracker(
            directory, project=project, name=name or directory.name, config=config or {}, warn=notify
        )
    opened: list[Tracker] = []
    for label, make in wanted.items():
        try:
            opened.append(make())
        except Exception as error:  # a missing package, a read-only folder, a vendor's own error
            notify(f"{label} is switched off ({_reason(error)}); the run goes on, metrics.jsonl has everything")
    return Trackers(opened, warn=notify, failures=len(wanted) - len(opened))


class TensorBoardTracker:
    """Writes TensorBoard events with TensorBoard's own record writer; needs neither Torch nor TensorFlow.

    Args:
        directory: where the event file goes.
        after_step: above 0, points of later steps in older event files of the folder are hidden by TensorBoard.
    """

    name = "TensorBoard"

    def __init__(self, directory: Path, *, after_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = (directory / f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}").open("ab")
        self._writer = RecordWriter(self._file)
        self._write(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if after_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=after_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one event with all scalars of the step and flushes it."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


@dataclass(kw_only=True, slots=True, frozen=True)
class WandbLimits:
    """The longest that Weights & Biases may take for anything, in seconds."""

    reach_s: float = 3.0
    """For the server to answer at all; one that does not is taken as unreachable."""
    start_s: float = 4.0
    """That the start of the run waits; after that it is set up in the background."""
    init_s: float = 8.0
    """For setting up online, in the background; after that the run is kept offline."""
    close_s: float = 15.0
    """For handing over the rest at the end; above `init_s`, so that a short run ends up offline and not lost."""


@dataclass(slots=True)
class _Mailbox:
    """What the controller hands to the thread. The thread alone talks to the vendor's library."""

    rows: queue.Queue[dict[str, float] | None] = field(default_factory=lambda: queue.Queue(maxsize=10_000))
    ready: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class WandbTracker:
    """Logs to Weights & Biases, or to its offline files in `directory/wandb` when there is no server or no key.

    Points are drawn over a `step` of our own, so that a late or repeated step is never discarded, and a resumed run
    continues under the same id (kept in `directory/wandb_run_id`).

    Args:
        directory: the run folder.
        warn: told where the run can be seen or why it is offline.
        limits: times that bound every wait.
    """

    name = "Weights & Biases"

    def __init__(
        self,
        directory: Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, Any],
        warn: Warn | None = None,
        limits: WandbLimits | None = None,
    ) -> None:
        # Its crash reports hold up the end of the process for 10 s where the server is slow; a set variable wins.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: ModuleType = wandb
        self._limits = limits or WandbLimits()
        self._warn = warn or log.warning
        self._init = {
            "project": project,
            "name": name,
            "id": _run_id(directory),
            "resume": "allow",
            "dir": str(directory),
            "config": dict(config),
        }
        self._box = _Mailbox()
        # A daemon: a library that never returns must not keep the process alive.
        threading.Thread(target=self._work, name="forge-wandb", daemon=True).start()
        self._box.ready.wait(self._limits.start_s)
        self._check()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the step to the thread; returns at once."""
        self._check()
        try:
            self._box.rows.put_nowait({**metrics, "step": float(step)})
        except queue.Full:
            raise TimeoutError("it has taken nothing for 10000 steps") from None

    def close(self) -> None:
        """Waits for the thread to hand everything over, at most `limits.close_s`."""
        deadline = time.monotonic() + self._limits.close_s
        try:
            self._box.rows.put(None, timeout=self._limits.close_s)
        except queue.Full:
            raise TimeoutError(f"it did not close within {self._limits.close_s:g} s") from None
        if not self._box.done.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"it did not close within {self._limits.close_s:g} s; `wandb sync` uploads the rest")
        self._check()

    def _check(self) -> None:
        if self._box.error is not None:
            raise self._box.error

    def _work(self) -> None:
        """Thread: sets the run up, then logs rows until None comes."""
        try:
            run = self._start()
            self._box.ready.set()
            while (row := self._box.rows.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:  # reported by the next call of `log` or `close`
            self._box.error = error
        finally:
            self._box.ready.set()
            self._box.done.set()

    def _start(self) -> Any:
        """The run: online where possible, offline otherwise, so that no point is lost."""
        if os.environ.get("WANDB_MODE") not in (None, "online"):
            return self._open(None)  # the user's own choice
        shared = self._wandb.setup(self._wandb.Settings(silent=True)).settings
        reason = self._why_offline(str(shared.base_url))
        if reason is None:
            try:
                run = self._open("online")
            except Exception as error:  # it answered, and then did not play along
                reason = _reason(error)
                self._wandb.teardown()  # lets go of the id
            else:
                self._warn(f"Weights & Biases: {run.url}")
                return run
        run = self._open("offline")
        self._warn(f"Weights & Biases is offline ({reason}); upload later with: wandb sync {Path(run.dir).parent}")
        return run

    def _open(self, mode: str | None) -> Any:
        known = self._wandb.Settings.model_fields
        wanted = {
            "silent": True,
            "console": "off",
            "init_timeout": self._limits.init_s,
            "finish_timeout": self._limits.close_s,
        }
        settings = self._wandb.Settings(**{key: value for key, value in wanted.items() if key in known})
        run = self._wandb.init(mode=mode, settings=settings, **self._init)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _why_offline(self, url: str) -> str | None:
        """None when the server answers and a key is known; never asks the user for one."""
        found: queue.Queue[str | None] = queue.Queue()
        # On a thread of its own, since looking a name up has no time limit.
        threading.Thread(target=lambda: found.put(_unreachable(url, self._limits.reach_s)), daemon=True).start()
        try:
            reason = found.get(timeout=self._limits.reach_s + 0.5)
        except queue.Empty:
            reason = f"{url} does not answer"
        if reason is None and not self._wandb.login(prompt=False, verify=False):
            reason = "no key; run `wandb login` or set WANDB_API_KEY"
        return reason


def _unreachable(url: str, timeout_s: float) -> str | None:
    """Why nothing answers at the address; any answer at all, also an error page, is one."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {getattr(error, 'reason', None) or _reason(error)}"


def _run_id(directory: Path) -> str:
    """The run's id, kept with the run so that a resume goes on with it."""
    path = directory / "wandb_run_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
