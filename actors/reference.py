"""The reference actor: the initial policy, for the KL term. Spawned only when `algo.kl` is above 0."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forge.actors.trainer import Trainer
from forge.config import GrpoConfig, QuantConfig
from forge.mesh import concurrent_endpoint
from forge.types import Episode


class Reference(Trainer):
    """A trainer of one rank that never trains.

    Args:
        config: the run's configuration.
        folder: model folder of the initial policy.
        rendezvous: file for its process group of one.
    """

    def __init__(self, config: GrpoConfig, folder: Path, rendezvous: str) -> None:
        alone = replace(
            config,
            trainer=replace(config.trainer, ranks=1, threads=config.trainer.threads or os.cpu_count() or 1),
            quant=QuantConfig(),  # the initial policy is never quantized
        )
        super().__init__(alone, folder, "", rendezvous)

    @concurrent_endpoint
    async def annotate(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes with `reference_logprobs` of every sampled token."""
        logprobs = await self._run(self.trainer.logprobs, episodes)
        return [replace(e, reference_logprobs=logprobs.get((e.group, e.member), ())) for e in episodes]
