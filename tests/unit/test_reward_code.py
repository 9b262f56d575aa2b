"""Programs of a model against tests, in the sandbox."""

from __future__ import annotations

import json

import pytest

from forge.reward import CodeReward, RewardPool, code_problem
from forge.reward.code import find_program
from forge.types import Completion, Episode, FinishReason, Prompt

SUMS = json.dumps([{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 6\n", "stdout": "11"}])
ADD = "assert add(1, 2) == 3\nassert add(2, 2) == 4"


def episode(program: str, answer: str) -> Episode:
    return Episode(
        prompt=Prompt(id="t.jsonl:1", question="q", answer=answer, token_ids=(1,)),
        completion=Completion(
            token_ids=(1,),
            logprobs=(0.0,),
            versions=(0,),
            text=f"Here it is.\n```python\n{program}\n```\nDone.",
            finish_reason=FinishReason.STOP,
        ),
        group=0,
        member=0,
    )


@pytest.mark.parametrize(
    ("program", "answer", "score"),
    [
        ("print(sum(map(int, input().split())))", SUMS, 1.0),
        ("print(3)", SUMS, 0.0),  # one of two cases
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", SUMS, 0.0),
        ("print(sum(map(int, input().split())), '\\n')", SUMS, 1.0),  # white space at the end
        ("print(  ", SUMS, 0.0),
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return 3", ADD, 0.0),
        ("add = lambda a, b: a + b\nprint('noise')", ADD, 1.0),
    ],
)
def test_a_program_earns_its_reward_by_passing_every_test(program: str, answer: str, score: float) -> None:
    assert CodeReward()(episode(program, answer)) == score


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('passed'); raise SystemExit",
        "import builtins; builtins.AssertionError = ValueError\nbuiltins.exec = lambda *a: None",
        "import builtins; builtins.compile = lambda *a, **k: (lambda: None).__code__\nadd = None",
        "import os; os.write = lambda *a: None; os._exit = lambda *a: None",
        "import sys; sys.stdout.write = None; quit()",
        "def add(a, b): import os; os._exit(0)",
        "def add(a, b): raise SystemExit",
        "import threading, os; threading.Timer(0.01, os._exit, (0,)).start()\ndef add(a, b):\n    while True: pass",
        "__builtins__ = {'print': print}",
    ],
)
def test_a_program_that_ends_early_or_replaces_builtins_passes_no_assert(trick: str) -> None:
    assert CodeReward(timeout_s=2.0)(episode(trick, ADD)) == 0.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```\nor rather\n```py\na = 2\n```", "a = 2\n"),
        ("<think>```python\na = 0\n```</think>```python\na = 1\n```", "a = 1\n"),
        ("  ```python\n  a = 1\n  ```", "  a = 1\n"),
        ("```python\nunfinished", None),
        ("a = 1", None),
    ],
)
def test_the_program_is_the_last_fenced_block_behind_the_thinking(text: str, program: str | None) -> None:
    assert find_program(text) == program


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (SUMS, None),
        (ADD, None),
        ("def check(f):\n    assert f(1) == 2\ncheck(add)", None),
        ("[]", "the list of cases is empty"),
        ('[{"stdin": "1"}]', "case 1 must be"),
        ('[{"stdin": "1", "stdout": 2}]', "case 1 must be"),
        ("[1, 2", "the answer holds no cases"),
        ("three", "without an assert"),
        ("assert add(1, 2 == 3", "neither a JSON list of cases nor Python asserts"),
    ],
)
def test_a_gold_answer_that_tests_nothing_is_told_beforehand(answer: str, problem: str | None) -> None:
    found = code_problem(answer)
    assert found is None if problem is None else found is not None and problem in found


async def test_it_runs_in_the_reward_workers() -> None:
    with RewardPool(CodeReward(), workers=1, timeout_s=20, memory_mb=200) as pool:
        good = await pool.score(episode("print(sum(map(int, input().split())))", SUMS))
        bad = await pool.score(episode("while True: pass", json.dumps([{"stdin": "", "stdout": ""}])))
    assert (good.reward, good.failure) == (1.0, None)
    assert (bad.reward, bad.failure) == (0.0, None)
