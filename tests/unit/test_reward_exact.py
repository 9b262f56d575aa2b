"""Rewards that compare text, and what every named reward has in common."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forge.reward import REWARDS, ExactMatch, FormatReward, build_reward
from forge.types import Completion, Episode, FinishReason, Prompt


def episode(text: str, answer: str) -> Episode:
    return Episode(
        prompt=Prompt(id="t.jsonl:1", question="q", answer=answer, token_ids=(1,)),
        completion=Completion(
            token_ids=(1,), logprobs=(0.0,), versions=(0,), text=text, finish_reason=FinishReason.STOP
        ),
        group=0,
        member=0,
    )


@pytest.mark.parametrize("gold", ["5", r"\boxed{5}"])
@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"code"}))  # which runs what it is given
def test_every_named_reward_finds_a_boxed_answer_once(name: str, gold: str) -> None:
    assert build_reward(name)(episode(r"Answer: \boxed{5}", gold)) == 1.0


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("4", "4\n", 1.0),
        ("two  words", " two words.", 1.0),
        ("Paris", "The answer is Paris.", 1.0),
        ("Paris", "paris", 0.0),
        ("4", "4 and more", 0.0),
        ("72", "so 70 + 2\n#### 72", 1.0),
        ("70 + 2\n#### 72", "#### 72", 1.0),
        ("7", "<think>8</think> 7", 1.0),
        ("", "", 0.0),
    ],
)
def test_exact_match_compares_the_answer_up_to_white_space(gold: str, text: str, score: float) -> None:
    assert ExactMatch()(episode(text, gold)) == score


BLOCKS = "<think>\nfirst line\nsecond line\n</think>\n<answer>\n5\n</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (BLOCKS, 1.0),
        (BLOCKS + "<|im_end|>\n", 1.0),
        (BLOCKS + "</s>", 1.0),
        (BLOCKS + BLOCKS, 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer><answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer> and on", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>never closed <answer>5</answer>", 0.0),
        ("the prompt opened it\n</think>\n<answer>5</answer>", 1.0),
        (r"<think>a</think> so \boxed{5}", 1.0),
        (r"\boxed{5}\boxed{5}", 0.0),
        (r"\boxed{5", 0.0),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward_wants_one_closed_thought_and_one_answer(text: str, score: float) -> None:
    assert FormatReward()(episode(text, "5")) == score


def test_format_reward_can_require_a_thought() -> None:
    assert FormatReward(require_think=True)(episode("<answer>5</answer>", "5")) == 0.0
    assert FormatReward(require_think=True)(episode(BLOCKS, "5")) == 1.0


def test_importing_the_package_loads_no_heavy_library() -> None:
    script = (
        "import sys, forge.reward; heavy = {'torch', 'sympy', 'math_verify', 'reasoning_gym', 'cloudpickle', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
