r"""Math answers: equality on top of `forge.reward.extract` and math-verify.

Policy, where graders disagree. Every rule holds in both directions, with a gold answer bare or between dollars.

- Numbers are compared exactly: `0.375` is `\frac{3}{8}`, `18.00` is `18`, `1,250` is `1250`, `2\frac{3}{4}` is
  `\frac{11}{4}`.
- Decimals: a decimal equals an endless value (a third, pi) only when it gives it to six significant digits: `0.666667`
  is `\frac{2}{3}`, `0.667` is not. The tolerance is relative, so small values do not collapse.
- Percent: `75\%` is `0.75` and `\frac{3}{4}`; it is also `75`, because answers to "what percent" come both ways.
- Units are dropped and not compared: `40\text{ km/h}` is `40`.
- Variables: two formulas are equal when they agree wherever both are real: `\sqrt{\frac1n}` is `\frac{1}{\sqrt n}`,
  `|x|` is not `x`.
- Sets and bare lists have no order; points, and lists in brackets, do. `(0,1)` is not `[0,1]`.
- An interval and an inequality are equal when they hold the same numbers: `(-\infty,3)` is `x<3`.
- With a colon (ratio or clock time) the parts are compared one by one: `3:4` is `3:4`, not `6:8` and not `\frac34`.
- `x=6` is `6`; `x=6` is not `y=6`. `\pm 7` is `7, -7`, not `7`.
- Choice letters A to J and single words ("even") are compared as text. In "The answer is C because I integrated" the
  answer is C.
- Thinking that is never closed holds no answer.
- A gold answer that cannot be read (`gold_problem`) is never matched.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from forge.reward.base import Reward
from forge.reward.clean import MAX_ANSWER, choice_letters, clean, clean_gold, gold_kind, read_numeral
from forge.reward.extract import Kind, extract_answer
from forge.reward.values import (
    COMPARE_LIMIT_S,
    NotReadable,
    TookTooLong,
    TooLarge,
    parse_formula,
    same_set,
    same_value,
    time_limit,
)

if TYPE_CHECKING:
    from forge.types import Episode

MAX_ITEMS = 50
"""Elements of a list or set that are compared; unordered ones are matched pair by pair."""

_NAME = r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z]\))?"
_ASSIGNMENT = re.compile(rf"(?P<name>{_NAME}) ?(?:=|\\in(?![A-Za-z])) ?(?P<value>[^=]+)")
_INEQUALITY = re.compile(r"[<>]|\\(?:leq|geq|neq)(?![A-Za-z])")
_CONSTANT_COMMANDS = re.compile(r"\\(?:frac|sqrt|times|cdot|pi)(?![A-Za-z])")
_RELATION = re.compile(r"[<>=]|\\(?:leq|geq|neq|cup|cap|setminus)(?![A-Za-z])")
_BASED = re.compile(r"(?P<digits>[0-9A-F]+)_(?:\{(?P<base>\d+)\}|(?P<short>\d+))")
_OPEN = {"(": ")", "[": "]", "{": "}"}

logger = logging.getLogger(__name__)


class MathReward(Reward):
    """1.0 when the completion's final answer equals the gold answer as mathematics, else 0.0.

    The policy on ambiguous forms stands at the top of this module. A gold answer that cannot be read scores 0.0
    and is logged once as a warning; the data check reports such rows beforehand.
    """

    @property
    def name(self) -> str:
        return "math"

    def setup(self) -> None:
        """Load math-verify and its parser."""
        answers_equal(r"\frac{x}{2}", r"\frac{1}{2}x")
        answers_equal(r"(-\infty,3)", "x<3")

    def __call__(self, episode: Episode) -> float:
        return float(grade(episode.text, episode.answer))


def grade(completion: str, gold: str) -> bool:
    """Whether the final answer of a completion equals the gold answer."""
    wanted = clean_gold(gold)
    kind = gold_kind(wanted)
    if (problem := gold_problem(gold)) is not None:
        _warn_bad_gold(problem)
        return False
    found = extract_answer(completion, kind)
    return found is not None and _equal_text(wanted, clean(found), kind)


def answers_equal(gold: str, answer: str) -> bool:
    """Whether an answer, already out of its completion, equals the gold answer; False when either is unreadable."""
    wanted = clean_gold(gold)
    return gold_problem(gold) is None and _equal_text(wanted, clean_gold(answer), gold_kind(wanted))


@lru_cache(maxsize=4096)
def gold_problem(answer: str) -> str | None:
    """Why a gold answer cannot be graded as math, in words for the data check; None when it can.

    Readable are numbers, formulas, equations, inequalities, sets, lists, intervals, choice letters and single words.
    """
    wanted = clean_gold(answer)
    if not wanted:
        return f"the answer is empty or longer than {MAX_ANSWER} characters"
    if gold_kind(wanted) is not Kind.MATH:
        return None
    try:
        with time_limit(COMPARE_LIMIT_S):
            _check_readable(wanted)
    except TooLarge:
        return None
    except NotReadable as error:
        return f"the answer {answer!r} cannot be graded as math: {error}"
    except TookTooLong:
        return f"the answer {answer!r} cannot be graded as math: reading it takes over {COMPARE_LIMIT_S} s"
    return None


@dataclass(kw_only=True, slots=True, frozen=True)
class _Parts:
    """A list, set, point or interval taken apart."""

    brackets: str
    """"" (bare list), "{}", "()", "[]", "(]" or "[)"."""
    items: tuple[str, ...]


def _equal_text(gold: str, answer: str, kind: Kind) -> bool:
    if not gold or not answer:
        return False
    if kind is Kind.CHOICE:
        return choice_letters(gold) == (choice_letters(answer) or choice_letters(answer.upper()))
    if kind is Kind.WORD:
        return gold.casefold() == answer.casefold()
    if _squeezed(gold) == _squeezed(answer):
        return True
    try:
        with time_limit(COMPARE_LIMIT_S):
            return _equal(gold, answer)
    except NotReadable:
        return False
    except TookTooLong:
        from sympy.core.cache import clear_cache

        clear_cache()  # an interrupted computation may have left half of its facts there
        parse_formula.cache_clear()
        return False
    except RecursionError:
        return False


def _equal(gold: str, answer: str) -> bool:
    """Equality of two cleaned answers of kind MATH."""
    gold, answer = _last_of_chain(gold), _last_of_chain(answer)
    gold_name, gold_value = _split_assignment(gold)
    answer_name, answer_value = _split_assignment(answer)
    if gold_name and answer_name and gold_name != answer_name:
        return _RELATION.search(gold_value + answer_value) is None and _is_rearranged(gold, answer)
    if not (gold_name and not answer_name and "=" in answer) and not (answer_name and not gold_name and "=" in gold):
        gold, answer = gold_value, answer_value
    if ":" in gold or ":" in answer:
        return _equal_parts(gold.split(":"), answer.split(":"))
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
        return _equal_based(gold, answer)
    if _is_relation(gold) or _is_relation(answer):
        return _equal_relations(gold, answer)
    gold_parts = _take_apart(gold)
    answer_parts = _take_apart(answer, plain_commas=gold_parts is not None)
    if gold_parts is None and answer_parts is None:
        return same_value(_ungrouped(gold), _ungrouped(answer))
    if gold_parts is None or answer_parts is None:
        return False
    return _equal_lists(gold_parts, answer_parts)


def _equal_lists(gold: _Parts, answer: _Parts) -> bool:
    kinds = {gold.brackets, answer.brackets}
    if len(gold.items) != len(answer.items) or len(gold.items) > MAX_ITEMS:
        return False
    if kinds <= {"", "{}"}:
        left = list(answer.items)
        for item in gold.items:
            match = next((other for other in left if _equal_item(item, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    if len(kinds) == 2 and kinds not in ({"", "()"}, {"", "[]"}):
        return False
    return _equal_parts(gold.items, answer.items)


def _equal_parts(gold: list[str] | tuple[str, ...], answer: list[str] | tuple[str, ...]) -> bool:
    return len(gold) == len(answer) and all(_equal_item(g, a) for g, a in zip(gold, answer, strict=True))


def _equal_item(gold: str, answer: str) -> bool:
    gold, answer = gold.strip(), answer.strip()
    if not gold or not answer:
        return False
    return _squeezed(gold) == _squeezed(answer) or _equal(gold, answer)


def _equal_based(gold: str, answer: str) -> bool:
    r"""`1010_2` against `1010_2` or the bare digits `1010`."""
    sides = [_BASED.fullmatch(text) for text in (gold, answer)]
    digits = [match["digits"] if match else text for match, text in zip(sides, (gold, answer), strict=True)]
    bases = {match["base"] or match["short"] for match in sides if match}
    return digits[0] == digits[1] and len(bases) == 1


def _equal_relations(gold: str, answer: str) -> bool:
    sides = [[part.strip() for part in _alternatives(text)] for text in (gold, answer)]
    return same_set(*sides)


def _alternatives(text: str) -> list[str]:
    """The parts of "x<1 or x>2"."""
    return re.split(r" or ", text)


def _is_rearranged(gold: str, answer: str) -> bool:
    """Two equations whose left sides are different names say the same only if one solves to the other."""
    return len(set(re.findall(r"[A-Za-z]", gold))) > 1 and same_set([gold], [answer])


def _is_relation(text: str) -> bool:
    """Whether the whole text is one statement about numbers: a relation, a union, or inequalities joined by "or"."""
    if _RELATION.search(text) is None:
        return False
    return _take_apart(text) is None or (" or " in text and _INEQUALITY.search(text) is not None)


def _last_of_chain(text: str) -> str:
    """What a chain of equalities says: `x = 2+4 = 6` and `6 = x` say `x = 6`, `2+4 = 6` says `6`.

    Alternatives for one name become its list: `x = 2 or x = 3` says `x = 2, 3`.
    """
    pieces = [_ASSIGNMENT.fullmatch(piece) for piece in _split_top_level(text)]
    named = [piece for piece in pieces if piece is not None]
    if 1 < len(named) == len(pieces) and len({piece["name"] for piece in named}) == 1:
        return f"{named[0]['name']} = {', '.join(piece['value'].strip() for piece in named)}"
    parts = [part.strip() for part in text.split("=")]
    if len(parts) == 1 or "," in text or any(not part or part[-1] in "<>!" for part in parts):
        return text
    first, last = parts[0], parts[-1]
    if len(parts) > 2:
        return f"{first} = {last}" if re.fullmatch(_NAME, first) else last
    if _has_variables(first):
        return text
    if re.fullmatch(_NAME, last) and _has_variables(last):
        return f"{last} = {first}"
    return text if _has_variables(last) else last


def _has_variables(text: str) -> bool:
    return re.search(r"[A-Za-z]", _CONSTANT_COMMANDS.sub("", text)) is not None


def _split_assignment(text: str) -> tuple[str | None, str]:
    match = _ASSIGNMENT.fullmatch(text)
    if match is None or _take_apart(text) is not None and "=" in text and "," in text and not _one_assignment(text):
        return None, text
    return match["name"], match["value"].strip()


def _one_assignment(text: str) -> bool:
    """Whether the whole text is the value of one name, as in `x = 1, 2` but not in `x = 1, y = 2`."""
    return text.count("=") == 1


def _take_apart(text: str, plain_commas: bool = False) -> _Parts | None:
    r"""The elements of a list, set, point or interval; None for a single value.

    Args:
        text: a cleaned answer.
        plain_commas: read `100,200` as two numbers and not as one with a thousands separator.
    """
    brackets, inner = _enclosing(text)
    if not brackets and not plain_commas and read_numeral(text):
        return None
    pieces = _split_top_level(inner)
    if len(pieces) == 1 and brackets != "{}":
        if not brackets and text.count(r"\pm") == 1:
            return _Parts(brackets="", items=(text.replace(r"\pm", "+").lstrip("+ "), text.replace(r"\pm", "-")))
        return None
    if not brackets and not plain_commas and read_numeral(_ungrouped(text)):
        return None
    if not brackets and not plain_commas and _ungrouped(text) != text and "," not in _ungrouped(text):
        return None
    return _Parts(brackets=brackets, items=tuple(_expand_signs(pieces) if brackets in ("", "{}") else pieces))


def _expand_signs(pieces: list[str]) -> list[str]:
    expanded: list[str] = []
    for piece in pieces:
        signs = ("+", "-") if piece.count(r"\pm") == 1 else ("",)
        expanded.extend(piece.replace(r"\pm", sign).strip().lstrip("+ ") for sign in signs)
    return expanded


def _enclosing(text: str) -> tuple[str, str]:
    """The brackets around the whole text, and what stands between them; "" when there are none."""
    if text.startswith(r"\{") and text.endswith(r"\}") and text.find(r"\}") == len(text) - 2:
        return "{}", text[2:-2].strip()
    if not text or text[0] not in "([" or text[-1] not in ")]":
        return "", text
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(text) - 1:
            return "", text
    return text[0] + text[-1], text[1:-1].strip()


def _split_top_level(text: str) -> list[str]:
    """Parts between commas, semicolons, "and" and "or" that stand in no bracket."""
    pieces, depth, start, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        depth += (character in "([{") - (character in ")]}")
        word = re.match(r" (?:and|or) ", text[position : position + 5]) if character == " " else None
        if depth == 0 and (character in ",;" or word):
            pieces.append(text[start:position].strip())
            position += word.end() - 1 if word else 0
            start = position + 1
        position += 1
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if piece] or [""]


def _ungrouped(text: str) -> str:
    """Thousands separators taken out of `1,250x`; untouched when any comma is something else."""
    without = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    return text if "," in without else without


def _check_readable(text: str) -> None:
    """Raise NotReadable unless every part of a cleaned gold answer can be read."""
    text = _split_assignment(_last_of_chain(text))[1]
    if _BASED.fullmatch(text):
        return
    parts = _take_apart(text)
    if parts is not None:
        for item in parts.items:
            _check_readable(item)
    elif ":" in text:
        for piece in text.split(":"):
            _check_readable(piece.strip())
    else:
        for piece in _alternatives(text):
            parse_formula(_ungrouped(piece.strip().removesuffix("%").strip()))


def _squeezed(text: str) -> str:
    return text.replace(" ", "")


@lru_cache(maxsize=1024)
def _warn_bad_gold(problem: str) -> None:
    logger.warning("%s; every completion of it scores 0", problem)
