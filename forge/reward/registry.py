"""Rewards by name."""

from __future__ import annotations

import difflib
import importlib

from forge.errors import ConfigError
from forge.reward.base import Reward
from forge.reward.code import CodeReward
from forge.reward.exact import ExactMatch, FormatReward
from forge.reward.gym import GymReward
from forge.reward.math import MathReward

REWARDS: dict[str, type[Reward]] = {
    "math": MathReward,
    "exact": ExactMatch,
    "format": FormatReward,
    "gym": GymReward,
    "code": CodeReward,
}
"""The rewards that have a short name."""


def build_reward(name: str) -> Reward:
    """Make the reward that a config names.

    Args:
        name: a key of `REWARDS`, or the import path of a subclass of `Reward` as "package.module:Class". The class is
            called without arguments.

    Raises:
        ConfigError: the name is unknown, the path cannot be imported, or what it leads to is no usable reward.
    """
    found: object = REWARDS.get(name)
    if found is None:
        found = _import(name) if ":" in name else None
    if found is None:
        near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward {name!r} is unknown: use one of {_legal()}{hint}")
    if not (isinstance(found, type) and issubclass(found, Reward)):
        raise ConfigError(f"reward {name!r} is not a subclass of forge.reward.Reward: it is {found!r}")
    try:
        return found()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"reward {name!r} cannot be made without arguments ({type(error).__name__}: {reason}); "
            "give its settings defaults and define __call__"
        ) from error


def _import(path: str) -> object:
    """The object at "package.module:Name"."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward {path!r} cannot be imported ({error}): run from the folder that holds the module, put that folder "
            f"on PYTHONPATH, or use one of {_legal()}"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"reward {path!r} cannot be imported ({type(error).__name__}: {reason}); use one of {_legal()}"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"reward {path!r}: module {module_name!r} has no {attribute!r}")
    found: object = getattr(module, attribute)
    return found


def _legal() -> str:
    return ", ".join(repr(name) for name in REWARDS) + ' or "package.module:Class"'
