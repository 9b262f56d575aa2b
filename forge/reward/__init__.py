"""Rewards: scoring one completion, and running that safely for many.

    Episode ── extract ── clean ── compare (math, exact, format, gym, or yours) ── RewardPool ── Episode with reward

Importing this package loads no torch, math-verify or reasoning-gym; a reward loads them in its worker's `setup`.
"""

from __future__ import annotations

from forge.reward.base import Reward
from forge.reward.code import CodeReward, code_problem
from forge.reward.exact import ExactMatch, FormatReward
from forge.reward.gym import GymReward, gym_problem
from forge.reward.math import MathReward, gold_problem
from forge.reward.pool import RewardPool
from forge.reward.registry import REWARDS, build_reward

__all__ = [
    "REWARDS",
    "CodeReward",
    "ExactMatch",
    "FormatReward",
    "GymReward",
    "MathReward",
    "Reward",
    "RewardPool",
    "build_reward",
    "code_problem",
    "gold_problem",
    "gym_problem",
]
