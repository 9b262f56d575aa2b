"""Reading and checking rows: every kind of fault is named with its file and line."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge.config import DataConfig
from forge.errors import DataError
from forge.rows import load_rows


def write(folder, *lines, name="rows.jsonl"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def row(question="1 + 1?", answer="2", **others):
    return json.dumps({"question": question, "answer": answer, **others})


def load(path, **config):
    required = config.pop("answer_required", True)
    return load_rows(DataConfig(path=str(path), **config), seed=0, answer_required=required)


def problems(path, **config):
    with pytest.raises(DataError) as caught:
        load(path, **config)
    return caught.value.problems


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


# rows of a file --------------------------------------------------------------------------------------------------


def test_every_bad_row_is_listed_with_its_file_line_and_reason(tmp_path):
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + row().encode(),  # a byte-order mark is accepted
        '{"question": "no key"}',
        '{"question": "null", "answer": null}',
        '{"question": "seven", "answer": 7}',
        '{"question": "  ", "answer": "1"}',
        "",
        '{"question": "cut", "ans',
        '["a", "list"]',
        '{"question": ["a"], "answer": "1"}',
        '{"question": "q", "answer": {"x": 1}}',
        '{"question": "q", "answer": NaN}',
        '{"question": "q", "answer": 1e999}',
        '{"question": "q", "answer": 1, "answer": 2}',
        b'{"question": "\xff", "answer": 1}',
        '{"question": "\\ud800", "answer": 1}',
    )
    assert problems(path) == (
        "rows.jsonl:2: no answer, only question",
        "rows.jsonl:3: answer is null",
        "rows.jsonl:5: question is empty",
        "rows.jsonl:7: broken JSON at column 21: Unterminated string starting at",
        "rows.jsonl:8: must be a JSON object, found a list",
        "rows.jsonl:9: question must be text, found a list",
        "rows.jsonl:10: answer must be text or a number, found an object",
        "rows.jsonl:11: broken JSON: NaN is not a finite number",
        "rows.jsonl:12: broken JSON: 1e999 is not a finite number",
        "rows.jsonl:13: broken JSON: key 'answer' stands twice",
        "rows.jsonl:14: not UTF-8 at byte 15",
        "rows.jsonl:15: question holds half a surrogate pair at character 1",
        f"{path}: 12 of 14 rows cannot be used; correct them, or set data.skip_bad_rows=true to leave them out",
    )


def test_skip_bad_rows_keeps_the_good_ones_and_counts_the_others(tmp_path, caplog):
    rows = load(write(tmp_path, row(), '{"question": "x"}', row("2 + 2?", "4")), skip_bad_rows=True)
    assert [(r.id, r.answer) for r in rows.rows] == [("rows.jsonl:1", "2"), ("rows.jsonl:3", "4")]
    assert [(s.id, s.reason) for s in rows.skipped] == [("rows.jsonl:2", "no answer, only question")]
    assert "1 of 3 rows left out: rows.jsonl:2: no answer, only question" in caplog.text


def test_only_the_first_20_of_many_bad_rows_are_listed(tmp_path):
    lines = problems(write(tmp_path, row(), *["{"] * 25))
    assert len(lines) == 21
    assert lines[19].startswith("rows.jsonl:21: ")
    assert "25 of 26 rows cannot be used, the first 20 are listed" in lines[20]


def test_a_file_of_bad_rows_alone_is_refused_even_when_they_may_be_skipped(tmp_path):
    (line,) = problems(write(tmp_path, "{", "{"), skip_bad_rows=True)
    assert "none of its 2 rows can be used; the first: rows.jsonl:1: broken JSON" in line


@pytest.mark.parametrize(
    ("value", "text"),
    [("7", "7"), ("7.0", "7"), ("-0.5", "-0.5"), ("true", "true"), ('" 7 "', " 7 "), ("1e22", str(10**22))],
)
def test_numbers_and_truth_values_become_text(tmp_path, value, text):
    path = write(tmp_path, '{"question": "q", "answer": ' + value + "}")
    assert load(path).rows[0].answer == text


def test_an_answer_with_more_digits_than_python_reads_is_a_bad_row_not_a_crash(tmp_path):
    (line, _) = problems(write(tmp_path, '{"question": "q", "answer": ' + "9" * 5000 + "}"))
    assert line.startswith("rows.jsonl:1: broken JSON: Exceeds the limit")


def test_deeply_nested_json_is_a_bad_row_not_a_crash(tmp_path):
    (line, _) = problems(write(tmp_path, "[" * 200_000))
    assert line == "rows.jsonl:1: broken JSON: nested too deeply"


def test_a_line_separator_inside_a_text_does_not_end_the_row(tmp_path):
    (only,) = load(write(tmp_path, '{"question": "a\u2028b", "answer": "1"}')).rows
    assert only.question == "a\u2028b"


def test_windows_line_ends_are_no_part_of_a_row(tmp_path):
    assert len(load(write(tmp_path, row() + "\r", "\r", row() + "\r")).rows) == 2


def test_other_columns_are_kept_as_fields(tmp_path):
    path = write(tmp_path, '{"prompt": "q", "gold": 3, "level": 2, "tags": ["a"]}')
    (only,) = load(path, question="prompt", answer="gold").rows
    assert (only.question, only.answer, only.fields) == ("q", "3", {"level": 2, "tags": ["a"]})


def test_a_reward_that_needs_no_answer_takes_rows_without_one(tmp_path):
    path = write(
        tmp_path, '{"question": "a"}', '{"question": "b", "answer": null}', '{"question": "c", "answer": ["t1", "t2"]}'
    )
    rows = load(path, answer_required=False).rows
    assert [r.answer for r in rows] == ["", "", ""]
    assert rows[2].fields == {"answer": ["t1", "t2"]}  # not text: left to the reward
    assert len(problems(path)) == 4


# the source as a whole -------------------------------------------------------------------------------------------


def test_an_unknown_column_is_one_line_that_names_the_columns_there_are(tmp_path):
    path = write(tmp_path, row(), row())
    assert problems(path, question="prompt") == (
        f"{path}: no row has a column 'prompt': set data.question to one of question, answer",
    )
    assert problems(path, answer="gold", answer_required=False) == (
        f"{path}: no row has a column 'gold': set data.answer to one of question, answer",
    )


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    assert problems(path) == (f"{path} holds no rows",)


def test_a_missing_file_is_refused(tmp_path):
    (line,) = problems(tmp_path / "none.jsonl")
    assert "none.jsonl does not exist: give a .jsonl or .ndjson or .parquet file" in line


def test_an_unknown_extension_is_refused_with_those_that_are_read(tmp_path):
    (line,) = problems(write(tmp_path, "a,b", name="rows.csv"))
    assert line.endswith("rows.csv: cannot read .csv, give .jsonl, .ndjson, .parquet")


def test_utf16_is_refused_in_one_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row().encode("utf-16"))
    assert problems(path) == (f"{path} is UTF-16: save it as UTF-8",)


# Parquet and folders ---------------------------------------------------------------------------------------------


def test_parquet_rows_are_numbered_from_one_and_nulls_are_bad(tmp_path):
    path = table(tmp_path / "sums.parquet", question=["a", "b", None], answer=[1, None, 3], level=[1, 2, 3])
    assert problems(path)[:2] == ("sums.parquet:2: answer is null", "sums.parquet:3: question is null")
    (only,) = load(path, skip_bad_rows=True).rows
    assert (only.id, only.answer, only.fields) == ("sums.parquet:1", "1", {"level": 1})


def test_a_nan_answer_in_parquet_is_a_bad_row(tmp_path):
    path = table(tmp_path / "x.parquet", question=["a", "b"], answer=[1.5, float("nan")])
    assert problems(path)[0] == "x.parquet:2: answer must be a finite number, found nan"


def test_broken_parquet_is_one_line(tmp_path):
    (line,) = problems(write(tmp_path, "not parquet", name="x.parquet"))
    assert line.startswith(f"cannot read {tmp_path / 'x.parquet'}: Parquet magic bytes not found")


def test_a_saved_dataset_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    part = {name: datasets.Dataset.from_dict({"question": [name], "answer": ["1"]}) for name in ("train", "test")}
    datasets.DatasetDict(part).save_to_disk(str(tmp_path / "both"))
    part["test"].save_to_disk(str(tmp_path / "one"))
    assert load(tmp_path / "both").rows[0].question == "train"
    assert load(tmp_path / "both", split="test").rows[0].id == "data-00000-of-00001.arrow:1"
    assert load(tmp_path / "one").rows[0].question == "test"
    (line,) = problems(tmp_path / "both", split="dev")
    assert line.endswith("has no split 'dev': set data.split to one of train, test")


def test_a_saved_dataset_that_lost_a_file_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"question": ["q"], "answer": ["1"]}).save_to_disk(str(tmp_path / "d"))
    (tmp_path / "d" / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow missing: copy the whole folder" in problems(tmp_path / "d")[0]


def test_the_shards_of_one_split_are_read_in_order_and_no_others(tmp_path):
    for split in ("train", "train_other", "test"):
        for i in range(2):
            table(tmp_path / f"data/{split}-0000{i}-of-00002.parquet", question=[f"{split}{i}"], answer=["1"])
    assert [r.question for r in load(tmp_path).rows] == ["train0", "train1"]
    (tmp_path / "data/train-00001-of-00002.parquet").unlink()
    assert "holds 1 of the 2 files of split 'train': copy the others" in problems(tmp_path)[0]


def test_files_without_a_split_in_their_names_are_all_read_as_train(tmp_path):
    write(tmp_path, row("a"), name="a.jsonl")
    write(tmp_path, row("b"), name="b.jsonl")
    assert [r.id for r in load(tmp_path).rows] == ["a.jsonl:1", "b.jsonl:1"]
    assert "has no split 'test': leave data.split at train to read it all" in problems(tmp_path, split="test")[0]


def test_two_datasets_in_one_folder_are_not_merged(tmp_path):
    write(tmp_path, row("a"), name="main/train.jsonl")
    write(tmp_path, row("b"), name="socratic/train.jsonl")
    (line,) = problems(tmp_path)
    assert f"keeps several datasets: give data.path one of {tmp_path / 'main'}, {tmp_path / 'socratic'}" in line


def test_one_split_in_two_formats_is_not_read_twice(tmp_path):
    write(tmp_path, row(), name="train.jsonl")
    table(tmp_path / "train.parquet", question=["a"], answer=["1"])
    assert "holds .jsonl and .parquet for split 'train': keep one kind" in problems(tmp_path)[0]


def test_a_script_in_a_dataset_folder_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    assert "(scripts in it are never run)" in problems(tmp_path / "set")[0]
    write(tmp_path / "set", row())
    assert len(load(tmp_path / "set").rows) == 1
    assert not marker.exists()


# reasoning-gym tasks ---------------------------------------------------------------------------------------------


def task(name="chain_sum", **config):
    required = config.pop("answer_required", True)
    return load_rows(DataConfig(task=name, **config), seed=config.pop("seed", 3), answer_required=required)


def test_a_task_gives_rows_whose_fields_are_its_whole_entry():
    rows = task(rows=5).rows
    assert [r.id for r in rows] == [f"chain_sum:{i}" for i in range(5)]
    assert rows[0].fields["question"] == rows[0].question
    assert rows[0].fields["metadata"]["source_dataset"] == "chain_sum"
    assert eval(rows[0].fields["metadata"]["expression"]) == int(rows[0].answer)


def test_a_task_depends_on_the_seed_and_on_nothing_else():
    config = DataConfig(task="chain_sum", rows=20)
    assert load_rows(config, seed=1) == load_rows(config, seed=1)
    assert load_rows(config, seed=1) != load_rows(config, seed=2)


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(DataError, match=r"data.task=chain_sums: .* no such task; did you mean chain_sum\?"):
        task("chain_sums")


def test_an_unknown_task_setting_is_refused_with_the_legal_ones():
    with pytest.raises(DataError, match="chain_sum has no min_term; its settings are min_terms, max_terms"):
        task(task_args={"min_term": 2})
    with pytest.raises(DataError, match=r"has no size; .* data.rows are set outside it"):
        task(task_args={"size": 2})


@pytest.mark.parametrize("args", [{"min_terms": 9, "max_terms": 2}, {"min_terms": "two"}])
def test_a_task_setting_that_does_not_fit_is_one_line(args):
    with pytest.raises(DataError, match=r"^data.task_args=\{.*\} does not suit chain_sum: [^\n]+$"):
        task(task_args=args)


def test_a_task_without_reference_answers_needs_a_reward_that_wants_none():
    with pytest.raises(DataError, match="propositional_logic:0: answer is null"):
        task("propositional_logic", rows=2)
    assert task("propositional_logic", rows=2, answer_required=False).rows[0].answer == ""


@pytest.mark.parametrize(
    ("entry", "score", "reason"),
    [
        ({"question": "q", "answer": "['-92.8', '71.1']"}, 0.02, "only 0.02"),  # a key that was rounded
        ({"question": "q", "answer": "1"}, RuntimeError("bad move"), "its scorer fails .* RuntimeError: bad move"),
        ({"question": "q", "answer": None}, 1.0, "answer is null"),
        ({"question": "q", "answer": "1", "f": lambda: 0}, 1.0, "cannot be sent to another process"),
        ("text", 1.0, "must be an object, found text"),
        (ValueError("no luck"), 1.0, "cannot be generated: ValueError: no luck"),
    ],
)
def test_a_malformed_entry_is_a_bad_row(monkeypatch, entry, score, reason):
    class Broken:
        def __getitem__(self, index):
            if isinstance(entry, Exception):
                raise entry
            return entry

        def score_answer(self, answer, entry):
            if isinstance(score, Exception):
                raise score
            return score

    monkeypatch.setattr("forge.rows._task", lambda *args: Broken())
    with pytest.raises(DataError, match=f"chain_sum:0: .*{reason}"):
        task(rows=1)


def test_importing_the_data_modules_loads_no_vendor():
    code = "import sys, forge.data, forge.fetch; print([m for m in %r if m in sys.modules])"
    heavy = ["torch", "transformers", "pyarrow", "datasets", "reasoning_gym", "tokenizers", "numpy", "gguf"]
    out = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
