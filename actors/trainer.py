"""One rank of the trainer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge import weights
from forge.actors.base import ForgeActor
from forge.config import Device, GrpoConfig
from forge.mesh import concurrent_endpoint, current_rank
from forge.types import Episode, Group, StepStats, TensorSpec


class Trainer(ForgeActor):
    """Trains on groups and publishes versions.

    Args:
        config: the run's configuration.
        folder: model folder to start from.
        store: name of the weight store.
        rendezvous: file in which the ranks find each other.
    """

    def __init__(self, config: GrpoConfig, folder: Path, store: str, rendezvous: str) -> None:
        self.config, self.folder, self.store, self.rendezvous = config, folder, store, rendezvous
        self.rank = current_rank().rank
        # One thread for all work on the model: collectives of the ranks stay in the order of the calls.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="titan")
        self.staged: dict[str, object] = {}

    @concurrent_endpoint
    async def setup(self) -> dict[str, TensorSpec]:
        """Build and load the model; returns what a published version holds."""
        return await self._run(self._setup)

    def _setup(self) -> dict[str, TensorSpec]:
        from forge.engine_titan import TitanTrainer, init_process

        on_cpu = self.config.placement.device is Device.cpu
        threads = self.config.trainer.threads or max(1, (os.cpu_count() or 1) // self.config.trainer.ranks)
        init_process(self.rank, self.config.trainer.ranks, self.rendezvous, on_cpu=on_cpu, threads=threads)
        self.trainer = TitanTrainer(self.config, self.folder)
        return self.trainer.specs()

    @concurrent_endpoint
    async def step(self, groups: Sequence[Group]) -> StepStats:
        """One optimizer step on the whole batch; this rank computes its share."""
        return await self._run(self.trainer.step, groups)

    @concurrent_endpoint
    async def logprobs(self, episodes: Sequence[Episode]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Log-probs of this rank's share of the episodes, by (group, member)."""
        return await self._run(self.trainer.logprobs, episodes)

    @concurrent_endpoint
    async def stage(self) -> tuple[int, int]:
        """Freeze the current weights for publishing; returns changed and all elements of this rank."""
        published = await self._run(self.trainer.stage)
        self.staged = dict(published.shards)
        return published.changed, published.total

    @concurrent_endpoint
    async def publish(self, version: int) -> None:
        """Put the staged shards into the store; may run beside the next step."""
        await weights.put(self.store, version, self.staged)

    @concurrent_endpoint
    async def save_hf(self, target: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        await self._run(self.trainer.save_hf, target)

    @concurrent_endpoint
    async def save_state(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        await self._run(self.trainer.save_state, folder)

    @concurrent_endpoint
    async def load_state(self, folder: Path) -> int:
        """Restore a checkpoint; returns its version."""
        await self._run(self.trainer.load_state, folder)
        return self.trainer.version

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.worker, function, *args)
