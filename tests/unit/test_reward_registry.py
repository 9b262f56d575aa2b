"""Rewards by name, and what a reward may return."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from forge.errors import ConfigError
from forge.reward import MathReward, build_reward
from forge.reward.base import read_result

if TYPE_CHECKING:
    from pathlib import Path


def test_short_names_build_their_reward() -> None:
    assert isinstance(build_reward("math"), MathReward)
    assert [build_reward(name).name for name in ("math", "exact", "format", "gym")] == [
        "math",
        "exact",
        "format",
        "gym",
    ]


def test_import_path_builds_a_users_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text(
        "from forge.reward import Reward\n"
        "class Short(Reward):\n    def __call__(self, episode): return 1.0\n"
        "class Abstract(Reward): pass\n"
        "class Needy(Short):\n    def __init__(self, limit): pass\n"
        "class Other: pass\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1/0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(build_reward("users_rewards:Short")).__name__ == "Short"
    for path, message in [
        ("users_rewards:Abstract", "users_rewards:Abstract.*__call__"),
        ("users_rewards:Needy", "users_rewards:Needy.*limit"),
        ("users_rewards:Other", "users_rewards:Other.*not a subclass"),
        ("users_rewards:Absent", "users_rewards.*no 'Absent'"),
        ("broken_rewards:Short", "broken_rewards:Short.*ZeroDivisionError"),
        ("no_such_module:Short", "no_such_module:Short.*No module named.*PYTHONPATH"),
        (":Short", ":Short"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_reward(path)


def test_unknown_name_names_the_legal_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'maths' is unknown.*'math', 'exact', 'format', 'gym'.*did you mean 'math'"):
        build_reward("maths")


def test_numbers_bools_and_components_are_rewards() -> None:
    assert read_result(1, "r") == (1.0, {"r": 1.0})
    assert read_result(True, "r") == (1.0, {"r": 1.0})
    assert read_result(Fraction(1, 4), "r") == (0.25, {"r": 0.25})
    assert read_result({"math": 1.0, "format": 0.5}, "r") == (1.5, {"math": 1.0, "format": 0.5})


def test_component_of_none_is_left_out() -> None:
    assert read_result({"math": 1.0, "tests": None}, "r") == (1.0, {"math": 1.0})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "None"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("1.0", "str"),
        (1j, "complex"),
        ([1.0], "list"),
        ({}, "no component"),
        ({"a": None}, "no component"),
        ({"a": "x"}, "component 'a'"),
        ({"a": 1e308, "b": 1e308}, "sum"),
        (10**400, "does not fit"),
    ],
)
def test_anything_else_is_refused_by_name(result: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_result(result, "r")
