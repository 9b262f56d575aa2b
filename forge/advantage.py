"""Group-relative advantages: what GRPO uses in place of a value function.

For a group with rewards R of its valid episodes: A_i = (R_i - mean(R)) / (std(R) + 1e-6) with the sample standard
deviation (divisor n - 1), as in the DeepSeekMath paper's reference implementations; with `scale_by_std=False`
A_i = R_i - mean(R) (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all exactly equal says nothing about
which completion was better: its advantages are exactly 0, never a division of rounding noise by rounding noise.
"""

from __future__ import annotations

import math
from dataclasses import replace

from forge.types import Group

STD_EPS = 1e-6
"""Added to the standard deviation; keeps A finite for nearly equal rewards, below 1e-5 relative otherwise."""

EQUAL_REWARDS = "equal_rewards"
"""`Group.dropped` of a group whose valid rewards are all equal."""
NO_VALID_EPISODES = "too_few_valid_episodes"
"""`Group.dropped` of a group with fewer than two scored, non-empty episodes."""


def group_advantages(rewards: list[float], *, scale_by_std: bool) -> list[float]:
    """Advantages of one group's rewards.

    Example: group_advantages([1, 0, 0, 0], scale_by_std=True) is [1.5, -0.5, -0.5, -0.5] (mean 0.25, std 0.5).
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not scale_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPS) for c in centred]


def with_advantages(group: Group, *, scale_by_std: bool, keep_equal: bool) -> Group:
    """The group with `advantage` set on each episode and `dropped` set when it carries no gradient.

    An episode that failed scoring, or sampled no token, is left out of mean and deviation and keeps advantage 0.

    Args:
        keep_equal: train groups of equal rewards too; their KL term still has a gradient.
    """
    valid = [e.reward is not None and e.failure is None and e.num_response_tokens > 0 for e in group.episodes]
    rewards = [e.reward for e, ok in zip(group.episodes, valid, strict=True) if ok and e.reward is not None]
    if len(rewards) < 2:
        return replace(group, dropped=NO_VALID_EPISODES)
    advantages = iter(group_advantages(rewards, scale_by_std=scale_by_std))
    episodes = tuple(
        replace(e, advantage=next(advantages)) if ok else e for e, ok in zip(group.episodes, valid, strict=True)
    )
    equal = len(set(rewards)) < 2
    return replace(group, episodes=episodes, dropped=EQUAL_REWARDS if equal and not keep_equal else None)
