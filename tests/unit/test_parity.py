"""The proof of an export: what passes, what is written, and under which name."""

import asyncio
import json
import math
from pathlib import Path

import pytest

from forge.errors import ModelFolderError, PartFailed
from forge.model_folder import check_digests
from forge.parity import MAX_GAP, gap, other_kernels_bound, parity_record, read_parity, unproven, write_parity


def record(exported: float, *, unquantized: float = -1.0, bound: float = MAX_GAP) -> dict[str, object]:
    return parity_record(
        sequences=[(1, 2, 3)],
        exported=[[-1.0, exported]],
        served=[[-1.0, -2.0]],
        unquantized=[[-1.0, unquantized]],
        bound=bound,
        facts={},
    )


def test_the_gap_is_the_mean_and_largest_difference_and_infinite_without_numbers() -> None:
    assert gap([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]]) == {"mean": 0.5, "max": 1.0}
    assert gap([[math.nan]], [[-1.0]]) == {"mean": math.inf, "max": math.inf}


@pytest.mark.parametrize(("exported", "ok"), [(-2.0, True), (-2.03, True), (-2.05, False), (math.nan, False)])
def test_only_a_finite_gap_within_the_bound_is_a_proof(exported: float, ok: bool, tmp_path: Path) -> None:
    found = record(exported)
    assert found["ok"] is ok
    if ok:
        write_parity(tmp_path, found)
        assert read_parity(tmp_path)["tokens"] == 2
        assert check_digests(tmp_path) == 1
        return
    with pytest.raises(PartFailed, match="is not what was served"):
        write_parity(tmp_path, found)
    json.loads((tmp_path / "parity.json").read_text(), parse_constant=pytest.fail)


def test_a_bound_that_is_infinite_proves_nothing() -> None:
    bound = other_kernels_bound([[-1.0]], [[math.inf]])
    assert bound == math.inf
    assert record(math.nan, bound=bound)["ok"] is False


@pytest.mark.parametrize(
    "damage",
    [
        '{"pinned": [], "tokens": 1}',
        '{"pinned": [{"token_ids": [1, 2], "logprobs": [-1.0]}]}',
        '{"pinned": [{"token_ids": [1, 2], "logprobs": ["x"]}], "tokens": 1}',
        '{"pinned": [{"token_ids": [1, "x"], "logprobs": [-1.0]}], "tokens": 1}',
        '{"pinned": [{"token_ids": [1, -2], "logprobs": [-1.0]}], "tokens": 1}',
        '{"pinned": [{"token_ids": [1, 2], "logprobs": [-1.0, -1.0]}], "tokens": 1}',
        '{"pinned": [{"token_ids": [1, 2], "logprobs": [NaN]}], "tokens": 1}',
    ],
)
def test_a_damaged_record_is_refused(damage: str, tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text(damage)
    with pytest.raises(ModelFolderError, match=r"parity\.json is missing or damaged"):
        read_parity(tmp_path)


def failing(target: Path, error: BaseException) -> None:
    with unproven(target) as folder:
        folder.mkdir()
        raise error


def test_an_export_takes_its_name_when_it_is_proven(tmp_path: Path) -> None:
    target, place = tmp_path / "export", tmp_path / "export.unproven"
    for content in ("first", "second"):
        with unproven(target) as folder:
            folder.mkdir()
            (folder / "model").write_text(content)
            assert not target.exists() or (target / "model").read_text() == "first"
        assert (target / "model").read_text() == content
        assert not place.exists()
    with pytest.raises(PartFailed):
        failing(target, PartFailed("export", "over the bound"))
    assert place.is_dir(), "what failed can be looked at, under a name that says so"
    with pytest.raises(asyncio.CancelledError):
        failing(target, asyncio.CancelledError())
    assert not place.exists()
    assert (target / "model").read_text() == "second"
