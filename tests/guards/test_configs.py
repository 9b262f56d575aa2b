"""Every YAML file under configs/ composes into a configuration that passes its checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
CHOICES = sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.glob("*/*.yaml"))
NEEDS = {"model/local": "model.path=.", "data/local": "data.path=.", "data/task": "data.task=chain_sum"}
"""Choices that are nothing without a folder, file or task of the user's."""


@pytest.mark.parametrize("app", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_an_app_has_a_valid_default(app: str) -> None:
    load_config(app)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_composes_into_the_grpo_app(choice: str) -> None:
    group, name = choice.split("/")
    load_config("grpo", [f"{group}={name}", *([NEEDS[choice]] if choice in NEEDS else [])])
