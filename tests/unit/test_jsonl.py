import json
import os
from pathlib import Path

import pytest

from forge.jsonl import Lines, read_lines, strict, to_json, write_atomic


def test_lines_are_appended_whole_and_in_order(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "x.jsonl", warn=lambda _: None)
    lines.append(['{"a": 1}', '{"a": 2}'])
    lines.append(['{"a": 3}'])
    assert [row["a"] for row in read_lines(tmp_path / "x.jsonl")] == [1, 2, 3]


def test_half_a_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b": "' + "x" * 200_000)
    Lines(path, warn=lambda _: None).append(['{"a": 2}'])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_file_that_is_only_half_a_line_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a"')
    Lines(path, warn=lambda _: None).append(['{"a": 2}'])
    assert path.read_text() == '{"a": 2}\n'


def test_a_line_that_cannot_be_made_is_counted_and_the_ones_before_it_kept(tmp_path: Path) -> None:
    warnings: list[str] = []
    lines = Lines(tmp_path / "x.jsonl", warn=warnings.append)
    lines.append(to_json(value) for value in ({"a": 1}, {1.5: float("nan")}))
    assert [row["a"] for row in read_lines(tmp_path / "x.jsonl")] == [1]
    assert (lines.lost, lines.failed, len(warnings)) == (1, 1, 1)


def test_rows_that_are_no_objects_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('1\n\n[2]\n{"a": 3}\nnull\n{"a": \n')
    assert list(read_lines(tmp_path / "x.jsonl")) == [{"a": 3}]


def test_the_tail_of_a_large_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"a": {n:03d}0}}\n'.replace(": 00", ": 1") for n in range(9)))
    whole = [row["a"] for row in read_lines(tmp_path / "x.jsonl")]
    size = (tmp_path / "x.jsonl").stat().st_size
    assert list(row["a"] for row in read_lines(tmp_path / "x.jsonl", tail=size)) == whole
    assert list(row["a"] for row in read_lines(tmp_path / "x.jsonl", tail=size // 3)) == whole[-2:]


def test_strict_keeps_values_and_counts_what_is_not_finite() -> None:
    value = {"a": (1, 2.5, float("nan")), 3: {"b": float("-inf")}, "c": None, "d": True, "e": "NaN"}
    assert strict(value) == ({"a": [1, 2.5, None], "3": {"b": None}, "c": None, "d": True, "e": "NaN"}, 2)


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": float("nan")})


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_atomic(path, json.dumps({"a": 1}))
    assert path.read_text() == '{"a": 1}'
    assert os.listdir(tmp_path) == ["summary.json"]


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "sub").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_atomic(path, "new")
    assert os.listdir(tmp_path) == ["taken"]
