"""Greedy completions by drafts and checks are exactly those of decoding token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from forge.config import load_config
from forge.recalibration import Recalibration
from forge.testing import FakeCalibrator, FakeGreedy, FakeLearner, FakeScorer
from forge.types import Prompt

Policy = Callable[[tuple[int, ...]], int]


def policy(name: str, *, agree: float) -> Policy:
    """A function of the prefix that gives the common token with probability `agree`, else one of its own."""

    def token(prefix: tuple[int, ...]) -> int:
        def draw(of: str) -> int:
            return int.from_bytes(hashlib.blake2b(f"{of}{prefix}".encode(), digest_size=4).digest(), "little")

        common = draw("coin" + name) % 1000 < agree * 1000
        return draw("common" if common else name) % 12

    return token


def decode(prompt: tuple[int, ...], f: Policy, limit: int) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    while len(ids) < limit and (not ids or ids[-1] != 0):
        ids += (f(prompt + ids),)
    return ids


@pytest.mark.parametrize("agree", [0.0, 0.5, 0.9, 1.0])
async def test_drafts_lead_to_the_exact_greedy_completions(agree: float) -> None:
    config = load_config("grpo", ["model=tiny", "quant.scheme=int8_dynamic", "sampling.max_new_tokens=20"])
    pinned = [Prompt(id=str(i), question="", answer="", token_ids=(i, i + 1)) for i in range(9)]
    unquantized, quantized, drafter = (policy(n, agree=agree) for n in ("a", "b", "c"))
    calibrator = FakeCalibrator(unquantized=unquantized, quantized=quantized)
    recalibration = Recalibration(
        config,
        calibrator=calibrator,  # type: ignore[arg-type]
        rollouts=FakeGreedy(drafter),
        scorer=FakeScorer(),
        quantizer=FakeLearner(),  # type: ignore[arg-type]
        pinned=pinned,
        end_tokens=[0],
        record=lambda row: None,
    )
    drafts = [decode(p.token_ids, drafter, 20) for p in pinned]
    for scales, truth in ((None, unquantized), ({}, quantized)):
        found = await recalibration.greedy(drafts, scales)
        assert found == [decode(p.token_ids, truth, 20) for p in pinned]
    if agree == 1.0:
        assert calibrator.verified == 2, "a draft that agrees needs one pass"


def test_the_first_and_the_last_version_are_not_calibrated_again() -> None:
    config = load_config("grpo", ["model=tiny", "quant.scheme=int8_static", "calibration.every=5", "steps=20"])
    recalibration = Recalibration(
        config,
        calibrator=FakeCalibrator(unquantized=lambda p: 0, quantized=lambda p: 0),  # type: ignore[arg-type]
        rollouts=FakeGreedy(lambda p: 0),
        scorer=FakeScorer(),
        quantizer=FakeLearner(),  # type: ignore[arg-type]
        pinned=[],
        end_tokens=[],
        record=lambda row: None,
    )
    assert [v for v in range(21) if recalibration.due(v)] == [5, 10, 15]
