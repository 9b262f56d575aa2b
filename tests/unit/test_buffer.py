"""The buffer's promises: pace, order, age."""

import asyncio
from random import Random

import pytest

from forge.buffer import DataOrder, GroupBuffer
from forge.config import AsyncConfig
from forge.errors import StalenessExceeded
from forge.testing import fake_group


def buffer(max_age: int, *, window: float = 0.0, per_step: int = 2) -> GroupBuffer:
    return GroupBuffer(AsyncConfig(max_age=max_age, window=window), prompts_per_step=per_step)


async def ready(waiter: asyncio.Future[object]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return waiter.done()


@pytest.mark.parametrize(("max_age", "slots"), [(0, 2), (1, 4), (3, 8)])
async def test_admission_stops_at_s_plus_one_batches(max_age: int, slots: int) -> None:
    b = buffer(max_age)
    assert [await b.admit() for _ in range(slots)] == list(range(slots))
    blocked = asyncio.ensure_future(b.admit())
    assert not await ready(blocked)
    blocked.cancel()


async def test_a_slot_frees_only_when_released_not_when_taken() -> None:
    b = buffer(0)
    for i in (await b.admit(), await b.admit()):
        await b.put(fake_group(i, [1, 0]))
    batch = await b.take(0)
    blocked = asyncio.ensure_future(b.admit())
    assert not await ready(blocked)
    await b.release(batch)
    assert await blocked == 2


async def test_strict_order_waits_for_an_unfinished_head() -> None:
    b = buffer(1)
    for _ in range(4):
        await b.admit()
    for i in (1, 2, 3):
        await b.put(fake_group(i, [1, 0]))
    waiting = asyncio.ensure_future(b.take(0))
    assert not await ready(waiting)
    await b.put(fake_group(0, [1, 0]))
    assert [g.index for g in await waiting] == [0, 1]


async def test_a_window_lets_finished_groups_pass_the_head() -> None:
    b = buffer(1, window=0.5)  # 4 slots, W = 2
    for _ in range(4):
        await b.admit()
    await b.put(fake_group(1, [1, 0]))
    await b.put(fake_group(3, [1, 0]))
    waiting = asyncio.ensure_future(b.take(0))
    assert not await ready(waiting)  # 1 may pass 0, then 2 and not 3 is next in the window
    await b.put(fake_group(2, [1, 0]))
    assert [g.index for g in await waiting] == [1, 2]


@pytest.mark.parametrize(
    ("max_age", "window", "per_step", "bound"),
    # P=8, S=3, f=0.3: 32 slots, W = floor(9.6) = 9, S + ceil(8 / 8) = 4
    [(3, 0.3, 8, 4), (0, 0.0, 8, 0), (2, 0.0, 8, 2), (0, 0.3, 8, 1)],
)
def test_the_bound_is_s_plus_the_windows_steps(max_age: int, window: float, per_step: int, bound: int) -> None:
    assert AsyncConfig(max_age=max_age, window=window).bound(per_step) == bound


async def test_a_group_older_than_its_bound_is_an_error() -> None:
    b = buffer(0)
    for i in (await b.admit(), await b.admit()):
        await b.put(fake_group(i, [1, 0], version=3))
    with pytest.raises(StalenessExceeded, match="age 1 is above the bound 0"):
        await b.take(4)


async def test_nothing_is_lost_produced_is_consumed_plus_queued() -> None:
    b = buffer(1)
    for i in [await b.admit() for _ in range(4)][:3]:
        await b.put(fake_group(i, [1, 0]))
    await b.take(0)
    assert b.statistics() == {
        "buffer/produced": 3.0,
        "buffer/consumed": 2.0,
        "buffer/queued": 1.0,
        "buffer/sampling": 1.0,
    }


async def test_raising_the_age_admits_more_at_once() -> None:
    b = buffer(0)
    for _ in range(2):
        await b.admit()
    blocked = asyncio.ensure_future(b.admit())
    assert not await ready(blocked)
    await b.set_max_age(1)
    assert await blocked == 2


@pytest.mark.parametrize("seed", range(8))
async def test_after_a_restart_at_any_moment_every_group_trains_exactly_once(seed: int) -> None:
    """Groups finish in random order under a window; the run dies at random moments and goes on from `order`."""
    random = Random(seed)
    trained: list[int] = []
    version, order = 0, DataOrder()
    for _ in range(4):
        b = GroupBuffer(AsyncConfig(max_age=2, window=0.7), prompts_per_step=2, order=order)
        sampling: set[int] = set()
        for _ in range(random.randrange(1, 30)):
            admitting = asyncio.ensure_future(b.admit())
            if await ready(admitting):
                sampling.add(admitting.result())
            else:
                admitting.cancel()
            if sampling and random.random() < 0.6:
                done = random.choice(sorted(sampling))
                sampling.remove(done)
                await b.put(fake_group(done, [1, 0], version=version))
            taking = asyncio.ensure_future(b.take(version))
            if not await ready(taking):
                taking.cancel()
                continue
            order = b.order(version)  # a checkpoint while this batch trains does not have it
            assert {g.index for g in taking.result()} <= set(order.pending)
            trained += [g.index for g in taking.result()]
            version += 1
            order = b.order(version)
            await b.release(taking.result())
        order = b.order(version)
    assert len(trained) == len(set(trained))
    assert sorted([*trained, *order.pending]) == list(range(order.next_group))
