"""Starts every process of a run, again when one dies, and ends them all. Knows every actor, and nothing of training."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from forge.actors.base import ForgeActor
from forge.actors.calibrator import Calibrator
from forge.actors.generator import Generator
from forge.actors.reference import Reference
from forge.actors.remote import Replica
from forge.actors.reward import RewardActor
from forge.actors.trainer import Trainer
from forge.config import Device, GrpoConfig
from forge.engine_vllm import prepare_environment
from forge.errors import PartFailed
from forge.mesh import Part, spawn
from forge.reward import Reward
from forge.service import Worker

CLOSE_TIMEOUT_S = 3.0
"""How long parts may take to close before their processes are stopped."""


class Cast:
    """The processes of one run.

    Args:
        model: folder that parts load; may be replaced before they start.
        reward: of the user's own, or None.
        store: name of the weight store.
        scratch: folder for files in which process groups meet.
        logs: folder for log files.
    """

    def __init__(
        self, config: GrpoConfig, model: Path, reward: Reward | None, *, store: str, scratch: Path, logs: Path
    ) -> None:
        self.config, self.model = config, model
        self.parts: list[Part] = []
        self.restarts: dict[str, int] = {}
        """How often each part was started anew."""
        self._own_reward, self._store, self._scratch, self._logs = reward, store, scratch, logs
        self._gpus = itertools.count()
        self._placed: dict[str, range | None] = {}
        self._meetings = itertools.count()

    async def weight_store(self) -> Part:
        """Processes that hold published versions."""
        return await self._start("weight store", ForgeActor)

    async def trainer(self) -> Part:
        """All ranks."""
        ranks = self.config.trainer.ranks
        where = self._meeting("trainer")
        return await self._start(
            "trainer", Trainer, self.config, self.model, self._store, where, count=ranks, num_gpus=ranks
        )

    async def generator(self, index: int) -> Part:
        """One replica, with the model folder's weights."""
        return await self._start(
            f"generator {index}", Generator, self.config, self.model, self._store, index,
            env=prepare_environment(self.config, self._scratch), num_gpus=self.config.generator.tensor_parallel,
        )  # fmt: skip

    async def reward(self) -> Part:
        """The reward actor."""
        return await self._start("reward", RewardActor, self.config.reward, self._own_reward)

    async def reference(self) -> Part:
        """The reference actor."""
        where = self._meeting("reference")
        return await self._start("reference", Reference, self.config, self.model, where, num_gpus=1)

    async def calibrator(self) -> Part:
        """The calibration actor."""
        where = self._meeting("calibrator")
        return await self._start("calibrator", Calibrator, self.config, self.model, self._store, where, num_gpus=1)

    async def respawn(self, index: int) -> Replica:
        """A generator in place of one that died, ready to pull."""
        part = await self.generator(index)
        await part.call("setup")
        return Replica(part)

    def worker(self, part: Part, again: Callable[[], Awaitable[Part]]) -> Worker:
        """A part that `again` starts anew whenever it dies."""

        async def ready() -> Part:
            fresh = await again()
            await fresh.call("setup")
            return fresh

        return Worker(part, start=ready, max_restarts=self.config.max_restarts)

    async def close(self) -> None:
        """Close every part, then end its processes; what does not answer in time is killed."""

        async def end(part: Part) -> None:
            with contextlib.suppress(PartFailed, asyncio.TimeoutError):
                await asyncio.wait_for(part.call("close"), CLOSE_TIMEOUT_S)
            await part.stop()

        try:
            await asyncio.shield(asyncio.gather(*map(end, self.parts)))
        finally:
            for part in self.parts:
                part.kill()

    def _meeting(self, name: str) -> str:
        """A file in which a process group meets; it serves one group only."""
        return str(self._scratch / f"{name}-{next(self._meetings)}")

    async def _start(
        self,
        name: str,
        actor: type[ForgeActor],
        *args: Any,
        count: int = 1,
        env: dict[str, str] | None = None,
        num_gpus: int = 0,
    ) -> Part:
        """Start a part on its own GPUs; what is left of an earlier one of that name is killed."""
        if name not in self._placed:
            mine: range | None = None
            if self.config.placement.device is Device.gpu:  # in order of starting: trainer, generators, reference
                taken = list(itertools.islice(self._gpus, num_gpus))
                mine = range(taken[0], taken[-1] + 1) if taken else range(0)
            self._placed[name] = mine
        for died in [p for p in self.parts if p.name == name]:
            self.parts.remove(died)
            died.kill()
            self.restarts[name] = self.restarts.get(name, 0) + 1
        part = await spawn(name, actor, *args, count=count, log_dir=self._logs, env=env, gpus=self._placed[name])
        self.parts.append(part)
        return part
