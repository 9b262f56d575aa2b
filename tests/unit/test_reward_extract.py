"""Where the final answer of a completion is."""

from __future__ import annotations

import time

import pytest

from forge.reward.extract import Kind, boxed_answer, extract_answer, find_boxes, visible_text


def test_boxes_are_closed_by_counting_braces() -> None:
    (box,) = find_boxes(r"so \boxed{\frac{3}{\sqrt{8}}} units")
    assert box.content == r"\frac{3}{\sqrt{8}}"


def test_escaped_braces_do_not_close_a_box() -> None:
    assert boxed_answer(r"\boxed{\{2, 5\}}") == r"\{2, 5\}"


def test_unclosed_box_yields_no_partial_answer() -> None:
    assert extract_answer(r"The total is 12. \boxed{\frac{3}{8}") is None


def test_box_in_a_box_is_opened() -> None:
    assert boxed_answer(r"\boxed{\boxed{5}}") == "5"


def test_last_of_two_boxes_with_text_between_counts() -> None:
    assert boxed_answer(r"first \boxed{3}, which leads us to \boxed{4}") == "4"


def test_boxes_with_only_separators_between_are_one_list() -> None:
    assert boxed_answer(r"\boxed{3} and $\boxed{4}$") == "3, 4"


def test_text_before_the_end_of_thinking_is_ignored() -> None:
    assert visible_text("<think>a</think>b</think> c") == "c"
    assert visible_text("the template opened it</think>c") == "c"


def test_thinking_that_stays_open_hides_the_rest() -> None:
    assert visible_text("<think>one</think> two <think> three") == "two"
    assert extract_answer("<think> The answer is 5") is None


def test_end_of_turn_tokens_are_not_part_of_the_answer() -> None:
    assert extract_answer("The answer is 5<|im_end|>") == "5"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1,250", "1,250"),
        ("#### Step 2\nwe add 3 and 4 to get 7", "7"),
        ("The answer is 72 apples. I hope this answer is helpful.", "72"),
        ("**Final Answer:**\n\n$\\frac{1}{2}$", r"\frac{1}{2}"),
        ("## Final Answer\n18", "18"),
        ("The answer is $x=5$ because $2+3=5$.", "x=5"),
        ("We get 3 + 4 = 7", "7"),
        ("We add three and get 7. Done, more or less.", "7"),
        ("The gain is -5% overall.", "-5%"),
        ("It departs at 12:30 sharp.", "12:30"),
        ("Half of it, or \\frac{1}{2}, is left.", r"\frac{1}{2}"),
        ("It weighs 40km from here", "40"),
        ("Water is H2O and so on", None),
        ("<answer>72</answer>", "72"),
        (r"<answer>so \boxed{72}</answer>", "72"),
        ("<answer>7</answer><answer>8</answer>", None),
        ("<answer>7</answer><answer>7</answer>", "7"),
        ("<answer>7", None),
    ],
)
def test_answers_outside_boxes_are_found(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


HOSTILE = [
    "\\boxed{" * 20_000,
    "$" * 20_001,
    "answer is " * 20_000,
    "<answer>" * 20_000,
    "\\(" * 50_000,
    "1 " * 50_000,
    "1/" * 30_000,
    "1,111" * 20_000,
    "\\boxed{1}," * 5_000,
    "answer" + " " * 100_000 + "x",
    "\\boxed{5" + "\\text{a}/" * 20_000 + "x}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:10] for text in HOSTILE])
@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_long_hostile_texts_are_searched_in_linear_time(text: str, kind: Kind) -> None:
    begun = time.monotonic()
    extract_answer(text, kind)
    assert time.monotonic() - begun < 2.0  # about 0.05 s alone; a quadratic search takes 15 s and more
