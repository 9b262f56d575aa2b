"""The reward actor: scores episodes in worker processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forge.actors.base import ForgeActor
from forge.config import RewardConfig
from forge.mesh import concurrent_endpoint
from forge.reward import Reward, build_reward
from forge.reward.pool import RewardPool
from forge.types import Episode


class RewardActor(ForgeActor):
    """Scores episodes.

    Args:
        config: workers and limits.
        reward: a reward of the user's own; None builds `config.name`.
    """

    def __init__(self, config: RewardConfig, reward: Reward | None) -> None:
        self.config, self.reward = config, reward

    @concurrent_endpoint
    async def setup(self) -> None:
        self.pool = RewardPool(
            self.reward if self.reward is not None else build_reward(self.config.name),
            workers=self.config.workers,
            timeout_s=self.config.timeout_s,
            memory_mb=self.config.memory_mb,
        )

    @concurrent_endpoint
    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Score each episode; a fault of the reward comes back in `Episode.failure`."""
        return list(await asyncio.gather(*map(self.pool.score, episodes)))

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self.pool.close)
