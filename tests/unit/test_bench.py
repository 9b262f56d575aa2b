"""Claims: medians, ratios, and the order of runs."""

import json
from pathlib import Path

import pytest

from forge.bench import alternate, claim, table, write_claims


async def test_sides_take_turns_at_going_first_after_a_warm_up() -> None:
    order: list[str] = []

    async def ours() -> float:
        order.append("a")
        return 1.0

    async def peer() -> float:
        order.append("b")
        return 2.0

    a, b = await alternate(ours, peer, runs=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert (a, b) == ([1.0] * 3, [2.0] * 3)


def test_a_claim_is_the_ratio_of_medians(tmp_path: Path) -> None:
    c = claim("ours over vllm", [9.0, 10.0, 100.0], [20.0, 5.0, 30.0], "tokens/s")
    assert (c.ours, c.peer, c.ratio, c.runs) == (10.0, 20.0, 0.5, 3)
    write_claims([c], tmp_path / "bench" / "x.json")
    (row,) = json.loads((tmp_path / "bench" / "x.json").read_text())
    assert row["ratio"] == pytest.approx(0.5)
    assert set(row) == {"claim", "ours", "peer", "unit", "ratio", "runs"}
    assert "ours over vllm" in table([c])
