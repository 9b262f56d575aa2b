"""The group buffer: it paces generation, keeps order, and bounds age. Nothing is ever evicted from it.

There are (S + 1) * P slots for P groups a step and `async.max_age` S. A group takes a slot when it is admitted to
generation and gives it back only after the weights trained from it are live in the generators. In strict order, a
group admitted under S then trains at most S steps after the weights that sampled it:

    S = 1, P = 2     slots 4      groups 0 1 | 2 3 | 4 5 …
    0 1 2 3 admitted at version 0; 0 1 train (version 1, live, slots back) -> 4 5 admitted at version 1 while 2 3
    train at version 1: age 1; 4 5 train at version 2: age 1.

With a window of W groups (`async.window`), a finished group may pass up to W - 1 unfinished older ones; its age then
is at most S + ceil((W - 1) / P).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from forge.config import AsyncConfig
from forge.errors import StalenessExceeded
from forge.types import Group


@dataclass(slots=True)
class _Slot:
    bound: int
    """Age bound that held when the group was admitted."""
    group: Group | None = None
    """The finished group; None while it is being sampled and scored."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DataOrder:
    """Where admission goes on after a restart: what is pending first, then `next_group` and those after it."""

    next_group: int = 0
    """First group that was never admitted."""
    pending: list[int] = field(default_factory=list)
    """Groups admitted and not trained, in order: they were being sampled, or were finished and waited."""


class GroupBuffer:
    """Paces admission, holds finished groups, hands out batches in order.

    Args:
        asynchrony: `max_age` and `window`; `set_max_age` changes the former while running.
        prompts_per_step: groups P in a batch.
        order: where a resumed run goes on.
    """

    def __init__(self, asynchrony: AsyncConfig, *, prompts_per_step: int, order: DataOrder | None = None) -> None:
        order = order or DataOrder()
        self._async = asynchrony
        self._per_step = prompts_per_step
        self._next = order.next_group
        self._pending = deque(order.pending)
        self._slots: dict[int, _Slot] = {}
        self._taken: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self.produced = 0
        self.consumed = 0

    @property
    def capacity(self) -> int:
        """Number of slots: (max_age + 1) * prompts_per_step."""
        return (self._async.max_age + 1) * self._per_step

    @property
    def in_use(self) -> int:
        """Slots taken: groups being sampled, finished, or trained and not yet live."""
        return len(self._slots) + len(self._taken)

    def statistics(self) -> dict[str, float]:
        """Counts: produced = consumed + queued; sampling are admitted and unfinished."""
        finished = sum(s.group is not None for s in self._slots.values())
        return {
            "buffer/produced": float(self.produced),
            "buffer/consumed": float(self.consumed),
            "buffer/queued": float(finished),
            "buffer/sampling": float(len(self._slots) - finished),
        }

    def order(self, version: int) -> DataOrder:
        """What a checkpoint of weights `version` has to remember: every group is in it, trained before, or not
        admitted yet. A batch that was taken to train `version` counts as pending, since its step is not in there."""
        taken = (index for index, trains in self._taken.items() if trains >= version)
        return DataOrder(next_group=self._next, pending=sorted([*self._slots, *taken, *self._pending]))

    def waiting_for(self) -> str:
        """What stands in the way of the next batch, for a stall report."""
        ready = len(self._ready())
        head = min(self._slots, default=None)
        return (
            f"batch has {ready} of {self._per_step} groups ready; {self.in_use} of {self.capacity} slots in use; "
            f"oldest group {'none' if head is None else head}"
        )

    async def admit(self) -> int:
        """Wait for a free slot; returns the index of the group that takes it.

        Cancelling a waiting call takes no slot.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_use < self.capacity)
            if self._pending:
                index = self._pending.popleft()
            else:
                index = self._next
                self._next += 1
            self._slots[index] = _Slot(self._async.bound(self._per_step))
            return index

    async def put(self, group: Group) -> None:
        """Hand in a finished group."""
        async with self._changed:
            self._slots[group.index].group = group
            self.produced += 1
            self._changed.notify_all()

    async def take(self, version: int) -> list[Group]:
        """Wait for the next batch, to be trained on weights `version`.

        Raises:
            StalenessExceeded: a group of it is older than the bound that held when it was admitted.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready()) >= self._per_step)
            indices = self._ready()[: self._per_step]
            batch: list[Group] = []
            for index in indices:
                slot = self._slots.pop(index)
                assert slot.group is not None
                batch.append(slot.group)
                self._taken[index] = version
                age = version - slot.group.min_version
                if slot.group.episodes and age > slot.bound:
                    raise StalenessExceeded(
                        "buffer",
                        f"group {index} was sampled by version {slot.group.min_version} and would train version "
                        f"{version}: age {age} is above the bound {slot.bound} (async.max_age={self._async.max_age}, "
                        f"async.window={self._async.window}); this is a defect of Forge, please report it",
                    )
            self.consumed += len(batch)
            return batch

    def _ready(self) -> list[int]:
        """Finished groups that may go next, in order, as many as a batch takes."""
        window = self._async.window_groups(self._per_step)
        waiting = sorted(self._slots)
        ready: list[int] = []
        while len(ready) < self._per_step:
            index = next((i for i in waiting[:window] if self._slots[i].group is not None), None)
            if index is None:
                break
            waiting.remove(index)
            ready.append(index)
        return ready

    async def release(self, batch: list[Group]) -> None:
        """Give back the slots of a trained batch, once its weights are live."""
        async with self._changed:
            for group in batch:
                del self._taken[group.index]
            self._changed.notify_all()

    async def set_max_age(self, max_age: int) -> None:
        """Change S while running. Groups already admitted keep the bound they were admitted under."""
        async with self._changed:
            self._async.max_age = max_age
            self._changed.notify_all()
