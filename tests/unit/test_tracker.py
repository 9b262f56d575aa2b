import importlib.util
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge.tracker import TensorBoardTracker, Tracker, Trackers, WandbLimits, WandbTracker, open_trackers

needs_tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard not installed")
needs_wandb = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb not installed")

SHORT = WandbLimits(reach_s=0.5, start_s=0.3, init_s=1.0, close_s=0.5)


class Recorder:
    """A tracker that keeps what it gets and fails from a given step on."""

    name = "Recorder"

    def __init__(self, fails_at: float = math.inf, fails_closing: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at
        self.fails_closing = fails_closing
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self.fails_at:
            raise RuntimeError("socket went away\nwith details")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        if self.fails_closing:
            raise OSError("no space")


def test_a_tracker_that_fails_is_switched_off_once_and_the_others_go_on() -> None:
    warnings: list[str] = []
    good, bad = Recorder(), Recorder(fails_at=2)
    trackers = Trackers([bad, good], warn=warnings.append)
    for step in (1, 2, 3):
        trackers.log(step, {"loss/policy": step / 2})
    assert [step for step, _ in good.rows] == [1, 2, 3]
    assert [step for step, _ in bad.rows] == [1]
    assert warnings == ["Recorder is switched off (socket went away); the run goes on, metrics.jsonl has everything"]
    assert trackers.statistics() == {"trackers/failed": 1.0}


def test_closing_closes_every_tracker_even_when_one_fails() -> None:
    first, second = Recorder(fails_closing=True), Recorder(fails_closing=True)
    trackers = Trackers([first, second], warn=lambda _: None)
    trackers.close()
    trackers.close()
    assert (first.closed, second.closed, trackers.failures) == (1, 1, 2)


def test_trackers_get_finite_numbers_only() -> None:
    recorder = Recorder()
    Trackers([recorder]).log(3, {"a": 1, "b": math.nan, "c": None, "d": "text", "e": -math.inf, "f": True, "step": 3})
    assert recorder.rows == [(3, {"a": 1.0, "step": 3.0})]


def test_nothing_is_opened_unless_asked_for(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    warnings: list[str] = []
    trackers = open_trackers(
        tmp_path, tensorboard=module == "tensorboard", wandb=module == "wandb", warn=warnings.append
    )
    assert (trackers.active, trackers.failures) == ([], 1)
    assert "is switched off (" in warnings[0]
    assert module in warnings[0]


@needs_tensorboard
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": step / 4, "loss/policy": math.nan})
    # before closing: a run that is killed leaves its points
    assert scalars(tmp_path / "tensorboard", "reward/mean") == {1: 0.25, 2: 0.5, 3: 0.75}
    trackers.close()
    with pytest.raises(KeyError):
        scalars(tmp_path / "tensorboard", "loss/policy")


@needs_tensorboard
def test_steps_replayed_after_a_resume_replace_the_old_points_in_tensorboard(tmp_path: Path) -> None:
    for after, steps, value in ((0, range(1, 7), 0.25), (4, range(5, 8), 0.75)):
        tracker = TensorBoardTracker(tmp_path, after_step=after)
        for step in steps:
            tracker.log(step, {"reward/mean": value})
        tracker.close()
        for number, path in enumerate(sorted(tmp_path.glob("events*"))):  # one file a start, read in order of time
            path.rename(tmp_path / f"events.out.tfevents.{number}.host.1")
    assert scalars(tmp_path, "reward/mean") == {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25, 5: 0.75, 6: 0.75, 7: 0.75}


def scalars(directory: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    points = [(point.step, point.value) for point in accumulator.Scalars(tag)]
    assert len(points) == len(dict(points))
    return dict(points)


@needs_tensorboard
def test_an_unwritable_tensorboard_folder_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    trackers = open_trackers(tmp_path, tensorboard=True, warn=warnings.append)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert trackers.failures == 1
    assert "File exists" in warnings[0]


class FakeRun:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.rows: list[dict[str, float]] = []
        self.defined: list[tuple[str, str | None]] = []
        self.finish = finish
        self.dir = "/x/run/files"
        self.url = "https://wandb.test/run"

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the vendor's module whose parts the tests make fail or hang."""
    fake: Any = types.ModuleType("wandb")

    class Settings:
        model_fields: Mapping[str, None] = {}

        def __init__(self, **_: Any) -> None:
            self.base_url = "http://127.0.0.1:9"

    fake.Settings = Settings
    fake.setup = lambda settings: types.SimpleNamespace(settings=settings)
    fake.run = FakeRun(finish=lambda: None)
    fake.inits = []

    def init(**kwargs: Any) -> FakeRun:
        fake.inits.append(kwargs)
        run: FakeRun = fake.run
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return fake


def open_fake(directory: Path) -> WandbTracker:
    return WandbTracker(directory, project="p", name="n", config={"steps": 3}, limits=SHORT)


def test_wandb_draws_over_our_own_step_so_that_no_point_is_discarded(tmp_path: Path, fake_wandb: Any) -> None:
    tracker = open_fake(tmp_path)
    for step in (3, 2, 2):
        tracker.log(step, {"reward/mean": 0.5})
    tracker.close()
    assert fake_wandb.run.defined == [("step", None), ("*", "step")]
    assert [row["step"] for row in fake_wandb.run.rows] == [3.0, 2.0, 2.0]


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, fake_wandb: Any) -> None:
    for _ in range(2):
        open_fake(tmp_path).close()
    first, second = fake_wandb.inits
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert second["dir"] == str(tmp_path)


def test_the_run_never_waits_for_a_wandb_that_hangs(tmp_path: Path, fake_wandb: Any) -> None:
    forever = threading.Event()
    fake_wandb.init = lambda **_: forever.wait(30)
    warnings: list[str] = []
    start = time.monotonic()
    trackers = Trackers([open_fake(tmp_path)], warn=warnings.append)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert time.monotonic() - start < 2.0  # start_s 0.3 + close_s 0.5
    forever.set()
    assert trackers.failures == 1
    assert "did not close within 0.5 s" in warnings[0]


def test_a_wandb_that_fails_while_running_is_switched_off(tmp_path: Path, fake_wandb: Any) -> None:
    failed = threading.Event()

    def log(row: dict[str, float]) -> None:
        failed.set()
        raise RuntimeError("quota exceeded")

    fake_wandb.run.log = log
    warnings: list[str] = []
    trackers = Trackers([open_fake(tmp_path)], warn=warnings.append)
    trackers.log(1, {"a": 1.0})
    assert failed.wait(5)
    trackers.close()
    assert trackers.failures == 1
    assert "quota exceeded" in warnings[0]


def test_a_tracker_protocol_is_kept_by_both(tmp_path: Path, fake_wandb: Any) -> None:
    wandb: Tracker = open_fake(tmp_path)
    wandb.close()
    assert wandb.name == "Weights & Biases"


@needs_wandb
@pytest.mark.parametrize("server", ["closed", "silent"])
def test_an_unreachable_wandb_leaves_the_run_offline_within_seconds(tmp_path: Path, server: str) -> None:
    code = f"""
        import socket, sys, time
        from pathlib import Path
        import os
        listener = socket.create_server(("127.0.0.1", 0))
        os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{{listener.getsockname()[1]}}"
        if {server!r} == "closed":
            listener.close()
        from forge.tracker import WandbLimits, WandbTracker
        notes = []
        start = time.monotonic()
        tracker = WandbTracker(Path({str(tmp_path)!r}), project="p", name="n", config={{}}, warn=notes.append,
                               limits=WandbLimits(reach_s=0.5, start_s=20.0))
        opened = time.monotonic() - start
        tracker.log(1, {{"a": 0.5}})
        tracker.close()
        assert "does not answer" in notes[0] and "wandb sync" in notes[0], notes
        assert opened < 10, opened
        assert "torch" not in sys.modules
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=40
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@needs_tensorboard
def test_tensorboard_is_written_without_torch_or_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forge.tracker import open_trackers\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"t = open_trackers(Path({str(tmp_path)!r}), tensorboard=True); t.log(1, {{'a': 1.0}}); t.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
