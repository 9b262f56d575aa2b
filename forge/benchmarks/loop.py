"""What running ahead gains: the real loop over parts that only take time, an engine as fast as the trainer."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from statistics import fmean

from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS
from forge.config import AsyncConfig, GrpoConfig
from forge.loop import GrpoLoop
from forge.testing import FakeLearner, FakePrompts, FakeRollouts, FakeScorer

SECONDS = 0.1
"""That a step's groups take to sample, and the trainer to train on them."""
STEPS = 50
MAX_AGES = (1, 2)


async def run(config: GrpoConfig) -> list[Claim]:
    """Steps a second with running ahead over those without, and over one step per max(generate, train)."""
    idle: dict[int, list[float]] = {}

    async def speed(max_age: int) -> float:
        own = replace(config, steps=STEPS, prompts_per_step=8, group_size=8, async_=AsyncConfig(max_age=max_age))
        loop = GrpoLoop(
            own,
            prompts=FakePrompts(),
            rollouts=FakeRollouts(seconds=lambda call: SECONDS, at_once=own.prompts_per_step),
            scorer=FakeScorer(),
            learner=FakeLearner(seconds=SECONDS),
        )
        start = time.perf_counter()
        rows = [step.metrics async for step in loop.train()]
        idle[max_age] = [fmean(r[f"idle/{part}_share"] for r in rows) for part in ("generator", "trainer")]
        return STEPS / (time.perf_counter() - start)

    async def ideal() -> float:
        return 1 / SECONDS

    claims = []
    text = f"loop: max_age {{}} over {{}}, generation = training = {SECONDS:g} s, {STEPS} steps"
    for max_age in MAX_AGES:
        sys.stderr.write(f"max_age {max_age} against max_age 0: {RUNS} runs of each, taking turns\n")
        ours, theirs = await alternate(partial(speed, max_age), partial(speed, 0), runs=RUNS)
        claims.append(claim(text.format(max_age, "max_age 0"), ours, theirs, "steps/s"))
        limit = [await ideal() for _ in ours]
        claims.append(claim(text.format(max_age, "the ideal max(generate, train)"), ours, limit, "steps/s"))
    for max_age, (generator, trainer) in sorted(idle.items()):
        sys.stderr.write(f"max_age {max_age}: generators idle {100 * generator:.0f} %, trainer {100 * trainer:.0f} %\n")
    return claims
