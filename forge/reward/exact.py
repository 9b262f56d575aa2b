"""Rewards that compare text: the answer itself, or the shape of the whole completion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forge.reward.base import Reward
from forge.reward.extract import Kind, boxed_answer, extract_answer, find_boxes, strip_special_tokens, visible_text

if TYPE_CHECKING:
    from forge.types import Episode


class ExactMatch(Reward):
    r"""1.0 when the completion's answer is the gold answer as text, else 0.0.

    The answer is what `forge.reward.extract` finds: an answer block, a box, a `####` line, what follows "the answer
    is", else the whole text after thinking. Any white space counts as one space and a final full stop is ignored;
    case counts. A gold answer in a box or behind `####` is taken out of it first.
    """

    @property
    def name(self) -> str:
        return "exact"

    def __call__(self, episode: Episode) -> float:
        gold = visible_text(episode.answer)
        if find_boxes(gold):
            gold = boxed_answer(gold) or ""
        elif "####" in gold:
            gold = gold.rsplit("####", 1)[1]
        found = extract_answer(episode.text, Kind.TEXT)
        return float(found is not None and bool(gold.strip()) and _plain(found) == _plain(gold))


class FormatReward(Reward):
    r"""1.0 when the completion has the agreed shape, else 0.0. What the answer says does not matter.

    The shape: at most one thinking block, at the start and closed (its opening tag may have stood in the prompt);
    then exactly one answer, which is either one non-empty `<answer>…</answer>` with nothing behind it, or, without
    answer tags, one non-empty `\boxed{…}`. Tags may span lines. End-of-turn tokens decoded as text are ignored.

    Args:
        require_think: a thinking block must be there.
    """

    def __init__(self, require_think: bool = False) -> None:
        self.require_think = require_think

    @property
    def name(self) -> str:
        return "format"

    def __call__(self, episode: Episode) -> float:
        text = strip_special_tokens(episode.text).strip()
        thought = re.fullmatch(r"(?:<think>)?((?:(?!</?think>).)*)</think>(.*)", text, re.DOTALL)
        if thought:
            text = thought[2].strip()
        elif self.require_think:
            return 0.0
        if re.search(r"</?think>", text):
            return 0.0
        if re.search(r"</?answer>", text):
            block = re.fullmatch(r"((?:(?!</?answer>).)*)<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)
            return float(block is not None and bool(block[2].strip()))
        return float(len(find_boxes(text)) == 1 and boxed_answer(text) is not None)


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").strip()
