"""Routing over replicas."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from forge.errors import CanaryFailed, PartDied, PartFailed
from forge.service import GeneratorPool, Worker
from forge.testing import FakeRollouts, fake_completion
from forge.types import Completion, Manifest, SamplingRequest


async def nobody(index: int) -> Any:
    raise AssertionError("nothing died")


def pool_of(*replicas: Any, respawn: Callable[[int], Awaitable[Any]] = nobody, max_restarts: int = 2) -> GeneratorPool:
    return GeneratorPool(replicas, respawn=respawn, max_restarts=max_restarts)


def manifest(version: int) -> Manifest:
    return Manifest(version=version, tensors={}, num_bytes=0, changed_share=0.0)


def request(n: int) -> SamplingRequest:
    return SamplingRequest(token_ids=(n,), temperature=1.0, max_new_tokens=1)


@dataclass
class Gated(FakeRollouts):
    """Completes when its gate opens; a completion says which replica and prompt it is."""

    number: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[int] = field(default_factory=list)

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        self.served += [r.token_ids[0] for r in requests]
        await self.gate.wait()
        return [fake_completion(r.token_ids[0], replica=self.number) for r in requests]


async def test_a_group_goes_whole_to_the_replica_with_the_least_work() -> None:
    replicas = [Gated(number=0), Gated(number=1)]
    pool = pool_of(*replicas)
    calls = [asyncio.ensure_future(pool.generate([request(i)] * n)) for i, n in ((1, 4), (2, 2), (3, 2), (4, 1))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert replicas[0].served == [1] * 4 + [4]
    assert replicas[1].served == [2, 2, 3, 3]
    for r in replicas:
        r.gate.set()
    results = await asyncio.gather(*calls)
    assert [{c.replica for c in group} for group in results] == [{0}, {1}, {1}, {0}]


async def test_the_choice_of_a_replica_is_that_of_a_plain_search() -> None:
    replicas = [Gated(number=i) for i in range(7)]
    pool = pool_of(*replicas)
    draw, load, open_calls = Random(0), [0] * 7, []
    for _ in range(300):
        if open_calls and draw.random() < 0.5:
            call, chosen, size = open_calls.pop(draw.randrange(len(open_calls)))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            load[chosen] -= size
            continue
        size = draw.randint(1, 5)
        before = [len(r.served) for r in replicas]
        call = asyncio.ensure_future(pool.generate([request(0)] * size))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (chosen,) = [i for i, r in enumerate(replicas) if len(r.served) > before[i]]
        assert load[chosen] == min(load)
        load[chosen] += size
        open_calls.append((call, chosen, size))
    for call, _, _ in open_calls:
        call.cancel()


async def test_a_failed_call_gives_its_share_back() -> None:
    class Broken(FakeRollouts):
        async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
            raise RuntimeError("no engine")

    broken, working = Broken(), Gated(number=1)
    pool = pool_of(broken, working)
    for _ in range(2):  # a share that was kept would send the second call to the other replica
        with pytest.raises(RuntimeError):
            await pool.generate([request(0)] * 8)


async def test_spreading_keeps_the_order_of_requests() -> None:
    replicas = [Gated(number=i) for i in range(3)]
    call = asyncio.ensure_future(pool_of(*replicas).spread([request(i) for i in range(7)]))
    await turns()
    for r in replicas:
        r.gate.set()
    completions = await call
    assert [c.versions[0] for c in completions] == list(range(7))
    assert {c.replica for c in completions} == {0, 1, 2}


async def test_weights_go_to_every_replica() -> None:
    replicas = [FakeRollouts(), FakeRollouts()]
    await pool_of(*replicas).pull(manifest(3))
    assert [r.pulled for r in replicas] == [[3], [3]]


@dataclass
class Mortal(Gated):
    """Dies when told: its calls in flight and all later ones fail, as those of a process that is gone do."""

    name: str = "generator 0"
    dies: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False
    stuck: float = 0.0

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        return await self._alive(super().generate(requests))

    async def pull(self, manifest: Manifest) -> dict[str, float]:
        return await self._alive(super().pull(manifest))

    async def statistics(self) -> dict[str, float]:
        if self.silent:
            await self._alive(asyncio.sleep(3600))
        return {"tokens": 2.0 * len(self.served), "busy_seconds": 1.0, "stuck_seconds": self.stuck}

    def kill(self) -> None:
        self.dies.set()

    async def _alive(self, work: Any) -> Any:
        death, task = asyncio.ensure_future(self.dies.wait()), asyncio.ensure_future(work)
        await asyncio.wait({death, task}, return_when=asyncio.FIRST_COMPLETED)
        if self.dies.is_set():
            task.cancel()
            raise PartDied(self.name, "its process died")
        death.cancel()
        return await task


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_of_a_dead_replica_are_made_again_once_and_it_comes_back_with_the_newest_weights() -> None:
    first, other, fresh = Mortal(number=0), Mortal(number=1, name="generator 1"), Mortal(number=2)
    started = asyncio.Event()

    async def respawn(index: int) -> Mortal:
        assert index == 0
        await started.wait()
        return fresh

    pool = pool_of(first, other, respawn=respawn)
    await pool.pull(manifest(1))
    call = asyncio.ensure_future(pool.generate([request(7), request(8)]))
    await turns()
    assert first.served == [7, 8]
    first.kill()
    await turns()
    assert other.served == [7, 8]
    await pool.pull(manifest(2))  # a version that goes live while the other is being started
    other.gate.set()
    assert [c.replica for c in await call] == [1, 1]
    assert fresh.pulled == []
    started.set()
    await turns()
    assert fresh.pulled == [2]
    fresh.gate.set()
    assert {c.replica for c in await pool.spread([request(i) for i in range(4)])} == {1, 2}
    found = await pool.statistics()
    assert (found["restarts"], found["reissued"], found["replicas"]) == (1, 2, 2)


async def test_calls_wait_while_the_only_replica_is_started_anew() -> None:
    first, fresh = Mortal(), Mortal(number=2)
    fresh.gate.set()
    started = asyncio.Event()

    async def respawn(index: int) -> Mortal:
        await started.wait()
        return fresh

    pool = pool_of(first, respawn=respawn)
    before = await pool.statistics()
    first.kill()
    pull = asyncio.ensure_future(pool.pull(manifest(1)))
    call = asyncio.ensure_future(pool.generate([request(1)]))
    await turns()
    assert not call.done()
    assert not pull.done()
    started.set()
    assert (await call)[0].replica == 2
    assert await pull == {}
    assert fresh.pulled == [1]
    after = await pool.statistics()
    assert after["busy_seconds"] > before["busy_seconds"]  # what the dead one counted stays counted


async def test_a_place_whose_restarts_are_used_up_stays_empty_and_without_any_the_run_is_told() -> None:
    first, other = Mortal(), Mortal(number=1, name="generator 1")
    other.gate.set()

    async def respawn(index: int) -> Mortal:
        raise PartFailed(f"generator {index}", "cannot start")

    pool = pool_of(first, other, respawn=respawn, max_restarts=2)
    first.kill()
    assert [c.replica for c in await pool.generate([request(1)] * 2)] == [1, 1]
    await turns()
    found = await pool.statistics()
    assert (found["restarts"], found["replicas"]) == (2, 1)
    other.kill()
    with pytest.raises(PartFailed, match="generator 0: cannot start"):
        await pool.generate([request(1)])


@pytest.mark.parametrize(("silent", "stuck"), [(True, 0.0), (False, 9.0)])
async def test_a_replica_that_does_not_move_is_killed_and_started_anew(silent: bool, stuck: float) -> None:
    first, fresh = Mortal(silent=silent, stuck=stuck), Mortal(number=2)
    fresh.gate.set()

    async def respawn(index: int) -> Mortal:
        return fresh

    pool = pool_of(first, respawn=respawn)
    call = asyncio.ensure_future(pool.generate([request(1)]))
    watch = asyncio.ensure_future(pool.watch(hang_timeout_s=0.05))
    assert (await asyncio.wait_for(call, 5))[0].replica == 2
    assert first.dies.is_set()
    watch.cancel()


async def test_a_replica_that_fails_its_canary_is_started_anew_and_its_requests_are_made_again() -> None:
    class Stale(Mortal):
        async def pull(self, manifest: Manifest) -> dict[str, float]:
            self.kill()  # its running calls are told as well
            raise CanaryFailed(self.name, "2.000 nats a token off the trainer")

    fresh = Mortal(number=7)
    fresh.gate.set()

    async def respawn(index: int) -> Mortal:
        return fresh

    pool = pool_of(Stale(number=0), respawn=respawn)
    running = asyncio.ensure_future(pool.generate([request(1)]))
    await turns()
    await pool.pull(manifest(3))
    assert [c.replica for c in await running] == [7]
    assert fresh.pulled == [3]


async def test_the_death_of_another_part_is_not_taken_for_the_replicas() -> None:
    class ReadsDeadStore(Mortal):
        async def pull(self, manifest: Manifest) -> dict[str, float]:
            raise PartDied("weight store", "its process died")

    pool = pool_of(ReadsDeadStore())
    with pytest.raises(PartDied, match="weight store"):
        await pool.pull(manifest(1))
    assert (await pool.statistics())["restarts"] == 0


async def test_a_worker_repeats_a_call_for_each_death_within_its_budget() -> None:
    calls: list[str] = []

    class Part:
        name = "reward"

        def __init__(self, dies: bool) -> None:
            self.dies = dies

        async def call_one(self, endpoint: str, *args: Any) -> Any:
            calls.append(endpoint)
            await asyncio.sleep(0)
            if self.dies:
                raise PartDied("reward", "its process died")
            return args

    starts = [Part(dies=True), Part(dies=False)]

    async def start() -> Part:
        return starts.pop(0)

    worker = Worker(Part(dies=True), start=start, max_restarts=2)
    assert await asyncio.gather(worker.call_one("score", 1), worker.call_one("score", 2)) == [(1,), (2,)]
    assert worker.restarts == 2
    assert len(calls) == 6
    worker.part = Part(dies=True)
    with pytest.raises(PartDied, match="reward"):
        await worker.call_one("score", 3)
