"""Shared by the end-to-end tests: model folders, ranks in processes of their own, the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.fetch import fetch

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The 3 M parameter model."""
    return fetch("tiny")


@pytest.fixture(scope="session")
def train_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Run tests/e2e/rank.py on several ranks; returns what rank 0 found, one entry an action."""

    def run(model: Path, actions: list[dict[str, Any]], *, ranks: int = 1, overrides: tuple[str, ...] = ()) -> Any:
        folder = tmp_path_factory.mktemp("ranks")
        job = {
            "model": str(model),
            "rendezvous": str(folder / "rendezvous"),
            "ranks": ranks,
            "overrides": list(overrides),
            "actions": actions,
            "result": str(folder / "result.json"),
        }
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), str(r), json.dumps(job)], env=env, stderr=subprocess.PIPE
            )
            for r in range(ranks)
        ]
        errors = [p.communicate()[1].decode() for p in processes]
        assert all(p.returncode == 0 for p in processes), "\n".join(errors)
        return json.loads(Path(job["result"]).read_text())

    return run


@dataclass
class Command:
    """A finished `forge` command."""

    status: int
    out: str
    seconds: float


@pytest.fixture
def forge(tmp_path: Path) -> Callable[..., Command]:
    """Run `forge …` in an empty folder; fails when a process of it is left."""

    def run(*args: str, signal_at: str | None = None, send: int = signal.SIGINT) -> Command:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "forge.apps", *args],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: list[str] = []
        family: list[psutil.Process] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "step 1/" in line or (signal_at and signal_at in line):
                family = psutil.Process(process.pid).children(recursive=True)
            if signal_at and signal_at in line:
                start = time.monotonic()
                process.send_signal(send)
                signal_at = None
        process.stdout.close()
        status = process.wait()
        seconds = time.monotonic() - start
        left = psutil.wait_procs(family, timeout=3)[1]
        assert left == [], f"processes left behind: {left}"
        return Command(status, "".join(lines), seconds)

    return run
