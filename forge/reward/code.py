"""Code that a model writes, run against tests in a sandbox (`forge.sandbox`)."""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from forge.errors import ConfigError
from forge.reward.base import Reward
from forge.reward.extract import visible_text
from forge.sandbox import run_python, sandbox_problem

if TYPE_CHECKING:
    from forge.types import Episode

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)

# Runs the program, then the asserts, and says the password. All that it needs by then is held in local names, so a
# program that ends early, prints a verdict or replaces functions of modules is not taken for one that passed.
_ASSERTS = """
def judge(program, asserts, password, write=__import__("os").write, leave=__import__("os")._exit):
    import builtins
    table = vars(builtins)
    own = dict(table)
    names = {"__name__": "program"}
    try:
        exec(compile(program, "program.py", "exec"), names)
        table.clear()
        table.update(own)
        names.pop("__builtins__", None)
        exec(compile(asserts, "tests.py", "exec"), names)
    except BaseException:
        leave(1)
    write(1, password)
    leave(0)
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """What a program prints for an input."""

    stdin: str
    stdout: str


class CodeReward(Reward):
    """1.0 when the completion's program passes every test of the gold answer, else 0.0.

    The program is the last fenced block (```python or ```) behind the thinking. The gold answer is either

    - a JSON list of cases, `[{"stdin": "1 2\\n", "stdout": "3\\n"}, …]`: the program is run on each input, and what it
      prints is compared outside of the sandbox, up to white space at the ends of lines and of the text; or
    - Python asserts, `assert add(1, 2) == 3`, which run behind the program in the same interpreter.

    A share of passed cases earns nothing: it pays for printing the commonest answer. Cases cannot be fooled. Asserts
    call what the program defined and can be, by a program that attacks them on purpose: objects that equal everything,
    or reading the judge's frame. Ending early, printing, and replacing builtins or functions of modules do not pass.

    Args:
        timeout_s: for each run of the program, in seconds. `reward.timeout_s` bounds all of them together.
        memory_mb: MiB that the program may use.

    Raises:
        ConfigError: this machine cannot confine a program.
    """

    def __init__(self, timeout_s: float = 4.0, memory_mb: int = 512) -> None:
        if (problem := sandbox_problem()) is not None:
            raise ConfigError(f"reward.name=code {problem}: choose another reward")
        self.timeout_s, self.memory_mb = timeout_s, memory_mb

    @property
    def name(self) -> str:
        return "code"

    def __call__(self, episode: Episode) -> float:
        program = find_program(episode.text)
        if program is None:
            return 0.0
        cases = read_cases(episode.answer)
        if cases is None:
            return float(self._passes_asserts(program, episode.answer))
        return float(all(self._prints(program, case) for case in cases))

    def _prints(self, program: str, case: Case) -> bool:
        ended = run_python(program, stdin=case.stdin, timeout_s=self.timeout_s, memory_mb=self.memory_mb)
        return ended.failure is None and ended.status == 0 and _plain(ended.stdout) == _plain(case.stdout)

    def _passes_asserts(self, program: str, asserts: str) -> bool:
        password = secrets.token_hex(16)
        judge = f"{_ASSERTS}\njudge({program!r}, {asserts!r}, {password.encode()!r})\n"
        ended = run_python(judge, timeout_s=self.timeout_s, memory_mb=self.memory_mb)
        return ended.failure is None and ended.status == 0 and ended.stdout.endswith(password)


def find_program(text: str) -> str | None:
    """The last fenced block of a completion; None without one."""
    blocks = _FENCE.findall(visible_text(text) + "\n")
    return blocks[-1] if blocks else None


@lru_cache(maxsize=1024)
def read_cases(answer: str) -> tuple[Case, ...] | None:
    """The input and output cases of a gold answer; None when it is no JSON list, and so holds asserts.

    Raises:
        ValueError: a case is not {"stdin": text, "stdout": text}.
    """
    if not answer.lstrip().startswith("["):
        return None
    found = json.loads(answer)
    if not found:
        raise ValueError("the list of cases is empty")
    for i, case in enumerate(found):
        texts = isinstance(case, dict) and all(isinstance(v, str) for v in case.values())
        if not texts or set(case) != {"stdin", "stdout"}:
            raise ValueError(f'case {i + 1} must be {{"stdin": text, "stdout": text}}, got {json.dumps(case)[:80]}')
    return tuple(Case(**case) for case in found)


def code_problem(answer: str) -> str | None:
    """Why a gold answer cannot test a program, in words for the data check; None when it can."""
    try:
        if read_cases(answer) is not None:
            return None
        tests = ast.parse(answer)
    except SyntaxError as error:
        return f"the answer is neither a JSON list of cases nor Python asserts: {error.msg} in line {error.lineno}"
    except ValueError as error:  # what json raises, too
        return f"the answer holds no cases: {error}"
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tests)):
        return "the answer is Python without an assert, which every program passes"
    return None


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
