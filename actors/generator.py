"""A rollout generator: one vLLM engine in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge import weights
from forge.actors.base import ForgeActor
from forge.config import GrpoConfig
from forge.engine_vllm import EngineThread, VllmEngine
from forge.mesh import concurrent_endpoint
from forge.types import Completion, Manifest, SamplingRequest


class Generator(ForgeActor):
    """Samples completions and takes new weights while it does.

    Args:
        config: the run's configuration.
        folder: model folder; its weights are version 0.
        store: name of the weight store.
        replica: number of this generator.
    """

    def __init__(self, config: GrpoConfig, folder: Path, store: str, replica: int) -> None:
        self.config, self.folder, self.store, self.replica = config, folder, store, replica
        self.thread = EngineThread(lambda: VllmEngine(config, folder, replica), swap=config.async_.swap)
        self.engine: VllmEngine | None = None

    @concurrent_endpoint
    async def setup(self) -> None:
        self.engine = await self.thread.start()

    @concurrent_endpoint
    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample one completion for each request."""
        return await self.thread.generate(requests)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> dict[str, float]:
        """Fetch a version and swap it in; the old one stays live if anything does not fit.

        Returns:
            seconds spent: "fetch", and what `EngineThread.load` returns.
        """
        assert self.engine is not None
        self.engine.check(manifest)
        start = time.perf_counter()
        async with weights.reading(self.store, manifest) as tensors:
            fetched = time.perf_counter()
            return {"fetch": fetched - start} | await self.thread.load(manifest, tensors)

    @concurrent_endpoint
    async def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> float:
        """Swap in weights that come with the call, for measurements; returns the seconds the engine stood still."""
        return (await self.thread.load(manifest, tensors))["swap"]

    @concurrent_endpoint
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token of each sequence but the first, by the live weights."""
        return await self.thread.score(sequences)

    @concurrent_endpoint
    async def statistics(self) -> dict[str, float]:
        """Counts since start: sampled tokens, seconds the engine was stepping; live version; seconds it stood still."""
        assert self.engine is not None
        return {
            "tokens": float(self.engine.sampled_tokens),
            "busy_seconds": self.thread.busy_seconds,
            "version": float(self.engine.version),
            "stuck_seconds": self.thread.stuck_seconds(),
        }

    @concurrent_endpoint
    async def close(self) -> None:
        self.thread.close()
