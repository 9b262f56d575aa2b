import json
import math
from pathlib import Path

import pytest

import forge.report_data as report_data
from forge.report_data import is_finite, read_run


def lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_are_in_order_of_steps_and_the_newest_of_a_step_counts(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [{"step": 2, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 3}, {"x": 4}])
    assert read_run(tmp_path).points("x") == [(1.0, 2.0), (2.0, 3.0)]


def test_steps_without_a_finite_value_have_no_point(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": "a"}, {"step": 4, "x": 0}])
    assert read_run(tmp_path).points("x") == [(4.0, 0.0)]


def test_rollouts_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    lines(
        tmp_path / "rollouts.jsonl",
        [
            {"step": 1, "finish_reason": "stop", "dropped": None},
            {"step": 1, "finish_reason": "length", "dropped": "equal_rewards"},
            {"step": 2, "finish_reason": "stop", "dropped": "scoring_failed", "failure": "timed out"},
        ],
    )
    run = read_run(tmp_path)
    assert run.episodes == 3
    assert run.finishes == {"stop": 2, "length": 1}
    assert run.drops == {"equal_rewards": 1, "scoring_failed": 1}
    assert run.reasons == {"timed out": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e301, -(10**400), True, None, "1", [1]])
def test_what_cannot_be_drawn_is_no_number(value: object) -> None:
    assert not is_finite(value)


@pytest.mark.parametrize("value", [0, -3, 1e-320, 1e299, 10**20])
def test_what_can_be_drawn_is(value: object) -> None:
    assert is_finite(value)


def test_a_step_that_no_number_can_hold_is_left_out(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [{"step": 10**400, "x": 1}, {"step": True, "x": 2}, {"step": 3, "x": 4}])
    assert read_run(tmp_path).points("x") == [(3.0, 4.0)]


def test_examples_come_from_the_first_and_the_last_step(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"step": step, "text": f"{step}.{n}"} for step in (1, 2, 3) for n in range(6)]
    lines(tmp_path / "rollouts.jsonl", rows)
    run = read_run(tmp_path)
    assert [e["text"] for e in run.first] == ["1.0", "1.1", "1.2", "1.3"]
    assert [e["text"] for e in run.last] == ["3.0", "3.1", "3.2", "3.3"]


def test_only_the_end_of_a_huge_record_is_read_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "rollouts.jsonl", [{"step": n, "finish_reason": "stop"} for n in range(100)])
    monkeypatch.setattr(report_data, "MOST_ROLLOUT_BYTES", 400)
    run = read_run(tmp_path)
    assert run.partly
    assert 0 < run.episodes < 20
    assert run.last[0]["step"] == 99


def test_the_title_is_the_app_and_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "grpo" / "demo"
    folder.mkdir(parents=True)
    assert read_run(folder).title == "grpo / demo"


@pytest.mark.parametrize(
    ("value", "finite"),
    [(1, True), (0.0, True), (float("nan"), False), (float("inf"), False), (True, False), ("1", False)],
)
def test_only_finite_numbers_can_be_drawn(value: object, finite: bool) -> None:
    assert is_finite(value) is finite
