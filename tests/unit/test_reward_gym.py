"""reasoning-gym tasks, scored by their own scorers."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest

from forge.reward import GymReward, gym_problem
from forge.reward.gym import EXPRESSION_TASKS, LITERAL_TASKS, gym_answer, may_be_evaluated, score_entry
from forge.types import Completion, Episode, FinishReason, Prompt

if TYPE_CHECKING:
    from pathlib import Path

reasoning_gym = pytest.importorskip("reasoning_gym")

CHECKED = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"}
"""Modules that evaluate their own tasks or keys, or have a parser of that name: read, and harmless to answers."""


def first(task: str) -> dict[str, Any]:
    entry: dict[str, Any] = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    return entry


def episode(entry: dict[str, Any], text: str) -> Episode:
    fields = {key: value for key, value in entry.items() if key not in ("question", "answer")}
    prompt = Prompt(id="g:0", question=entry["question"], answer=entry["answer"] or "", token_ids=(1,), fields=fields)
    completion = Completion(token_ids=(1,), logprobs=(0.0,), versions=(0,), text=text, finish_reason=FinishReason.STOP)
    return Episode(prompt=prompt, completion=completion, group=0, member=0)


@pytest.mark.parametrize("task", ["number_sorting", "chain_sum", "countdown", "spiral_matrix", "simple_equations"])
@pytest.mark.parametrize("shape", ["{}", "{}\n", " <think>no</think>\n<answer> {} </answer><|im_end|>", "Answer: {}"])
def test_the_key_scores_one_whatever_white_space_is_around_it(task: str, shape: str) -> None:
    entry = first(task)
    assert GymReward()(episode(entry, shape.format(entry["answer"]))) == 1.0


def test_white_space_inside_the_answer_costs_nothing() -> None:
    entry = first("spiral_matrix")
    assert GymReward()(episode(entry, "  ".join(entry["answer"].split()) + "\n")) == 1.0


def test_another_right_answer_scores_by_the_rules_of_the_task() -> None:
    entry = first("countdown")
    turned = f"({entry['answer']}) + 0"  # the value is right, but 0 is not one of the numbers
    assert GymReward()(episode(entry, turned)) == 0.05


@pytest.mark.parametrize("task", ["number_sorting", "rush_hour", "countdown", "n_queens", "tower_of_hanoi", "sudoku"])
@pytest.mark.parametrize("answer", ["", "???", "[[[", "9" * 5000, "None", "\x00", "move 7 to the moon"])
def test_malformed_answers_score_near_zero_and_never_raise(task: str, answer: str) -> None:
    assert GymReward()(episode(first(task), answer)) <= 0.05


def test_row_without_a_task_is_scored_by_the_general_rule() -> None:
    row = {"question": "q", "answer": "4"}
    assert GymReward()(episode(row, "4\n")) == 1.0
    assert GymReward()(episode(row, "4 or 5")) == pytest.approx(1 / 6)  # the key is 1 of 6 characters


def test_unknown_task_raises_and_names_it() -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        score_entry({"answer": "4", "metadata": {"source_dataset": "no_such_task"}}, "5")


def test_data_check_flags_a_key_whose_numbers_were_rounded() -> None:
    entry = {
        "question": "Sort these numbers in ascending order: 71.08, -92.85",
        "answer": "['-92.8', '71.1']",
        "metadata": {
            "source_dataset": "number_sorting",
            "original_numbers": ["71.08", "-92.85"],
            "direction": "ascending",
        },
    }
    problem = gym_problem(entry)
    assert problem is not None
    assert "-92.85" in problem
    # the answer in full precision is right all the same
    assert score_entry(entry, "['-92.85', '71.08']") == 1.0


def test_data_check_flags_a_key_that_its_scorer_refuses() -> None:
    entry = first("spiral_matrix")
    assert gym_problem(entry) is None
    assert "only 0" in str(gym_problem({**first("number_sorting"), "answer": "['3', '1', '2']"}))


def test_data_check_accepts_tasks_that_have_no_key() -> None:
    entry = first("rush_hour")
    assert entry["answer"] is None
    assert gym_problem(entry) is None


def test_multi_line_answers_are_kept() -> None:
    assert gym_answer("<answer>\n1 2\n3 4\n</answer>") == "1 2\n3 4"
    assert gym_answer("**Answer:**\n1 2\n3 4") == "1 2\n3 4"


@pytest.mark.parametrize("task", sorted(LITERAL_TASKS | EXPRESSION_TASKS))
def test_answers_are_never_run_as_python(task: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    entry = first(task)
    for call in (
        f"open('{marker}','w')",
        f"[open('{marker}','w')]",
        f"__import__('os').system('touch {marker}')",
        f"1 + open('{marker}','w')",
        f"exec(\"open('{marker}','w')\")",
        "9**9**9**9",
        "(lambda: 1)()",
    ):
        assert GymReward()(episode(entry, f"<answer>{call}</answer>")) == 0.0
    assert not marker.exists()


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("countdown", "(7 + 8) * 3 - 12/4"),
        ("simple_integration", "3*x**2/2 - 5*x**3 + C"),
        ("intermediate_integration", "exp(2*x)*sin(x)/2 + (2*x + 1)**(3/2) + C"),
        ("polynomial_multiplication", "12*x**3*y - 4*z**10"),
    ],
)
def test_honest_answers_reach_the_scorers_that_evaluate(task: str, answer: str) -> None:
    assert may_be_evaluated(task, answer)


def test_every_task_that_evaluates_text_is_known() -> None:
    """Fails when a new reasoning-gym brings another scorer that evaluates: read it, then list it."""
    from reasoning_gym.factory import DATASETS

    evaluating = {
        task
        for task, (kind, _) in DATASETS.items()
        if re.search(r"\b(?:eval|exec|parse_expr|sympify)\(", inspect.getsource(inspect.getmodule(kind)))  # type: ignore[arg-type]
    }
    assert evaluating == LITERAL_TASKS | EXPRESSION_TASKS | CHECKED
