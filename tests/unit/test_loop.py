"""Coordination of the loop, with parts that do no work."""

import asyncio

import pytest

from forge.buffer import DataOrder
from forge.config import AlgoConfig, AsyncConfig, DataConfig, GrpoConfig, RewardConfig
from forge.errors import Stalled, TooManyFailures
from forge.loop import GrpoLoop, request_seed
from forge.testing import FakeLearner, FakePrompts, FakeRollouts, FakeScorer
from forge.types import Episode, SamplingRequest


def config(**kw: object) -> GrpoConfig:
    settings: dict[str, object] = {"steps": 4, "prompts_per_step": 2, "group_size": 2, "data": DataConfig(task="x")}
    return GrpoConfig(**(settings | kw))  # type: ignore[arg-type]


def loop(c: GrpoConfig, **parts: object) -> GrpoLoop:
    defaults: dict[str, object] = {
        "prompts": FakePrompts(),
        "rollouts": FakeRollouts(),
        "scorer": FakeScorer(),
        "learner": FakeLearner(),
    }
    return GrpoLoop(c, **(defaults | parts))  # type: ignore[arg-type]


async def run(g: GrpoLoop) -> list[dict[str, float]]:
    return [dict(step.metrics) async for step in g.train()]


@pytest.mark.parametrize("max_age", [0, 1, 2])
async def test_age_reaches_and_never_passes_the_setting_when_training_is_slow(max_age: int) -> None:
    learner = FakeLearner(seconds=0.01)
    rows = await run(loop(config(steps=8, async_=AsyncConfig(max_age=max_age)), learner=learner))
    ages = [row["age/max"] for row in rows]
    assert max(ages) == max_age
    assert len(rows) == 8


async def test_groups_train_in_the_order_of_the_data_each_once() -> None:
    learner = FakeLearner()
    rollouts = FakeRollouts(seconds=lambda call: 0.01 if call % 3 == 0 else 0.0)
    await run(loop(config(async_=AsyncConfig(max_age=2)), learner=learner, rollouts=rollouts))
    assert [[g.index for g in batch] for batch in learner.batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [g.episodes[0].question for batch in learner.batches for g in batch] == [f"q{i}" for i in range(8)]


async def test_every_version_goes_live_in_order_and_older_ones_are_freed() -> None:
    rollouts, learner = FakeRollouts(), FakeLearner()
    await run(loop(config(async_=AsyncConfig(max_age=1)), rollouts=rollouts, learner=learner))
    assert rollouts.pulled == [1, 2, 3, 4]
    assert learner.published == [4]


async def test_nothing_is_sampled_beyond_the_last_step() -> None:
    rollouts = FakeRollouts()
    await run(loop(config(async_=AsyncConfig(max_age=3)), rollouts=rollouts))
    assert rollouts.calls == 8  # 4 steps of 2 groups


async def test_synchronous_training_samples_every_batch_on_the_newest_version() -> None:
    learner = FakeLearner()
    await run(loop(config(), learner=learner))
    assert [[g.min_version for g in batch] for batch in learner.batches] == [[0, 0], [1, 1], [2, 2], [3, 3]]


async def test_a_resumed_loop_goes_on_in_the_data_order() -> None:
    learner = FakeLearner(version=2)
    order = DataOrder(next_group=6, pending=[4, 5])
    g = loop(config(), learner=learner, rollouts=FakeRollouts(version=2), first_step=2, order=order)
    assert len(await run(g)) == 2
    assert [[b.index for b in batch] for batch in learner.batches] == [[4, 5], [6, 7]]


async def test_changing_the_age_while_running_lets_generation_run_ahead() -> None:
    g = loop(config(steps=8), learner=FakeLearner(seconds=0.005))
    ages = []
    async for step in g.train():
        ages.append(step.metrics["age/max"])
        if step.step == 2:
            await g.set_max_age(2)
    assert max(ages[:2]) == 0
    assert max(ages[2:]) == 2


async def test_a_failing_part_ends_the_run_with_its_error() -> None:
    with pytest.raises(RuntimeError, match="learner fails here"):
        await run(loop(config(), learner=FakeLearner(fail_at=1)))


async def test_a_failing_rollout_ends_the_run_with_its_error() -> None:
    class Broken(FakeRollouts):
        async def generate(self, requests: object) -> list[object]:  # type: ignore[override]
            raise RuntimeError("engine fails here")

    with pytest.raises(RuntimeError, match="engine fails here"):
        await run(loop(config(), rollouts=Broken()))


async def test_closing_the_generator_early_leaves_no_task_behind() -> None:
    g = loop(config(steps=100, async_=AsyncConfig(max_age=1)))
    steps = g.train()
    await anext(steps)
    await steps.aclose()
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


async def test_failed_rewards_are_counted_and_capped() -> None:
    def reward(episode: Episode) -> float:
        if episode.member == 0:
            raise ValueError("no number found")
        return 1.0

    rows = await run(loop(config(group_size=4, reward=RewardConfig(max_failed_share=0.25)), scorer=FakeScorer(reward)))
    assert rows[-1]["failures/total"] == 4 * 2
    with pytest.raises(TooManyFailures, match=r"2 of 8 episodes.*max_failed_share=0.2.*no number found"):
        await run(loop(config(group_size=4, reward=RewardConfig(max_failed_share=0.2)), scorer=FakeScorer(reward)))


async def test_a_stall_names_what_each_part_waits_for() -> None:
    rollouts = FakeRollouts(seconds=lambda call: 60.0)
    with pytest.raises(Stalled, match="training: waiting for a batch.*2 groups are being sampled"):
        await run(loop(config(stall_timeout_s=0.2), rollouts=rollouts))


async def test_equal_rewards_are_kept_for_the_kl_term_only() -> None:
    async def dropped(kl: float) -> set[str | None]:
        learner = FakeLearner()
        c = config(steps=1, algo=AlgoConfig(kl=kl))
        await run(loop(c, learner=learner, scorer=FakeScorer(lambda e: 1.0)))
        return {g.dropped for g in learner.batches[0]}

    assert await dropped(0.0) == {"equal_rewards"}
    assert await dropped(0.1) == {None}


def test_members_of_a_group_have_different_seeds_and_runs_agree() -> None:
    seeds = {request_seed(0, g, m) for g in range(50) for m in range(8)}
    assert len(seeds) == 400
    assert request_seed(0, 3, 1) == request_seed(0, 3, 1)
    assert request_seed(0, 3, 1) != request_seed(1, 3, 1)
    assert all(0 <= s < 2**63 for s in seeds)


async def test_requests_of_a_group_carry_the_prompts_ids_unchanged() -> None:
    seen: list[SamplingRequest] = []

    class Recording(FakeRollouts):
        async def generate(self, requests):  # type: ignore[no-untyped-def]
            seen.extend(requests)
            return await super().generate(requests)

    await run(loop(config(steps=1), rollouts=Recording()))
    assert {r.token_ids for r in seen} == {(0, 1, 2)}
    assert {r.temperature for r in seen} == {1.0}
