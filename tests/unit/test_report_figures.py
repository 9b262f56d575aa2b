import re
from typing import Any

import pytest

from forge.report_data import RunRecord
from forge.report_figures import running_mean, sections


def a_run(rows: list[dict[str, Any]], **summary: Any) -> RunRecord:
    return RunRecord(title="x", rows=[{"step": n, **row} for n, row in enumerate(rows, 1)], summary=summary)


def drawn(run: RunRecord) -> str:
    return "".join(figure for _, figures in sections(run) for figure in figures)


def names(html: str, title: str) -> list[str]:
    """The entries of a figure's key."""
    figure = html.split(f"<h3>{title}</h3>")[1].split("</figure>")[0]
    return re.findall(r"</i>([^<]*)</span>", figure)


def test_a_running_mean_looks_back_over_its_window() -> None:
    points = [(1.0, 0.0), (2.0, 1.0), (3.0, 1.0), (4.0, 4.0)]
    # window 2: 0, (0 + 1) / 2, (1 + 1) / 2, (1 + 4) / 2
    assert running_mean(points, 2) == [(1.0, 0.0), (2.0, 0.5), (3.0, 1.0), (4.0, 2.5)]


def test_nothing_is_drawn_without_data() -> None:
    assert drawn(a_run([])) == ""
    assert drawn(a_run([{}, {"unknown/metric": 1.0}])) == ""


def test_the_parts_of_the_reward_are_drawn_without_their_counts() -> None:
    row = {"reward/mean": 0.5, "reward/exact": 0.5, "reward/exact/count": 8, "reward/format": 1.0, "reward/std": 0.1}
    assert names(drawn(a_run([row] * 3)), "Reward by part") == ["exact", "format"]


def test_a_single_part_is_the_reward_itself_and_not_drawn_again() -> None:
    assert "Reward by part" not in drawn(a_run([{"reward/mean": 0.5, "reward/exact": 0.5}] * 3))


def test_a_step_in_which_everything_happens_in_turn_is_one_stack() -> None:
    row = {"time/wait_batch_seconds": 3, "time/train_seconds": 2, "time/publish_seconds": 1, "time/pull_seconds": 1}
    html = drawn(a_run([{**row, "time/step_seconds": 7.0}] * 4))
    assert names(html, "Where the time of a step goes") == [
        "waiting for rollouts", "training", "publishing weights", "loading weights"
    ]  # fmt: skip


def test_a_weight_sync_beside_the_training_is_a_line_and_not_part_of_the_stack() -> None:
    # 3 + 2 of 5 seconds are taken by waiting and training: 2 more cannot be part of the step
    row = {"time/wait_batch_seconds": 3, "time/train_seconds": 2, "time/publish_seconds": 1, "time/pull_seconds": 1}
    html = drawn(a_run([{**row, "time/step_seconds": 5.0}] * 4))
    assert names(html, "Where the time of a step goes") == [
        "waiting for rollouts", "training", "weight sync (beside it)"
    ]  # fmt: skip
    assert "weight sync (beside it) 2 s" in html


def test_time_that_no_part_accounts_for_is_shown() -> None:
    html = drawn(a_run([{"time/train_seconds": 2, "time/step_seconds": 3.0}] * 4))
    assert "everything else 1 s" in html


def test_ages_are_added_up_over_the_steps_and_the_bound_is_drawn() -> None:
    html = drawn(a_run([{"age/0": 3, "age/1": 1, "age/max": 1, "age/mean": 0.25}] * 2, max_age_bound=2))
    assert "0: 6 (75.0 %)" in html
    assert "1: 2 (25.0 %)" in html
    assert "bound 2" in html


@pytest.mark.parametrize(("rates", "drawn_"), [([1e-5] * 4, False), ([1e-6, 1e-5, 1e-5], True)])
def test_a_learning_rate_is_drawn_only_when_it_moves(rates: list[float], drawn_: bool) -> None:
    assert ("Learning rate" in drawn(a_run([{"trainer/lr": rate} for rate in rates]))) is drawn_


def test_evaluations_between_are_dots_on_the_reward() -> None:
    rows: list[dict[str, Any]] = [{"reward/mean": 0.1 * n} for n in range(6)]
    rows[3]["eval/mean_reward"] = 0.4
    html = drawn(a_run(rows))
    assert names(html, "Reward") == ["each step", "mean of 5 steps", "held-out rows"]
    assert "held-out rows 0.4" in html
