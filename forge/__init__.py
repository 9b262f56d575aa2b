"""Forge: RL post-training of language models, from rollout to a deployable model.

Importing this package loads no torch, vLLM or Monarch; each name is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.actors.launch import Run, launch
    from forge.config import GrpoConfig, load_config
    from forge.errors import ForgeError
    from forge.reward import Reward
    from forge.types import Completion, Episode, Group, Prompt, StepResult

__version__ = "0.1.0"

_HOME = {
    "load_config": "forge.config",
    "GrpoConfig": "forge.config",
    "launch": "forge.actors.launch",
    "Run": "forge.actors.launch",
    "Reward": "forge.reward",
    "ForgeError": "forge.errors",
    "Prompt": "forge.types",
    "Completion": "forge.types",
    "Episode": "forge.types",
    "Group": "forge.types",
    "StepResult": "forge.types",
}
__all__ = [
    "Completion",
    "Episode",
    "ForgeError",
    "GrpoConfig",
    "Group",
    "Prompt",
    "Reward",
    "Run",
    "StepResult",
    "launch",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
