"""Several generator replicas as one: routing of requests, and weights to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from forge.types import Completion, Manifest, SamplingRequest


class Replica(Protocol):
    """What the pool asks of one generator."""

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...
    async def pull(self, manifest: Manifest) -> dict[str, float]: ...
    async def statistics(self) -> dict[str, float]: ...


class GeneratorPool:
    """Routes each call to the replica with the least work; cost per call does not grow with tokens or weights."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        self._outstanding = [0] * len(replicas)

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample one completion for each request, all on one replica, so that a group shares its prompt's cache."""
        replica = min(range(len(self._replicas)), key=self._outstanding.__getitem__)
        self._outstanding[replica] += len(requests)
        try:
            return await self._replicas[replica].generate(requests)
        finally:
            self._outstanding[replica] -= len(requests)

    async def spread(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample many unrelated requests over all replicas, in order."""
        n = len(self._replicas)
        parts = await asyncio.gather(*(self._replicas[i].generate(requests[i::n]) for i in range(n) if requests[i::n]))
        results: list[Completion | None] = [None] * len(requests)
        for i, part in enumerate(parts):
            results[i::n] = part
        return [r for r in results if r is not None]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens by the live weights, from one replica."""
        return await self._replicas[0].score(sequences)

    async def pull(self, manifest: Manifest) -> dict[str, float]:
        """Bring every replica to a version; returns the slowest replica's seconds."""
        all_seconds = await asyncio.gather(*(r.pull(manifest) for r in self._replicas))
        return {key: max(s[key] for s in all_seconds) for key in all_seconds[0]}

    async def statistics(self) -> dict[str, float]:
        """Sums over replicas; "replicas" is their number."""
        rows = await asyncio.gather(*(r.statistics() for r in self._replicas))
        sums = {key: sum(row[key] for row in rows) for key in ("tokens", "busy_seconds")}
        return {**sums, "replicas": float(len(rows))}
