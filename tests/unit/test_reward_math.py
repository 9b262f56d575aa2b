"""Verdicts of the math reward, each for the gold answer as it stands, between dollars and in a box."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from forge.reward.math import MathReward, answers_equal, gold_problem, grade

if TYPE_CHECKING:
    from pathlib import Path

PROSE = " and then the shelf was painted" * 20

VERDICTS = [
    ("the same fraction", r"\frac{3}{8}", r"So the probability is \boxed{\frac{3}{8}}.", True),
    ("another denominator", r"\frac{3}{8}", r"\boxed{\frac{3}{7}}", False),
    ("a fraction as a decimal", r"\frac{3}{8}", r"\boxed{0.375}", True),
    ("a thousands comma", "1250", r"In total she needs \boxed{1,250} tiles.", True),
    ("a thousands comma in braces", "1250", r"\boxed{1{,}250}", True),
    ("hashes before a long text", "72", "#### 72\n" + PROSE, True),
    ("hashes before a long text on the line", "72", "#### 72" + PROSE, True),
    ("a comma behind the number", "72", "The shelf holds 72 jars, altogether.", True),
    ("a box while thinking", "42", r"<think>could be \boxed{42}?</think> The result is \boxed{41}.", False),
    ("three boxes at once", "7", r"\boxed{7}\boxed{8}\boxed{9}", False),
    ("three boxes at once, last right", "9", r"\boxed{7}\boxed{8}\boxed{9}", False),
    ("one box four times", "7", r"\boxed{7}" * 4, True),
    ("boxes of a set", "7, 8", r"\boxed{7} and \boxed{8}", True),
    ("a set in another order", r"\{2, 5\}", r"\boxed{5, 2}", True),
    ("a point with its numbers swapped", "(2, 5)", r"\boxed{(5, 2)}", False),
    ("the same point", "(2, 5)", r"\boxed{\left( 2,\, 5 \right)}", True),
    ("an open interval against a closed one", "(0, 1)", r"\boxed{[0, 1]}", False),
    ("a half-open interval", "[0, 1)", r"\boxed{[0,1)}", True),
    ("one of two signs", r"\pm 7", r"\boxed{7}", False),
    ("both signs written out", r"\pm 7", r"\boxed{7, -7}", True),
    ("plus instead of minus beside e", r"1-\frac{1}{\mathrm{e}}", r"\boxed{1+\frac{1}{\mathrm{e}}}", False),
    ("another form with e", r"1-\frac{1}{\mathrm{e}}", r"\boxed{\frac{e-1}{e}}", True),
    ("a digit inside a formula", "4", r"\boxed{4\sqrt{2}}", False),
    ("a formula in free text that holds the digit", "4", r"So we get $4\sqrt{2}$.", False),
    ("a mixed number", r"\frac{11}{4}", r"\boxed{2\frac{3}{4}}", True),
    ("a Unicode minus", "-5", "\\boxed{\u22125}", True),
    ("a unit as text", "40", r"\boxed{40\text{ km/h}}", True),
    ("a number as text", "13", r"\boxed{\text{13}}", True),
    ("a bold final answer", "73", "Adding the rows gives 905. Final Answer: **73**", True),
    ("a box cut off", "9", r"\boxed{9", False),
    ("a box cut off behind a whole one", "9", r"\boxed{9} or rather \boxed{9", False),
    ("an empty box", "9", r"\boxed{}", False),
    ("nothing", "9", "", False),
    ("no number at all", "0", "I am not able to solve this.", False),
    ("a lone dollar sign", "18", "Total cost: $18.00", True),
    ("several prices", "12", "It is $5 and then $7 so $12", True),
    ("a value for an assignment", "x=6", r"\boxed{6}", True),
    ("another variable", "x=6", r"\boxed{y=6}", False),
    ("a choice as text", "C", r"\boxed{\text{C}}", True),
    ("another choice", "C", r"\boxed{\text{B}}", False),
    ("a gold answer in words", r"\text{no such triangle}", r"\boxed{5}", False),
    ("decimals with a comma between", "8.124, 12.852", r"\boxed{8.124,12.852}", True),
    ("a word", r"\text{even}", "The answer is even.", True),
    ("matrices", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", True),
    (
        "matrices that differ",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}",
        False,
    ),
    ("digits in another base", "1010_2", r"\boxed{1010_{3}}", False),
    ("tiny numbers that differ", r"2\times10^{-8}", r"\boxed{3\times10^{-8}}", False),
    ("tiny decimals that differ", "1e-10", r"\boxed{2e-10}", False),
    ("an absolute value", "|x|", r"\boxed{x}", False),
    ("a polynomial in another order", "2x+1", r"$$1+2x$$", True),
    ("an equation turned round", "x^2+y^2=4", r"\boxed{4 = x^2+y^2}", True),
    ("a line in two forms", "y=2x+1", r"\boxed{2x-y+1=0}", True),
    ("Python notation", "2x^2+1", r"\boxed{2*x**2+1}", True),
    ("both roots by name", "2,3", r"\boxed{x=2 \text{ or } x=3}", True),
    ("two ranges", r"x<-1 \text{ or } x>2", r"\boxed{(-\infty,-1)\cup(2,\infty)}", True),
    ("the right side of an equation", "x^2-4=0", r"\boxed{0}", False),
    ("a product of complex numbers", "2i", r"\boxed{(1+i)^2}", True),
    ("a conjugate", "6-5i", r"\boxed{6+5i}", False),
    ("a repeating decimal", r"0.1\overline{6}", r"\boxed{\frac{1}{6}}", True),
    ("a number too large to write out", "10^{10^{10}}", r"\boxed{10^{10^{10}}}", True),
]


@pytest.mark.parametrize(
    ("gold", "completion", "right"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS]
)
@pytest.mark.parametrize("wrap", ["{}", "${}$", r"\boxed{{{}}}"], ids=["bare", "dollars", "boxed"])
def test_verdict_does_not_depend_on_how_the_gold_answer_is_wrapped(
    gold: str, completion: str, right: bool, wrap: str
) -> None:
    assert grade(completion, wrap.format(gold)) is right


POLICY = [
    ("percent as a decimal", r"75\%", "0.75", True),
    ("percent as a fraction", r"75\%", r"\frac{3}{4}", True),
    ("percent without its sign", r"75\%", "75", True),
    ("a hundred times the percentage", r"75\%", "7500", False),
    ("a decimal of three digits", r"\frac{2}{3}", "0.667", False),
    ("a decimal of six digits", r"\frac{2}{3}", "0.666667", True),
    ("pi to three digits", r"\pi", "3.14", False),
    ("a finite decimal that is near", "1000000", "1000000.5", False),
    ("an interval as an inequality", r"(-\infty,3)", "x<3", True),
    ("a closed interval as a strict inequality", r"(-\infty,3]", "x<3", False),
    ("a root of a quotient", r"\sqrt{\frac1n}", r"\frac{1}{\sqrt n}", True),
    ("a ratio", "3:4", "3 : 4", True),
    ("a ratio in larger terms", "3:4", "6:8", False),
    ("a ratio as a fraction", "3:4", r"\frac{3}{4}", False),
    ("a clock time as a ratio", "12:30", "2:5", False),
    ("a clock time", "12:30", "12:30", True),
]


@pytest.mark.parametrize(("left", "right", "equal"), [row[1:] for row in POLICY], ids=[row[0] for row in POLICY])
def test_policy_on_ambiguous_forms_is_the_same_in_both_directions(left: str, right: str, equal: bool) -> None:
    for gold, answer in ((left, right), (right, left)):
        for wrapped in (gold, f"${gold}$"):
            assert answers_equal(wrapped, answer) is equal
            assert grade(rf"\boxed{{{answer}}}", wrapped) is equal


def test_thinking_that_is_never_closed_gives_no_answer() -> None:
    assert not grade(r"<think>It is surely \boxed{42}, let me", "42")


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("C", "The answer is C because I integrated", True),
        ("I", "The answer is C because I integrated", False),
        ("I", "The answer is what I integrated", False),
        ("A", "The answer is A triangle", False),
        ("B", "So the right one is (B).", True),
        ("B", "(A) fails, hence **B**", True),
        ("A, C", r"\boxed{C, A}", True),
        ("C", r"\boxed{A, C}", False),
        ("C", r"\boxed{\textbf{(C)}\ 12}", True),
    ],
)
def test_choice_letters_are_found_and_the_pronoun_is_not_one(gold: str, completion: str, right: bool) -> None:
    assert grade(completion, gold) is right


@pytest.mark.parametrize(
    "gold", ["see figure", r"\text{no such triangle}", "", r"\frac{1}{", "   ", "5 or so, depending"]
)
def test_unreadable_gold_is_reported_and_never_matched(gold: str) -> None:
    assert gold_problem(gold) is not None
    for completion in (gold, rf"\boxed{{{gold}}}", r"\boxed{5}", r"\boxed{}", ""):
        assert not grade(completion, gold)


@pytest.mark.parametrize(
    "gold",
    [
        "5",
        "-1,250.5",
        "C",
        "even",
        r"\{1,2\}",
        "(0,1]",
        "x<3",
        "x=6",
        r"75\%",
        "3:4",
        "so\n#### 72",
        r"2\sqrt{3}",
        "x^2+1",
    ],
)
def test_readable_gold_is_not_reported(gold: str) -> None:
    assert gold_problem(gold) is None


HUGE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    r"(10^{10})!",
    "((((9!)!)!)!)",
    r"\binom{1000000000}{500000000}",
    r"x^{10^{10}}",
    r"\sum_{k=1}^{10^9} \frac{1}{k}",
    r"0.5^{10^{10^{10}}}",
    "1e999999999",
    r"e^{10^{12}}",
    r"\operatorname{eye}{100000}",
    "9" * 5000,
    "(" * 400 + "1" + ")" * 400,
    r"\frac{1}{" * 19 + "2" + "}" * 19,
    "x" + "+x" * 240,
]


@pytest.mark.parametrize("expression", HUGE, ids=[text[:20] for text in HUGE])
def test_expressions_made_to_take_forever_are_wrong_within_seconds(expression: str) -> None:
    MathReward().setup()
    begun = time.monotonic()
    assert not grade(rf"\boxed{{{expression}}}", "5")
    assert time.monotonic() - begun < 5.0  # one limit of 2 s for the comparison, and a loaded machine


def test_text_of_the_model_is_never_compiled_or_run(tmp_path: Path) -> None:
    """An audit hook sees every `compile` of the interpreter, which `eval`, `exec` and `parse_expr` all go through."""
    script = textwrap.dedent(
        r"""
        import sys
        from pathlib import Path
        from forge.reward.math import MathReward, grade

        marker = Path(sys.argv[1])
        MathReward().setup()
        compiled = []
        sys.addaudithook(lambda event, args: compiled.append(args) if event == "compile" else None)
        calls = [
            f"open('{marker}','w')", f"__import__('os').system('touch {marker}')",
            f"exec(\"open('{marker}','w')\")", f"Path('{marker}').touch()",
            "().__class__.__bases__[0]", "S(1)", "exit()",
        ]
        shapes = [
            "\\boxed{%s}", "\\boxed{\\pi + %s}", "\\boxed{%s + \\pi}", "#### %s", "The answer is %s", "$\\frac{%s}{2}$",
            "\\boxed{\\operatorname{%s}(1)}", "\\boxed{\\text{%s}}", "\\boxed{x_{%s}}", "<answer>%s</answer>",
        ]
        for shape in shapes:
            for call in calls:
                assert not any(grade(shape % call, gold) for gold in (r"\frac{3}{8}", "\\pi", "x")), shape % call
        assert not grade(r"\boxed{\frac{3}{7}}", r"\frac{3}{8}")
        assert grade(r"\boxed{\frac{3}{8}}", r"\frac{3}{8}")
        assert not marker.exists()
        # sympy builds its own helpers for polynomials from source and, seen once, a namespace that it then did not use;
        # both are fixed texts. Nothing else may be compiled while grading.
        sources = [bytes(source) for source, filename in compiled if filename == "<string>"]
        own = [s for s in sources if s.startswith(b"def monomial_") or s == b"from sympy import *"]
        strange = [s for s in sources if s not in own]
        assert not strange, strange
        """
    )
    marker = tmp_path / "marker"
    ran = subprocess.run(
        [sys.executable, "-c", script, str(marker)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert os.listdir(tmp_path) == []
