"""Parts that are started anew when their process dies: generator replicas behind one pool, and single workers.

    seat 0   replica ── dies ── respawn ── pull the newest version ── serves again
    seat 1   replica ── dies ── respawn … dies again, `max_restarts` used up ── empty; the others go on

A call that was in flight is made again, once for each death, and its result is returned once: nothing is lost and
nothing comes twice. A replica that answers nothing, or whose engine stands still with work to do, is killed first.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forge.errors import PartDied, PartFailed
from forge.types import Completion, Manifest, SamplingRequest

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""How often replicas are asked whether they move."""
COUNTED = ("tokens", "busy_seconds")
"""Statistics of a replica that add up over the run."""


class Replica(Protocol):
    """What the pool asks of one generator."""

    @property
    def name(self) -> str: ...

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...
    async def pull(self, manifest: Manifest) -> dict[str, float]: ...
    async def statistics(self) -> dict[str, float]: ...
    def kill(self) -> None: ...


@dataclass(slots=True)
class _Seat:
    """One place in the pool; who serves there may change."""

    index: int
    replica: Replica
    outstanding: int = 0
    restarts: int = 0
    recovery: asyncio.Task[None] | None = None
    lost: PartFailed | None = None
    """Why it stays empty, once its restarts are used up."""
    last: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    earlier: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    """Counts of replicas that served here before."""

    @property
    def serves(self) -> bool:
        return self.recovery is None and self.lost is None


class GeneratorPool:
    """Routes each call to the replica with the least work; cost per call does not grow with tokens or weights.

    Args:
        respawn: starts the replica of a seat anew, with the weights of the model folder.
        max_restarts: of one seat.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, respawn: Callable[[int], Awaitable[Replica]], max_restarts: int
    ) -> None:
        self._seats = [_Seat(i, r) for i, r in enumerate(replicas)]
        self._respawn, self._max_restarts = respawn, max_restarts
        self._ranking = [(0, s.index) for s in self._seats]
        """Heap of (outstanding, seat); entries that no longer hold stay in it until they come up."""
        self._newest: Manifest | None = None
        self._changed = asyncio.Condition()
        self.reissued = 0
        """Requests that were made again."""

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample one completion for each request, all on one replica, so that a group shares its prompt's cache.

        Raises:
            PartFailed: no replica is left.
        """
        while True:
            seat = await self._free_seat()
            replica = seat.replica
            self._add_work(seat, len(requests))
            try:
                return await replica.generate(requests)
            except PartDied as error:
                self._fell(seat, replica, error)
                self.reissued += len(requests)
            finally:
                self._add_work(seat, -len(requests))

    async def spread(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample many unrelated requests over all replicas, in order."""
        n = max(1, sum(s.serves for s in self._seats))
        parts = await asyncio.gather(*(self.generate(requests[i::n]) for i in range(n) if requests[i::n]))
        results: list[Completion | None] = [None] * len(requests)
        for i, part in enumerate(parts):
            results[i::n] = part
        return [r for r in results if r is not None]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens by the live weights, from one replica."""
        while True:
            seat = await self._free_seat()
            replica = seat.replica
            try:
                return await replica.score(sequences)
            except PartDied as error:
                self._fell(seat, replica, error)

    async def pull(self, manifest: Manifest) -> dict[str, float]:
        """Bring every replica to a version; returns the slowest replica's seconds.

        A replica that is being started anew is not waited for: it serves only once it has the newest version.
        """
        self._newest = manifest

        async def one(seat: _Seat) -> dict[str, float] | None:
            replica = seat.replica
            try:
                return await replica.pull(manifest)
            except PartDied as error:
                self._fell(seat, replica, error)
                return None

        answers = await asyncio.gather(*(one(s) for s in self._seats if s.serves))
        pulled = [a for a in answers if a is not None]
        if not pulled:
            await self._free_seat()
        return {key: max(s[key] for s in pulled) for key in pulled[0]} if pulled else {}

    async def statistics(self) -> dict[str, float]:
        """Sums over replicas, those that died included; "replicas" is how many serve."""

        async def ask(seat: _Seat) -> None:
            replica = seat.replica
            try:
                seat.last = await replica.statistics()
            except PartDied as error:
                self._fell(seat, replica, error)

        await asyncio.gather(*(ask(s) for s in self._seats if s.serves))
        sums = {key: sum(s.last[key] + s.earlier[key] for s in self._seats) for key in COUNTED}
        return {
            **sums,
            "replicas": float(max(1, sum(s.serves for s in self._seats))),
            "restarts": float(sum(s.restarts for s in self._seats)),
            "reissued": float(self.reissued),
        }

    async def watch(self, *, hang_timeout_s: float) -> None:
        """Kill replicas that do not move, for ever; run it as a task.

        Args:
            hang_timeout_s: longest time without an answer, or without an engine step while there is work.
        """
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, hang_timeout_s / 4))
            await asyncio.gather(*(self._check(s, hang_timeout_s) for s in self._seats if s.serves))

    async def _check(self, seat: _Seat, limit: float) -> None:
        replica = seat.replica
        try:
            stuck = (await asyncio.wait_for(replica.statistics(), limit)).get("stuck_seconds", 0.0)
            if stuck <= limit:
                return
            error = PartDied(replica.name, f"its engine made no step for {stuck:.0f} s with work to do; killed")
        except TimeoutError:
            error = PartDied(replica.name, f"it answered nothing for hang_timeout_s={limit} s; killed")
        except PartDied as died:
            self._fell(seat, replica, died)
            return
        replica.kill()
        self._fell(seat, replica, error)

    async def close(self) -> None:
        """Cancel recoveries that are under way."""
        tasks = [s.recovery for s in self._seats if s.recovery is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _free_seat(self) -> _Seat:
        """The serving seat with the least work; waits while all are being started anew."""
        async with self._changed:
            while True:
                if (seat := self._least_loaded()) is not None:
                    return seat
                lost = [s.lost for s in self._seats if s.lost is not None]
                if len(lost) == len(self._seats):
                    raise lost[0]
                await self._changed.wait()

    def _least_loaded(self) -> _Seat | None:
        """In time that grows with the logarithm of the replicas: a thousand of them are chosen from per group."""
        while self._ranking:
            outstanding, index = self._ranking[0]
            seat = self._seats[index]
            if seat.serves and seat.outstanding == outstanding:
                return seat
            heapq.heappop(self._ranking)
        return None

    def _add_work(self, seat: _Seat, requests: int) -> None:
        seat.outstanding += requests
        heapq.heappush(self._ranking, (seat.outstanding, seat.index))
        if len(self._ranking) > 4 * len(self._seats):
            self._ranking = [(s.outstanding, s.index) for s in self._seats if s.serves]
            heapq.heapify(self._ranking)

    def _fell(self, seat: _Seat, replica: Replica, error: PartFailed) -> None:
        """Start the seat's replica anew, unless another caller noticed first.

        Raises:
            PartDied: it is another part that died, such as the store a replica reads from.
        """
        if error.part != replica.name:
            raise error
        if seat.replica is not replica or not seat.serves:
            return
        for key in COUNTED:
            seat.earlier[key] += seat.last[key]
            seat.last[key] = 0.0
        seat.recovery = asyncio.create_task(self._recover(seat, error))

    async def _recover(self, seat: _Seat, error: PartFailed) -> None:
        while seat.restarts < self._max_restarts:
            seat.restarts += 1
            log.warning("%s; starting it anew (%d of max_restarts=%d)", error, seat.restarts, self._max_restarts)
            fresh: Replica | None = None
            try:
                fresh = await self._respawn(seat.index)
                await self._bring_up_to_date(fresh)
            except PartFailed as again:
                error = again
                if fresh is not None:
                    fresh.kill()
                continue
            seat.replica, seat.recovery = fresh, None  # before anything is awaited: no version may come in between
            self._add_work(seat, 0)
            break
        else:
            seat.lost, seat.recovery = error, None
            log.error("%s; max_restarts=%d are used up, its place stays empty", error, self._max_restarts)
        async with self._changed:
            self._changed.notify_all()

    async def _bring_up_to_date(self, replica: Replica) -> None:
        held: Manifest | None = None
        while self._newest is not None and self._newest is not held:
            held = self._newest
            try:
                await replica.pull(held)
            except PartFailed:
                if self._newest is held:  # otherwise it was freed meanwhile, and a newer one is there
                    raise


class OnePart(Protocol):
    """A part of one process."""

    @property
    def name(self) -> str: ...
    async def call_one(self, endpoint: str, *args: Any) -> Any: ...


class Worker:
    """A part whose calls can simply be made again: it is started anew when its process dies.

    Args:
        start: starts it anew, set up and ready.
        max_restarts: how often.
    """

    def __init__(self, part: OnePart, *, start: Callable[[], Awaitable[OnePart]], max_restarts: int) -> None:
        self.part = part
        self._start, self._max_restarts = start, max_restarts
        self._starting = asyncio.Lock()
        self.restarts = 0

    async def call_one(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint, again for each time the process dies meanwhile.

        Raises:
            PartFailed: the call failed, or `max_restarts` are used up.
        """
        while True:
            part = self.part
            try:
                return await part.call_one(endpoint, *args)
            except PartDied as error:
                if error.part != part.name:
                    raise
                await self.replace(part, error)

    async def replace(self, died: OnePart, error: PartFailed) -> None:
        """Start the part anew, unless that was done since `died` was seen alive."""
        async with self._starting:
            while self.part is died:
                if self.restarts >= self._max_restarts:
                    raise error
                self.restarts += 1
                log.warning("%s; starting it anew (%d of max_restarts=%d)", error, self.restarts, self._max_restarts)
                try:
                    self.part = await self._start()
                except PartFailed as again:
                    error = again
