"""What a reward is, and how the value it returns becomes a number.

A reward is a picklable, pure function of one episode:

    class Short(Reward):
        def __call__(self, episode: Episode) -> float:
            return 1.0 if episode.num_response_tokens < 64 else 0.0
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.types import Episode


class Reward(ABC):
    """Base class of every reward. Subclass it and define `__call__`.

    The object is copied to worker processes (by value when its class lives in a notebook or in `__main__`), so it
    may hold settings but no open files, locks or connections; open those in `setup`.
    """

    @property
    def name(self) -> str:
        """The component under which a plain number is recorded; the class name unless overridden."""
        return type(self).__name__

    def setup(self) -> None:
        """Called once in every worker process before its first episode, outside the time limit.

        Slow imports and files to read belong here. An exception ends the run before the first episode is scored.
        """
        return None

    @abstractmethod
    def __call__(self, episode: Episode) -> float | Mapping[str, float | None]:
        """Score one episode.

        Returns:
            A number or a bool; or a mapping of named components whose sum is the reward, in which None marks a
            component that does not apply to this episode (it is left out of the sum and of the record).
            None itself, NaN, an infinity, an empty mapping and anything else mark the episode as failed, as does
            any exception.
        """


def read_result(result: object, name: str) -> tuple[float, dict[str, float]]:
    """Turn what a reward returned into the scalar reward and its components.

    Args:
        result: the value returned by a reward's `__call__`.
        name: the component name for a plain number.

    Raises:
        ValueError: the value is not a finite number, a bool or a mapping of such.
    """
    if isinstance(result, Mapping):
        parts = {str(key): _number(value, f"component {key!r}") for key, value in result.items() if value is not None}
        if not parts:
            raise ValueError("the reward returned no component; return a number, or a mapping with at least one")
        return _number(sum(parts.values()), "the sum of the components"), parts
    value = _number(result, "the reward")
    return value, {name: value}


def _number(value: object, what: str) -> float:
    """`value` as a finite float; `what` names it in the error."""
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {_shown(value)}, not a number; return a float, a bool or a mapping of floats")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} does not fit a float") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; return a finite number")
    return number


def _shown(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
