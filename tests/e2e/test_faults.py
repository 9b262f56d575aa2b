"""Processes of a real run are killed while it trains: it goes on, loses no group and trains none twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from forge.apps.chaos import trial
from forge.chaos import CONTROLLER, Strike, processes, violations

pytestmark = pytest.mark.filterwarnings("default")

SMALL = (
    "model=tiny",
    "prompts_per_step=2",
    "group_size=4",
    "trainer.micro_batch=4",
    "trainer.ranks=1",
    "trainer.lr=1e-4",
    "sampling.max_new_tokens=16",
    "data.heldout=0",
    "data.rows=40",
    "reward.name=fault_rewards:Even",
    "tracker.tensorboard=false",
    "checkpoint.export=false",
    "out=runs",
    "name=f",
)

STEP = {"prompts_per_step": 2, "group_size": 4}

REWARDS = """
from forge import Episode, Reward


class Even(Reward):
    def __call__(self, episode: Episode) -> float:
        ids = episode.completion.token_ids
        return sum(t % 2 == 0 for t in ids) / max(1, len(ids))
"""

KILLS = """
import asyncio
import os
import signal

from forge import launch, load_config

VICTIMS = {{2: "generator 0", 4: "reward", 6: "reference", 8: "calibrator", 9: "generator 0"}}


async def main() -> None:
    async with launch(load_config("grpo", {overrides!r})) as run:
        async for step in run.train():
            if (victim := VICTIMS.get(step.step)) is not None:
                (pid,) = run.pids()[victim]
                os.kill(pid, signal.SIGKILL)
                print("KILLED", victim, pid, flush=True)


asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fault_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generator_reward_reference_and_calibrator_are_started_anew(tmp_path: Path) -> None:
    overrides = [
        *SMALL, "steps=12", "async.max_age=1", "generator.replicas=2", "algo.kl=0.05", "quant.scheme=int8_static",
        "calibration.every=3", "calibration.prompts=8", "calibration.samples=16",
    ]  # fmt: skip
    (tmp_path / "kills.py").write_text(KILLS.format(overrides=overrides))
    before = set(Path("/dev/shm").iterdir())
    done = subprocess.run(
        [sys.executable, "kills.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("KILLED") == 5
    run = tmp_path / "runs/grpo/f"
    assert violations(run, steps=12, age_bound=1, checkpoints=False, **STEP) == []
    metrics = lines(run / "metrics.jsonl")
    assert 1 <= metrics[-1]["failures/generator_restarts"] <= 2  # the last kill may not have been noticed by then
    for part in ("generator 0", "reward", "reference", "calibrator"):
        assert f"{part}: its process died" in done.stderr, done.stderr
    assert {c["step"] for c in lines(run / "calibration.jsonl")} >= {3, 6, 9}
    assert set(Path("/dev/shm").iterdir()) - before == set()


def test_parts_that_hold_weights_bring_the_run_back_to_its_last_checkpoint(tmp_path: Path) -> None:
    victims = {"step 3/": "trainer", "step 6/": "weight-store"}
    out: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "forge.apps", "grpo", *SMALL, "steps=8", "checkpoint.every=2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        timer = threading.Timer(400, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            out.append(line)
            if (due := next((v for v in victims if v in line), None)) is not None:
                os.kill(processes(process.pid)[victims.pop(due)][0], signal.SIGKILL)
        timer.cancel()
    text = "".join(out)
    assert not victims, text
    assert process.returncode == 0, text
    for part, count in (("trainer", 1), ("weight store", 2)):
        assert f"{part}: its process died" in text
        assert f"going back to the last checkpoint ({count} of max_restarts=3)" in text
    assert violations(tmp_path / "runs/grpo/f", steps=8, age_bound=0, **STEP) == []


@pytest.mark.parametrize(
    ("strike", "outcome"),
    [
        (Strike(victim=CONTROLLER, step=3, delay_s=0.2, number=signal.SIGKILL), "resumed"),
        (Strike(victim="generator-0", step=2, delay_s=0.1, number=signal.SIGSTOP), "recovered"),
    ],
    ids=["controller killed", "generator hangs"],
)
def test_a_strike_of_the_chaos_harness_leaves_every_invariant(strike: Strike, outcome: str, tmp_path: Path) -> None:
    assert trial(tmp_path, "ahead", strike, {}) == ([], outcome)
