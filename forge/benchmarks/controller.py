"""What the controller costs: loop, pool, advantages and records of a run whose replicas and trainer do nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS
from forge.config import AsyncConfig, GrpoConfig
from forge.files import scratch_folder
from forge.loop import GrpoLoop
from forge.runfolder import RunFolder
from forge.service import GeneratorPool
from forge.testing import FakeLearner, FakePrompts, FakeRollouts, FakeScorer

STEPS = 10
PROMPTS = 512
GROUP_SIZE = 8
REPLICAS = (10, 100, 1000)
WANTED = 2000.0
"""Episodes a second."""


async def run(config: GrpoConfig) -> list[Claim]:
    """Episodes a second over the wanted ones, and seconds an episode with many replicas over those with ten."""
    own = replace(config, steps=STEPS, prompts_per_step=PROMPTS, group_size=GROUP_SIZE, async_=AsyncConfig(max_age=1))

    async def cost(replicas: int) -> float:
        """Seconds an episode."""
        pool = GeneratorPool([FakeRollouts() for _ in range(replicas)], respawn=_nobody_dies, max_restarts=0)
        with scratch_folder() as scratch:
            folder = RunFolder.create(scratch, "bench", "controller")
            loop = GrpoLoop(
                own,
                prompts=FakePrompts(),
                rollouts=pool,
                scorer=FakeScorer(),
                learner=FakeLearner(),
                on_batch=lambda batch, version: folder.append_rollouts(batch, version=version),
            )
            start = time.perf_counter()
            async for step in loop.train():
                folder.append_metrics({"step": step.step, **step.metrics})
            seconds = time.perf_counter() - start
            folder.close()
        return seconds / (STEPS * own.episodes_per_step)

    claims = []
    for replicas in REPLICAS[1:]:
        sys.stderr.write(f"{replicas} replicas against {REPLICAS[0]}: {RUNS} runs of each, taking turns\n")
        ours, few = await alternate(partial(cost, replicas), partial(cost, REPLICAS[0]), runs=RUNS)
        text = f"controller: seconds an episode at {replicas} replicas over cost at {REPLICAS[0]} replicas"
        claims.append(claim(text, ours, few, "s"))
        speed = [1 / seconds for seconds in ours]
        text = f"controller: episodes/s with {replicas} replicas that do nothing over {WANTED:.0f}"
        claims.append(claim(text, speed, [WANTED] * len(speed), "episodes/s"))
    return claims


async def _nobody_dies(seat: int) -> Any:
    raise AssertionError(f"replica {seat} is a fake and does not die")
