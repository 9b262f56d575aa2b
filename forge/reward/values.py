"""Formulas: reading one with math-verify's LaTeX parser, and comparing two.

Text that a model wrote reaches only the grammar of `latex2sympy2_extended`, which builds sympy objects node by node.
It never reaches `sympify`, `parse_expr` or anything else that evaluates Python; what the grammar may see is limited
to `_ALLOWED` characters and known commands first.

What keeps a comparison short, in order: limits on the text, a bound on the number of digits that a value can have
before it is evaluated, and a time limit. The worker process that runs a reward is killed should all three fail.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import threading
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forge.reward.clean import MAX_DIGITS, Numeral, read_numeral

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

MAX_FORMULA = 500
"""Characters of a formula that is parsed; the longest answers of public math sets have about 150."""
MAX_DEPTH = 12
"""Nested brackets; the parser's time grows with the power of the depth."""
MAX_POWERS = 30
"""Powers and roots in one formula."""
MAX_VALUE_DIGITS = 20_000
"""Digits that a subexpression may have when evaluated; far beyond it big integers cannot be interrupted."""
COMPARE_LIMIT_S = 2.0
"""One comparison of formulas; usual ones take 1 to 50 ms."""
DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""Relative: what six significant digits of a rounded decimal can express."""
_EQUAL_TOLERANCE = 1e-12
"""Relative, between two values computed to 25 digits."""
_MIN_SAMPLES = 3
"""Points with real values on both sides below which sampling does not decide."""

_ALLOWED = re.compile(r"[A-Za-z0-9\s\\{}()\[\]+\-/^_=<>|!,.;:%&]*")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_COMMANDS = re.compile(r"\\([A-Za-z]+)")
_BANNED_COMMANDS = frozenset("operatorname text mbox mathrm xrightarrow input write read def let csname".split())
_EAGER_COMMANDS = frozenset("binom tbinom dbinom gcd lcm det Gamma gamma".split())
"""Commands that the parser evaluates while it reads; their formulas may hold short integers only."""
_EAGER_DIGITS = 4
_SAMPLES = (0.737, 1.318, 2.611, 0.291, -0.863, -1.427, 3.0, 1.0, 2.0, 5.0, -2.0, 4.0)
"""Values given to variables: fractions first, then whole numbers, for forms such as (-1)^n that need them."""

logger = logging.getLogger(__name__)


class NotReadable(Exception):
    """The text is not a formula that Forge reads. The message says why."""


class TooLarge(NotReadable):
    """A formula whose value has more digits than are ever written out; it can still be equal as text."""


class TookTooLong(BaseException):
    """The time limit of a comparison passed. Not an `Exception`, so that no library swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` inside the block after `seconds`; no limit outside a process's main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@lru_cache(maxsize=1024)
def parse_formula(text: str) -> Any:
    """The sympy object that a cleaned formula stands for, unevaluated, decimals as exact fractions.

    Raises:
        NotReadable: it is no formula, or is beyond the limits above.
    """
    if numeral := read_numeral(text):
        return _rational(numeral)
    _check_text(text)
    from latex2sympy2_extended.math_normalization import (
        NormalizationConfig,
        normalize_latex,
    )
    from math_verify.grader import should_treat_as_complex
    from sympy import Basic, I, MatrixBase

    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        latex = normalize_latex(text, config=config)
        parsed = _reader()(is_real=not should_treat_as_complex(latex)).parse(latex)
        if not isinstance(parsed, (Basic, MatrixBase)):
            raise NotReadable(f"{text!r} is not one value")
        if num_digits(parsed) > MAX_VALUE_DIGITS:
            raise TooLarge(f"{text!r} has a value with more than {MAX_VALUE_DIGITS} digits")
        if [str(symbol) for symbol in parsed.free_symbols] == ["i"]:
            parsed = parsed.xreplace({symbol: I for symbol in parsed.free_symbols})  # no other letter: a complex number
    except NotReadable:
        raise
    except Exception as error:  # the grammar raises plain Exception, sympy many kinds; all mean the same here
        raise NotReadable(f"{text!r} is not a formula ({type(error).__name__})") from None
    return parsed


def same_value(gold: str, answer: str) -> bool:
    """Whether two cleaned single values are equal; see `forge.reward.math` for the policy. Symmetric.

    Raises:
        NotReadable: one of them is not a formula.
    """
    left, right = read_numeral(gold), read_numeral(answer)
    if left and right:
        return _same_numeral(left, right)
    gold_text, gold_percent = _without_percent(gold)
    answer_text, answer_percent = _without_percent(answer)
    gold_value, answer_value = parse_formula(gold_text), parse_formula(answer_text)
    if gold_percent == answer_percent:
        pairs = [(gold_value, answer_value)]
    else:
        hundredth = (gold_value / 100, answer_value) if gold_percent else (gold_value, answer_value / 100)
        pairs = [hundredth, (gold_value, answer_value)]
    decimal = (left is not None and left.decimal) != (right is not None and right.decimal)
    return any(_same_expression(x, y, decimal) for x, y in pairs)


def same_set(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether two sides, each a cleaned relation, interval or union, or several joined by "or", say the same.

    Raises:
        NotReadable: one of them is not a formula.
    """
    left, right = [[parse_formula(text) for text in side] for side in (gold, answer)]
    if not all(_is_statement(parsed) for parsed in (*left, *right)):
        return False
    if len(left) == len(right) == 1 and (_library_equal(left[0], right[0]) or _library_equal(right[0], left[0])):
        return True
    names = {symbol for parsed in (*left, *right) for symbol in parsed.free_symbols}
    if len(names) > 1:
        return False
    try:
        return bool(_as_set(left) == _as_set(right))
    except Exception:  # sympy raises many kinds for sets it cannot solve: then they are not known to be equal
        return False


def num_digits(expression: Any) -> float:
    """An upper estimate of the digits before or after the point that evaluating any part can produce."""
    from sympy import Integer, Pow, Rational, Symbol, exp, factorial

    def size(node: Any) -> float:
        if isinstance(node, Integer):
            return max(1.0, abs(int(node)).bit_length() * math.log10(2))
        if isinstance(node, Rational):
            return max(size(Integer(node.p)), size(Integer(node.q)))
        if isinstance(node, Symbol) or not getattr(node, "args", ()):
            return 1.0
        sizes = [size(child) for child in node.args]
        if isinstance(node, Pow):
            return sizes[0] * _from_digits(sizes[1], node.exp)
        if isinstance(node, exp):
            return _from_digits(sizes[0], node.args[0])
        if isinstance(node, factorial):
            count = _from_digits(sizes[0], node.args[0])
            return count * max(1.0, math.log10(max(count, 1.0)))
        return min(sum(sizes), 1e300)

    return size(expression)


def _from_digits(digits: float, node: Any) -> float:
    """The magnitude of a number of that many digits; exact for plain numbers."""
    if getattr(node, "is_Rational", False):
        return abs(float(node)) if digits < 300 else math.inf
    return 10.0**digits if digits < 300 else math.inf


def _check_text(text: str) -> None:
    if not text or len(text) > MAX_FORMULA:
        raise NotReadable(f"a formula of {len(text)} characters; 1 to {MAX_FORMULA} are read")
    if not _ALLOWED.fullmatch(text) or "__" in text:
        raise NotReadable(f"{text!r} holds characters that no formula has")
    if words := _WORDS.findall(text.replace("begin", "").replace("end", "").replace("matrix", "")):
        raise NotReadable(f"{text!r} holds the word {words[0]!r}")
    commands = set(_COMMANDS.findall(text))
    if banned := commands & _BANNED_COMMANDS:
        raise NotReadable(f"{text!r} holds \\{min(banned)}")
    if re.search(rf"\d{{{MAX_DIGITS // 5},}}|\d[eE][-+]?\d{{4,}}", text):
        raise NotReadable("a number with too many digits")
    if (commands & _EAGER_COMMANDS or "_" in text) and re.search(rf"\d{{{_EAGER_DIGITS + 1},}}", text):
        raise NotReadable(f"{text!r} holds a number too large for \\{min(commands, default='_')}")
    if commands & _EAGER_COMMANDS and text.count("^") > 2:
        raise NotReadable(f"{text!r} holds a power inside a command that is evaluated at once")
    if text.count("^") + text.count("\\sqrt") + text.count("!") > MAX_POWERS:
        raise NotReadable("a formula with too many powers")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise NotReadable(f"brackets nested {deepest} deep; {MAX_DEPTH} are read")


@lru_cache(maxsize=1)
def _reader() -> Any:
    """The library's parser with numbers made exact; its own way leads through `sympify`, which evaluates Python."""
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from sympy import Rational

    class Reader(_Latex2Sympy):
        def parse_number(self, text: str) -> Any:
            value = Fraction(text.replace(",", ""))
            return Rational(value.numerator, value.denominator)

    return Reader


def _rational(numeral: Numeral) -> Any:
    from sympy import Rational

    value = numeral.value / 100 if numeral.percent else numeral.value
    return Rational(value.numerator, value.denominator)


def _without_percent(text: str) -> tuple[str, bool]:
    return (text[:-1].strip(), True) if text.endswith("%") else (text, False)


def _same_numeral(left: Numeral, right: Numeral) -> bool:
    if left.percent == right.percent:
        pairs = [(left.value, right.value)]
    elif left.percent:
        pairs = [(left.value / 100, right.value), (left.value, right.value)]
    else:
        pairs = [(left.value, right.value / 100), (left.value, right.value)]
    return any(x == y or (left.decimal != right.decimal and _rounded(x, y)) for x, y in pairs)


def _rounded(x: Fraction, y: Fraction) -> bool:
    """Whether one is a six-digit rounding of the other, an endless decimal. Finite decimals are equal or not."""
    if _is_finite_decimal(x) and _is_finite_decimal(y):
        return False
    return abs(x - y) <= DECIMAL_TOLERANCE * max(abs(x), abs(y))


def _is_finite_decimal(x: Fraction) -> bool:
    bottom = x.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


def _same_expression(gold: Any, answer: Any, decimal: bool) -> bool:
    """Compare two sympy objects. `decimal`: exactly one of them was written as a decimal number."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return _library_equal(gold, answer) or _library_equal(answer, gold)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _same_constant(gold, answer, decimal)
    agreed = 0
    for start in range(len(_SAMPLES)):
        point = {symbol: _SAMPLES[(start + 5 * k) % len(_SAMPLES)] for k, symbol in enumerate(symbols)}
        values = [_real_value(expression, point) for expression in (gold, answer)]
        if values[0] is None or values[1] is None:
            continue
        if not _close(values[0], values[1]):
            return False
        agreed += 1
    if agreed >= _MIN_SAMPLES:
        return True
    return _library_equal(gold, answer) or _library_equal(answer, gold)


def _same_constant(gold: Any, answer: Any, decimal: bool) -> bool:
    from sympy import nan, oo, zoo

    x, y = (value if value in (oo, -oo) else value.evalf(40) for value in (gold, answer))
    if any(value in (nan, zoo) for value in (x, y)):
        return False
    if x in (oo, -oo) or y in (oo, -oo):
        return bool(x == y)
    if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
        return _library_equal(gold, answer)
    scale = max(abs(x).evalf(40), abs(y).evalf(40))
    distance = abs(x - y).evalf(40)
    if scale == 0 or distance <= 1e-30 * scale:
        return True
    exact = gold.is_Rational and answer.is_Rational
    if not decimal or (exact and _is_finite_decimal(_fraction(gold)) and _is_finite_decimal(_fraction(answer))):
        return False
    return bool(distance * DECIMAL_TOLERANCE.denominator <= scale)


def _fraction(value: Any) -> Fraction:
    return Fraction(int(value.p), int(value.q))


def _real_value(expression: Any, point: dict[Any, float]) -> Any:
    """The value at a point to 25 digits, or None where it is not a finite real number."""
    from sympy import Rational

    try:
        exact = {symbol: Rational(str(value)) for symbol, value in point.items()}
        value = expression.xreplace(exact).evalf(25)
        return value if value.is_Float or value.is_Rational else None
    except Exception:  # undefined at this point, in one of sympy's many ways
        return None


def _close(x: Any, y: Any) -> bool:
    scale = max(abs(x), abs(y))
    return bool(scale < 1e-40 or abs(x - y) <= _EQUAL_TOLERANCE * scale)


def _library_equal(gold: Any, answer: Any) -> bool:
    """math-verify's comparison of sets, equations, inequalities and matrices, with our time limit around it."""
    import math_verify.grader

    math_verify.grader.TIMEOUT_WARNING_SHOWN = True  # the time limit is ours; its alarm fails outside a main thread
    return bool(math_verify.grader.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _is_statement(parsed: Any) -> bool:
    """A relation or a set: math-verify alone would take `x^2-4=0` for its right side, 0."""
    from latex2sympy2_extended.logic import And as ParsedAnd
    from sympy import Set, Tuple
    from sympy.core.relational import Relational

    return isinstance(parsed, (Set, Tuple, Relational, ParsedAnd))


def _as_set(alternatives: Sequence[Any]) -> Any:
    """The union of relations and sets in one real variable."""
    from latex2sympy2_extended.logic import And as ParsedAnd
    from sympy import And, Set, Union

    sets = []
    for parsed in alternatives:
        if isinstance(parsed, ParsedAnd):
            parsed = And(*parsed._unsorted_args)
        sets.append(parsed.doit() if isinstance(parsed, Set) else parsed.as_set())
    return Union(*sets)
