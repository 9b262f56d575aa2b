r"""From an answer as written to one spelling of it: delimiters, units, spacing and look-alike characters removed.

`clean` is text in, text out, and knows no mathematics; `read_numeral` reads the forms of a single number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from forge.reward.extract import FUNCTION_WORDS, Kind, boxed_answer, find_boxes, visible_text

MAX_DIGITS = 1000
"""Longest numeral that is read as a number: far above any answer, far below what makes arithmetic slow."""
MAX_EXPONENT = 1000
"""Largest power of ten in scientific notation that is written out as an exact number."""

MAX_ANSWER = 2000
"""Characters of an answer that is read at all; the clean-up passes are not linear in it."""

_CHARACTERS = str.maketrans(
    {
        "−": "-", "﹣": "-", "－": "-", "‐": "-", "‑": "-", "–": "-",
        "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
        "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
        "∈": r"\in ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "θ": r"\theta ", "°": "", "％": "%",
        "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "",
    }
)  # fmt: skip
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[$]|\$|\\[()](?![A-Za-z])|(?<!\\)\\[\[\]]|[€£]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"\\!|\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\{\s*,\s*\}", ","),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:textbf|textit|textrm|textnormal|mbox|textsf|texttt)(?=\s*\{)", r"\\text"),
        (r"\\(?:mathbf|boldsymbol|mathit|mathsf|bm)\{([^{}]*)\}", r"\1"),
        (r"\\(?:mathrm|operatorname)\{\s*([A-Za-z])\s*\}", r"\1"),
        (r"\\mathrm(?=\{)", r"\\text"),
        (r"\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![A-Za-z])", ""),
        (r"\\%|\\text\{\s*(?:\\?%|percent)\s*\}|\s*\bpercent\b", "%"),
        (r"\\text\{\s*(and|or)\s*\}", r" \1 "),
        (r"\\le(?![A-Za-z])|<=", r"\\leq "),
        (r"\\ge(?![A-Za-z])|>=", r"\\geq "),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"^\*+|\*+$", ""),
        (r"\*\*", "^"),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        (r"\^(-\d+|\d{2,})", r"^{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)|\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\s+", " "),
    ]
]
_FUNCTIONS = sorted(FUNCTION_WORDS - {"and", "or", "oo", "inf", "infinity"}, key=len, reverse=True)
_PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})(?![A-Za-z])")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"(?<=[\d})\w%])\s*(?:/?\s*\\text\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*)+$")
_GLUED_UNIT = re.compile(
    r"(?P<number>^-?[\d.,/ ]*\d)\s*(?:km|cm|mm|kg|mg|mph|ft|lbs?|hrs?|mins?|secs?|m|g|s|h)(?:/(?:h|s|hr|min|kg|m))?"
    r"(?:\^\{?[23]\}?)?$"
)
_WORD_UNIT = re.compile(
    r"(?P<number>^-?[\d.,/ ]*\d|^-?\\frac\{\d+\}\{\d+\})\s+(?P<words>[A-Za-z]{3,}(?:[ /.][A-Za-z]+)*)$"
)
_AMBIGUOUS_UNIT = frozenset({"m", "g", "s", "h"})

_SIGN = r"(?P<sign>[-+]?) ?"
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMERAL = re.compile(
    rf"{_SIGN}(?:"
    rf"(?P<decimal>{_UNSIGNED})"
    r"(?:[eE](?P<e>[-+]?\d+)| ?(?:\\times|\\cdot|\*) ?10\^(?:\{(?P<braced>[-+]?\d+)\}|(?P<single>\d)))?"
    r"|(?:(?P<whole>\d+) ?)?\\frac ?(?:\{(?P<top>[-+]?\d+)\} ?\{(?P<bottom>\d+)\}|(?P<top1>\d) ?(?P<bottom1>\d))"
    rf"|(?:(?P<whole2>\d+) )?(?P<top2>\d+) ?/ ?(?P<bottom2>\d+)"
    r"|(?P<start>\d+)\.(?P<fixed>\d*)\\overline ?\{(?P<period>\d+)\}"
    r")(?P<percent> ?%)?"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Numeral:
    """One number as written. Example: `75%` is Numeral(value=Fraction(75), decimal=False, percent=True)."""

    value: Fraction
    """The number without its percent sign."""
    decimal: bool
    """Written with a decimal point."""
    percent: bool


def clean(text: str) -> str:
    """One spelling of an answer: no delimiters, units or stray punctuation; "" for one beyond `MAX_ANSWER`."""
    if len(text) > MAX_ANSWER:
        return ""
    text = text.translate(_CHARACTERS).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while whole := _TEXT.fullmatch(text):
        text = whole[1].strip()
    text = text.replace("*", r"\cdot ")
    text = _PLAIN_FUNCTION.sub(r"\\\1", text)
    text = text.strip(" ,;:") if not text.endswith(r"\:") else text
    text = re.sub(r"(?<!^)\.$", "", text)
    return _without_units(text).strip()


def clean_gold(answer: str) -> str:
    r"""A gold answer without what its data set wrapped around it: a box, a worked solution before `####`, dollars."""
    text = visible_text(answer)
    if find_boxes(text):
        text = boxed_answer(text) or ""
    elif "####" in text:
        text = text.rsplit("####", 1)[1]
    return clean(text)


def gold_kind(cleaned: str) -> Kind:
    """What a cleaned gold answer is."""
    if choice_letters(cleaned):
        return Kind.CHOICE
    if re.fullmatch(r"[A-Za-z]{2,}(?:-[A-Za-z]+)*", cleaned) and cleaned.lower() not in FUNCTION_WORDS:
        return Kind.WORD
    return Kind.MATH


def choice_letters(cleaned: str) -> frozenset[str] | None:
    """The choice letters A to J that an answer consists of ("C", "(C)", "C. 12", "A, C"), or None."""
    cleaned = _TEXT.sub(r"\1", cleaned)
    listed = re.fullmatch(r"\(?([A-J])\)?(?:(?:, ?| and )\(?([A-J])\)?){1,9}", cleaned)
    if listed:
        return frozenset(re.findall(r"[A-J]", cleaned))
    single = re.fullmatch(r"\(?([A-J])\)?[.:]?|\(([A-J])\).*|([A-J])[.:)] .*", cleaned)
    return frozenset(next(g for g in single.groups() if g)) if single else None


def read_numeral(text: str) -> Numeral | None:
    """The number that a cleaned answer is, or None when it is something else or too long to be an answer."""
    match = _NUMERAL.fullmatch(text)
    if match is None or len(text) > MAX_DIGITS:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["decimal"] is not None:
        exponent = int(next((match[k] for k in ("e", "braced", "single") if match[k]), "0"))
        if abs(exponent) > MAX_EXPONENT:
            return None
        value = Fraction(match["decimal"].replace(",", "").rstrip(".")) * Fraction(10) ** exponent
    elif match["period"] is not None:
        fixed, period = match["fixed"], match["period"]
        whole_digits = Fraction(int(match["start"] + fixed + period) - int(match["start"] + fixed))
        return Numeral(
            value=sign * whole_digits / (10 ** len(fixed) * (10 ** len(period) - 1)),
            decimal=False,
            percent=match["percent"] is not None,
        )
    else:
        top = next(int(match[k]) for k in ("top", "top1", "top2") if match[k])
        bottom = next(int(match[k]) for k in ("bottom", "bottom1", "bottom2") if match[k])
        whole = int(match["whole"] or match["whole2"] or 0)
        if bottom == 0 or (whole and top < 0):
            return None
        value = whole + Fraction(top, bottom)
    return Numeral(value=sign * value, decimal="." in text, percent=match["percent"] is not None)


def _without_units(text: str) -> str:
    """Cut a unit behind a number or formula. Units are not compared."""
    text = _TEXT_UNIT.sub("", text).strip()
    if match := _GLUED_UNIT.fullmatch(text):
        unit = text[match.end("number") :].strip()
        if unit not in _AMBIGUOUS_UNIT or text[match.end("number")] == " ":
            return match["number"]
    if match := _WORD_UNIT.fullmatch(text):
        first = match["words"].split()[0].lower()
        if first not in FUNCTION_WORDS:
            return match["number"]
    return text
