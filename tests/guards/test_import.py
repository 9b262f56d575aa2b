"""Importing Forge costs nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAVY = [
    "torch",
    "vllm",
    "monarch",
    "torchtitan",
    "torchstore",
    "torchao",
    "transformers",
    "datasets",
    "hydra",
    "numpy",
]


@pytest.mark.parametrize("module", ["forge", "forge.types", "forge.errors", "forge.config", "forge.apps.__main__"])
def test_import_loads_no_vendor_and_sets_no_variable(module: str, python: Callable[..., str]) -> None:
    code = f"""
import logging, os, sys
before = dict(os.environ)
import {module}
print([name for name in {HEAVY} if name in sys.modules], dict(os.environ) == before, logging.getLogger().handlers)
"""
    assert python(code) == "[] True []"
