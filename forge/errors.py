"""The errors Forge raises on purpose.

ForgeError
├── RefusedInput            the user can fix it; nothing was loaded; exit 2
│   ├── ConfigError         a config key, type, value or combination
│   ├── DataError           a dataset or a row of it
│   └── ModelFolderError    a model folder that is missing, incomplete or of a family Forge cannot train
└── PartFailed              a part of a running job failed; exit 1, the part is named
    ├── PartDied            its process is gone; some parts are started anew
    │   └── CanaryFailed    a generator computes otherwise than the trainer: it is started anew as well
    ├── WeightsMismatch     a published version and a reader do not agree on names, shapes or dtypes
    ├── StalenessExceeded   a group older than the promised bound reached the trainer
    ├── TooManyFailures     a tolerated failure happened more often than its cap allows
    └── Stalled             nothing moved for `stall_timeout_s`
"""

from __future__ import annotations

from collections.abc import Sequence


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose."""

    exit_code = 1


class RefusedInput(ForgeError, ValueError):
    """Input that cannot work, refused before anything is loaded.

    Args:
        problems: one readable line each: the rule, the value found, what to do.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[RefusedInput], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class ConfigError(RefusedInput):
    """A config key, type, value or combination that cannot work."""


class DataError(RefusedInput):
    """A dataset that is missing, empty or holds rows that cannot be used."""


class ModelFolderError(RefusedInput):
    """A model folder that is missing, incomplete or of an unsupported family."""


class PartFailed(ForgeError):
    """A part of a running job failed.

    Args:
        part: "generator 0", "trainer rank 1", "reward", "weight store" …
        reason: what happened and what to do.
    """

    def __init__(self, part: str, reason: str) -> None:
        self.part = part
        self.reason = reason
        super().__init__(f"{part}: {reason}")

    def __reduce__(self) -> tuple[type[PartFailed], tuple[str, str]]:
        return type(self), (self.part, self.reason)


class PartDied(PartFailed):
    """A process of the part is gone, or was killed because it did not move."""


class CanaryFailed(PartDied):
    """A generator computes otherwise than the trainer on the weights it took; it serves nothing any more."""


class WeightsMismatch(PartFailed):
    """Published weights and their reader differ in names, shapes or dtypes; the reader keeps its old version."""


class StalenessExceeded(PartFailed):
    """A group older than the promised bound reached the trainer."""


class TooManyFailures(PartFailed):
    """A tolerated failure happened more often than its cap allows."""


class Stalled(PartFailed):
    """Nothing moved for `stall_timeout_s`; the message holds what each part waits for."""
