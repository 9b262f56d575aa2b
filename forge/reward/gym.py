"""Tasks of reasoning-gym, scored by reasoning-gym itself."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forge.reward.base import Reward
from forge.reward.extract import boxed_answer, find_boxes, visible_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forge.types import Episode

LITERAL_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer in reasoning-gym 0.1.25 passes the answer to Python's `eval`, expecting a list."""
EXPRESSION_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer passes the answer to sympy's `parse_expr`, which evaluates Python."""
MAX_EVALUATED = 2000
"""Characters of an answer that is passed to such a scorer."""

_LABEL = re.compile(r"\banswer\s{0,3}(?:\*\*)?:(?:\*\*)?", re.IGNORECASE)
_PLAIN_TEXT = re.compile(r"[\w\s,\-]*")
_LIST = re.compile(r"[\[\](),\s]*(?:(?:'[^'\\\n]*'|\"[^\"\\\n]*\"|-?\d+(?:\.\d+)?(?![\d.]))[\[\](),\s]*)*")
_POWER = r"(?:\*\*|\^)\s*(?:-?\d{1,3}(?![\d.]|\s*(?:\*\*|\^))|\(\s*-?\d{1,2}\s*(?:/\s*\d{1,2}\s*)?\)(?!\s*(?:\*\*|\^)))"
_NAMES = r"(?:exp|log|ln|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|sqrt|pi|[A-Za-z])(?![A-Za-z_\d])"
_EXPRESSION = re.compile(rf"(?:{_POWER}|{_NAMES}|\d+(?:\.\d+)?(?![\d.A-Za-z_])|\*(?!\*)|[-+/()\s])*")


class GymReward(Reward):
    r"""What reasoning-gym's `score_answer` of the task gives, from 0.0 to 1.0.

    The entry is `episode.prompt.fields` with the keys of a reasoning-gym entry ("question", "answer", "metadata");
    question and answer fall back to the prompt's. `metadata["source_dataset"]` names the task. The scorer is that of
    the task with its default settings, as `reasoning_gym.get_score_answer_fn` builds it. A row that names no task is
    scored by reasoning-gym's general rule: 1.0 for the answer itself, a share when it holds more than that.

    The answer is the text between the last `<answer>` tags, else in the last box, else behind the last "Final
    Answer:" or "Answer:", else all of the text after thinking. White space around it never costs reward, and an
    answer that is the key up to white space scores 1.0. No answer scores 0.0, and so does one on which the scorer
    raises. Scorers that evaluate the answer as Python see only plain lists and arithmetic; other text scores 0.0.

    Raises:
        ValueError: the entry names a task that reasoning-gym does not have; the episode is marked as failed.
        Exception: whatever the scorer raises on the entry's own key too, for then the entry is at fault.
    """

    @property
    def name(self) -> str:
        return "gym"

    def setup(self) -> None:
        """Load reasoning-gym."""
        _scorer("number_sorting")

    def __call__(self, episode: Episode) -> float:
        entry = {"question": episode.question, "answer": episode.answer, **episode.prompt.fields}
        return score_entry(entry, gym_answer(episode.text))


def gym_answer(completion: str) -> str | None:
    """The answer of a completion, which may span lines; None when it has none."""
    text = visible_text(completion)
    blocks = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    if blocks:
        text = blocks[-1].strip()
    if find_boxes(text):
        return boxed_answer(text)
    if blocks:
        return text or None
    labels = list(_LABEL.finditer(text))
    return (text[labels[-1].end() :].strip() if labels else text) or None


def score_entry(entry: Mapping[str, Any], answer: str | None) -> float:
    """Score an answer against a reasoning-gym entry; see `GymReward`."""
    key = entry.get("answer")
    if isinstance(key, str) and find_boxes(key):
        key = boxed_answer(key)
        entry = {**entry, "answer": key}
    if answer is None or not answer.strip():
        return 0.0
    answer = answer.strip()
    if isinstance(key, str) and answer.split() == key.split():
        return 1.0
    task = _task(entry)
    score = _scorer(task)
    if not may_be_evaluated(task, answer):
        return 0.0
    try:
        return float(score(answer, dict(entry)))
    except Exception:
        if isinstance(key, str):
            score(key, dict(entry))
        return 0.0


def may_be_evaluated(task: str, answer: str) -> bool:
    """Whether a scorer may see this answer: always, unless it would run it as Python."""
    if task in LITERAL_TASKS:
        form = _LIST if not _PLAIN_TEXT.fullmatch(answer) else _PLAIN_TEXT
    elif task in EXPRESSION_TASKS:
        form = _EXPRESSION
    else:
        return True
    return len(answer) <= MAX_EVALUATED and "__" not in answer and form.fullmatch(answer) is not None


def gym_problem(entry: Mapping[str, Any]) -> str | None:
    """Why a reasoning-gym entry cannot be graded fairly, in words for the data check; None when it can.

    Found are tasks that do not exist, keys that their own scorer does not accept in full, and sorted numbers that are
    not the numbers of the question. A key of None is fine: such tasks have many solutions and their scorer checks one.
    """
    task = _task(entry)
    try:
        score = _scorer(task)
    except ValueError as error:
        return str(error)
    key = entry.get("answer")
    if key is None:
        return None
    try:
        reached = float(score(key, dict(entry)))
    except Exception as error:
        return f"the scorer of task {task!r} raises {type(error).__name__} on the entry's own answer {key!r}"
    if reached < 1.0:
        return f"the scorer of task {task!r} gives the entry's own answer {key!r} only {reached:g}"
    numbers = (entry.get("metadata") or {}).get("original_numbers")
    if task == "number_sorting" and numbers is not None:
        listed = re.findall(r"-?\d+(?:\.\d+)?", key)
        if sorted(map(float, listed)) != sorted(float(number) for number in numbers):
            return f"the answer {key!r} does not hold the numbers of the question ({', '.join(map(str, numbers))})"
    return None


def _task(entry: Mapping[str, Any]) -> str:
    """Name of the task, "" for a row that is no reasoning-gym entry."""
    return str((entry.get("metadata") or {}).get("source_dataset") or "")


@lru_cache(maxsize=64)
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if not task:
        return lambda answer, entry: float(ProceduralDataset.score_answer(None, answer, entry))
    if task not in DATASETS:
        raise ValueError(f"the entry names task {task!r}, which this reasoning-gym does not have")
    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer
