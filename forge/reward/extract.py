r"""Finding the final answer in a completion.

Order of search, in the text after the thinking block; the first kind that is present decides:

1. `<answer>…</answer>` blocks; several that differ give no answer; a block may hold a box.
2. `\boxed{…}`, braces counted. The last box counts. Boxes with nothing but separators between them are one list, so
   a shotgun of boxes is a list and not a choice. A last box that is never closed, or empty, gives no answer.
3. `#### …` on its line.
4. "Final Answer: …", "the answer is …".
5. The whole text where it is one expression, else the last formula or number, whichever stands later. Digits inside
   a formula are never taken for the answer.

Thinking: what stands before the last `</think>` is ignored, and so is everything after a `<think>` that is never
closed, whatever it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MARKERS = 5
"""How many "the answer is" are tried, last first, before the search goes on: enough for real texts, and bounded."""

MAX_SEPARATOR = 80
"""Characters between two boxes beyond which they cannot be one list."""

_SPECIAL_TOKEN = re.compile(r"<[|｜][^|｜<>\n]{1,40}[|｜]>|</?s>|<eos>|<end_of_turn>")
_THINK_OPEN = re.compile(r"<think(?:ing)?>")
_THINK_CLOSE = re.compile(r"</think(?:ing)?>")
_ANSWER_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BOX_TOKEN = re.compile(r"-?[\d.,/]*\d|[A-Za-z]|\\[A-Za-z]+")
_SEPARATORS = re.compile(r"(?:[\s$,;.:&*]|\\[,;:!()\[\] ]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)$", re.MULTILINE)
_MARKER = re.compile(
    r"\banswer\b(?:[^\n.:=]{0,60}?(?:\bis\b|[:=])(?:\s*\bis\b)?)|\bfinal[ \t]+answer\b[ \t*_]*\n", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<=\S)[.!?](?=\s|\*|$)")
_MATH = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>(?:(?!\\\[).)+?)\\\]|\\\((?P<paren>(?:(?!\\\().)+?)\\\)"
    r"|(?<![\\$])\$(?P<inline>[^\s$](?:[^$\n]*?[^\s$\\])?)\$(?!\d)",
    re.DOTALL,
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    r"(?P<fraction>-?\\[dtc]?frac\{-?\d+\}\{-?\d+\})"
    r"|(?<![\w.,\\^_{}/:])(?P<sign>[-+]?)[$€£]?(?P<inner>-?)"
    rf"(?P<number>{_DIGITS}(?:\s?/\s?\d+|(?::\d+)+)?(?:\s?\\?%)?)"
    r"(?!\d|[A-Za-z](?<![mghsL])(?![A-Za-z])|[_^\\({])"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
FUNCTION_WORDS = frozenset(
    "sqrt pi sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp max min gcd lcm inf infinity oo "
    "and or theta alpha beta".split()
)
"""Words that may stand in a formula written without backslashes."""
_CHOICE_TAIL = re.compile(
    r"(?:(?i:option|choice)\s+)?(?:\\text(?:bf)?\{)?\(?\[?(?P<letter>[A-J])(?P<close>[)\]}:.,;]|\s*$"
    r"|(?=\s+(?:because|since|as|which|due|for|so|when|given|and|by)\b))"
)
_CHOICE_ANYWHERE = re.compile(
    r"(?:(?i:option|choice)\s+\(?(?P<named>[A-J])\b)|\((?P<inside>[A-J])\)|\*\*(?P<bold>[A-J])\*\*"
)
_CHOICE_LIST = re.compile(r"\(?[A-J]\)?(?:(?:\s*,\s*|\s+and\s+|\s*&\s*)\(?[A-J]\)?)+")


class Kind(Enum):
    """What the gold answer is, which decides how an unboxed answer is looked for."""

    MATH = "math"
    CHOICE = "choice"
    """One letter A to J, or several."""
    WORD = "word"
    """One plain word such as "even" or a name."""
    TEXT = "text"
    """Any text, compared as it stands."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Box:
    r"""One `\boxed{…}` of a text."""

    content: str | None
    """What stands between its braces; None when it is never closed."""
    start: int
    end: int


def strip_special_tokens(text: str) -> str:
    """`text` without end-of-turn and similar tokens that were decoded as text."""
    return _SPECIAL_TOKEN.sub(" ", text)


def visible_text(text: str) -> str:
    """`text` without its thinking and without special tokens that were decoded as text."""
    text = strip_special_tokens(text)
    closings = list(_THINK_CLOSE.finditer(text))
    if closings:
        text = text[closings[-1].end() :]
    opened = _THINK_OPEN.search(text)
    return (text[: opened.start()] if opened else text).strip()


def closing_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one at `start`; escaped braces do not count; None when there is none."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def find_boxes(text: str) -> list[Box]:
    """Every outermost box, in order; the search ends at a box that is never closed."""
    boxes = []
    position = 0
    while match := _BOX.search(text, position):
        if text[match.end() : match.end() + 1] == "{":
            end = closing_brace(text, match.end())
            if end is None:
                boxes.append(Box(content=None, start=match.start(), end=len(text)))
                break
            boxes.append(Box(content=text[match.end() + 1 : end].strip(), start=match.start(), end=end + 1))
            position = end + 1
        else:
            token = _BOX_TOKEN.match(text, match.end())
            position = token.end() if token else match.end()
            boxes.append(Box(content=token.group() if token else None, start=match.start(), end=position))
    return boxes


def boxed_answer(text: str) -> str | None:
    """The content of the last box, or of the last run of boxes as one list; None for an unclosed or empty one."""
    boxes = find_boxes(text)
    run: list[str] = []
    following: Box | None = None
    for box in reversed(boxes):
        if following is not None:
            between = text[box.end : following.start]
            if len(between) > MAX_SEPARATOR or not _SEPARATORS.fullmatch(between):
                break
        if not box.content:
            return None
        inner = boxed_answer(box.content) if find_boxes(box.content) else box.content
        if inner is None:
            return None
        if inner not in run:
            run.insert(0, inner)
        following = box
    return ", ".join(run) or None


def extract_answer(completion: str, kind: Kind = Kind.MATH) -> str | None:
    """The final answer of a completion as text, or None when it gives none.

    Args:
        completion: the whole text that the model wrote.
        kind: what the gold answer is.
    """
    text = visible_text(completion)
    if "<answer>" in text:
        blocks = list(dict.fromkeys(block.strip() for block in _ANSWER_BLOCK.findall(text)))
        if len(blocks) != 1 or text.rfind("<answer>") > text.rfind("</answer>"):
            return None
        text = blocks[0]
        if not find_boxes(text) and kind is not Kind.CHOICE and not _HASHES.search(text):
            return (text if kind is not Kind.MATH else _formula_or_number(text)) or None
    if find_boxes(text):
        return boxed_answer(text)
    for line in reversed(_HASHES.findall(text)):
        if (found := _from_line(line.strip(), kind, heading=True)) is not None:
            return found
    for tail in _marked_tails(text):
        if (found := _from_line(tail, kind)) is not None:
            return found
    return _from_whole_text(text, kind)


def math_segments(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each formula between math delimiters; a lone dollar sign is money."""
    for match in _MATH.finditer(text):
        yield match.start(), match.end(), next(group for group in match.groups() if group is not None).strip()


def is_expression(text: str) -> bool:
    """True when `text` is one line that could be a formula: no words but function names."""
    words = [w for w in _WORD.findall(re.sub(r"\\(?:text|mathrm)\{[^{}]*\}", "", text)) if w not in FUNCTION_WORDS]
    return 0 < len(text) <= 300 and "\n" not in text and not words and re.search(r"[\w∞∅]", text) is not None


def _marked_tails(text: str) -> Iterator[str]:
    """What follows "the answer is", last first, without emphasis; empty tails left out."""
    matches = list(_MARKER.finditer(text))
    for match in reversed(matches[-MAX_MARKERS:]):
        tail = text[match.end() :].lstrip(" \t\n*_:=").split("\n", 1)[0].strip()
        if tail:
            yield tail


def _from_line(line: str, kind: Kind, heading: bool = False) -> str | None:
    """The answer that a line begins with. `heading`: the line may be a Markdown heading, which is no answer."""
    if kind is Kind.CHOICE:
        bare = line.replace("*", "").strip()
        if listed := _CHOICE_LIST.match(bare):
            return listed.group()
        match = _CHOICE_TAIL.match(bare)
        if match is None or (match["letter"] == "I" and not match["close"]):
            return None
        return match["letter"]
    if kind is Kind.WORD:
        word = re.match(r"[A-Za-z][A-Za-z-]*", line.replace("\\text{", "").lstrip("*$ "))
        return word.group() if word else None
    line = line.replace("**", "").strip()
    if kind is Kind.TEXT:
        return line.rstrip(".").strip() or None
    if heading and re.match(r"[A-Za-z]{2,}", line):
        return None
    segments = list(math_segments(line))
    if segments and not re.search(r"\d", line[: segments[0][0]]):
        return _joined(line, segments)
    end = _SENTENCE_END.search(line)
    sentence = line[: end.start()] if end else line
    if is_expression(sentence):
        return sentence
    number = _NUMBER.search(sentence)
    return _number_text(number) if number else None


def _joined(line: str, segments: list[tuple[int, int, str]]) -> str:
    """The first formula, with those that follow it behind nothing but separators, as one list."""
    contents = [segments[0][2]]
    for (_, end, _), (start, _, content) in zip(segments, segments[1:], strict=False):
        between = line[end:start].strip()
        if not between or not _SEPARATORS.fullmatch(between):
            break
        contents.append(content)
    return ", ".join(contents)


def _from_whole_text(text: str, kind: Kind) -> str | None:
    if kind is Kind.CHOICE:
        if (found := _from_line(text, kind)) is not None and len(text) <= 3 * len(found) + 4:
            return found
        letters = [next(g for g in m.groups() if g) for m in _CHOICE_ANYWHERE.finditer(text)]
        return letters[-1] if letters else _from_line(text.rsplit("\n", 1)[-1], kind)
    if kind is Kind.WORD:
        bare = text.strip(" .*\n")
        return bare if re.fullmatch(r"[A-Za-z-]+", bare) else None
    if kind is Kind.TEXT:
        return text or None
    return _formula_or_number(text)


def _formula_or_number(text: str) -> str | None:
    """The text itself where it is one expression, else its last formula or number."""
    bare = text.strip().rstrip(".").strip()
    segments = list(math_segments(text))
    if not segments and is_expression(bare):
        return bare
    last_segment = segments[-1] if segments else None
    masked = list(text)
    for start, end, _ in segments:
        masked[start:end] = " " * (end - start)
    number = None
    for match in _NUMBER.finditer("".join(masked)):
        number = match
    if last_segment and (number is None or number.start() < last_segment[0]):
        return last_segment[2]
    return _number_text(number) if number else None


def _number_text(match: re.Match[str]) -> str:
    return match["fraction"] or f"{match['sign'].strip('+')}{match['inner']}{match['number']}"
