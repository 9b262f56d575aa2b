"""One rank of the trainer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge import weights
from forge.actors.base import ForgeActor
from forge.config import Device, GrpoConfig
from forge.mesh import concurrent_endpoint, current_rank
from forge.quant import Format
from forge.segments import Segment
from forge.types import ActivationScale, Episode, Group, Manifest, Staged, StepStats, TensorSpec

if TYPE_CHECKING:
    from forge.engine_titan import TitanTrainer
    from forge.engine_titan_files import Snapshot


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
        self.staged: dict[str, dict[str, Any]] = {}
        self.taken: Snapshot | None = None

    @concurrent_endpoint
    async def setup(self) -> dict[str, TensorSpec]:
        """Build and load the model; returns what a published unquantized version holds."""
        return await self._run(self._setup)

    def _setup(self) -> dict[str, TensorSpec]:
        from forge.engine_titan import init_process

        on_cpu = self.config.placement.device is Device.cpu
        threads = self.config.trainer.threads or max(1, (os.cpu_count() or 1) // self.config.trainer.ranks)
        init_process(self.rank, self.config.trainer.ranks, self.rendezvous, on_cpu=on_cpu, threads=threads)
        self.trainer = self._build(self.config, self.folder)
        self.plain = self.trainer.specs()
        return self.plain

    def _build(self, config: GrpoConfig, folder: Path) -> TitanTrainer:
        from forge.engine_titan import TitanTrainer

        return TitanTrainer(config, folder)

    @concurrent_endpoint
    async def step(self, groups: Sequence[Group]) -> StepStats:
        """One optimizer step on the whole batch; this rank computes its share."""
        return await self._run(self.trainer.step, groups)

    @concurrent_endpoint
    async def logprobs(self, episodes: Sequence[Episode]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Log-probs of this rank's share of the episodes, by (group, member)."""
        return await self._run(self.trainer.logprobs, episodes)

    @concurrent_endpoint
    async def stage(self, unquantized: bool, pinned: Sequence[Sequence[int]]) -> Staged:
        """Freeze the current weights for publishing, with quantized ones unquantized as well if asked for.

        Args:
            pinned: token ids that the policy is scored on, for generators to compare; none: it is not.
        """
        return await self._run(self._stage, unquantized, pinned)

    def _stage(self, unquantized: bool, pinned: Sequence[Sequence[int]]) -> Staged:
        published = self.trainer.stage(unquantized=unquantized)
        label = "" if self.trainer.quantization is None else self.trainer.quantization.label
        self.staged = {label: published.shards}
        if unquantized:
            both = {**published.shards, **published.unquantized}  # an int8 weight has the name of the plain one
            self.staged[""] = {n: t for n, t in both.items() if n in self.plain}
        return Staged(
            changed=published.changed,
            total=published.total,
            changed_codes=published.changed_codes,
            total_codes=published.total_codes,
            digests={scheme: weights.digests(shards) for scheme, shards in self.staged.items()},
            canary=tuple(map(tuple, self.trainer.canary(pinned))) if pinned else (),
        )

    @concurrent_endpoint
    async def publish(self, manifest: Manifest, segment: Segment | None) -> None:
        """Write staged shards where readers will find them; may run beside the next step."""
        await weights.put(self.store, manifest, self.staged[manifest.scheme], segment)

    @concurrent_endpoint
    async def set_scales(self, scales: Mapping[str, ActivationScale]) -> None:
        """Activation scales for fake-quant, by module name."""
        await self._run(self.trainer.set_scales, scales)

    @concurrent_endpoint
    async def switch_to_qat(self, steps: int, lr_scale: float) -> None:
        """Train the next steps with fake-quant."""
        await self._run(partial(self.trainer.switch_to_qat, steps=steps, lr_scale=lr_scale))

    @concurrent_endpoint
    async def save_hf(self, target: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        from forge.engine_titan_files import save_hf

        await self._run(save_hf, self.trainer, target)

    @concurrent_endpoint
    async def save_quantized(
        self, target: Path, format: Format, scales: Mapping[str, ActivationScale]
    ) -> list[dict[str, Any]]:
        """Write the quantized weights as a Hugging Face folder; rank 0 returns what it cost each layer."""
        from forge.engine_titan_files import save_quantized

        return await self._run(save_quantized, self.trainer, target, format, scales)

    @concurrent_endpoint
    async def snapshot(self) -> int:
        """Copy this rank's part of a checkpoint; returns its version."""
        return await self._run(self._snapshot)

    def _snapshot(self) -> int:
        from forge.engine_titan_files import snapshot

        self.taken = snapshot(self.trainer)
        return self.trainer.version

    @concurrent_endpoint
    async def write_snapshot(self, folder: Path) -> None:
        """Write the copy and let go of it; may run beside the next steps."""
        from forge.engine_titan_files import write_snapshot

        taken, self.taken = self.taken, None
        assert taken is not None
        await asyncio.to_thread(write_snapshot, taken, folder)

    @concurrent_endpoint
    async def load_state(self, folder: Path) -> int:
        """Restore a checkpoint; returns its version."""
        from forge.engine_titan_files import load_state

        await self._run(load_state, self.trainer, folder)
        return self.trainer.version

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.worker, function, *args)
