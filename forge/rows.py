"""Rows of a dataset, read and checked before anything else is loaded.

    data.path  JSONL or Parquet file, `save_to_disk` folder, folder of JSONL or Parquet files
    data.task  a reasoning-gym task
        |
    load_rows -> Rows: every row has a question and an answer as text; every other row has a reason

Nothing in a dataset folder is ever executed.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import DataError
from forge.files import check_regular, expand, read_json

if TYPE_CHECKING:
    from forge.config import DataConfig

SHOWN_ROWS = 20
"""Bad rows listed in full; more are only counted."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One usable row.

    Example: Row(id="sums.jsonl:17", question="41 + 27 =", answer="68", fields={"level": 2})
    """

    id: str
    """ "<file name>:<1-based line or row>", or "<task>:<0-based index>"."""
    question: str
    """As it stands in the dataset."""
    answer: str
    """As text; "" where none is required and none is given."""
    fields: Mapping[str, Any]
    """The row's other columns; for a task its whole entry, as the task's scorer takes it. Where no answer is
    required, an answer that is neither text nor a number (a list of tests, say) stays here."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SkippedRow:
    """A row that is not used, and why.

    Example: SkippedRow(id="sums.jsonl:18", reason="answer is null")
    """

    id: str
    """As `Row.id`."""
    reason: str
    """What is wrong with it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rows:
    """What `load_rows` found."""

    source: str
    """Path or task, for messages."""
    rows: tuple[Row, ...]
    """Usable rows, in the order of the source."""
    skipped: tuple[SkippedRow, ...] = ()
    """Bad rows, when `data.skip_bad_rows` lets them pass."""


class _BadRow(ValueError):
    """Why one row cannot be used."""


_Raw = tuple[str, Mapping[str, Any] | str]  # id, and the row's columns or what is wrong with it


def load_rows(config: DataConfig, *, seed: int, answer_required: bool = True) -> Rows:
    """Read and check every row of the dataset.

    An answer may be text, a number (7 becomes "7", 7.0 as well) or true/false ("true").

    Args:
        config: the data section.
        seed: what a task's entries are generated from.
        answer_required: False when the reward needs no reference answer; a missing one is then "".

    Raises:
        DataError: a source that cannot be read, has no such column or holds no usable row; or, unless
            `skip_bad_rows`, the bad rows: file, line and reason of the first 20, and how many there are.
    """
    if config.task is not None:
        source, columns, raw = config.task, ("question", "answer"), _task_entries(config, seed)
    elif config.path is not None:
        source, columns, raw = config.path, (config.question, config.answer), _file_rows(config)
    else:
        raise DataError("data needs data.path or data.task: set one")
    whole_entry = config.task is not None
    rows: list[Row] = []
    bad: list[SkippedRow] = []
    seen: dict[str, None] = {}
    for row_id, found in raw:
        try:
            if isinstance(found, str):
                raise _BadRow(found)
            seen.update(dict.fromkeys(found))
            rows.append(_checked(row_id, found, columns, answer_required, whole_entry))
        except _BadRow as error:
            bad.append(SkippedRow(id=row_id, reason=str(error)))
    _check_columns(config, source, columns, list(seen), answer_required)
    if not rows and not bad:
        raise DataError(f"{source} holds no rows")
    if bad and not config.skip_bad_rows:
        lines = [f"{b.id}: {b.reason}" for b in bad[:SHOWN_ROWS]]
        more = f", the first {SHOWN_ROWS} are listed" if len(bad) > SHOWN_ROWS else ""
        total = f"{source}: {len(bad)} of {len(bad) + len(rows)} rows cannot be used{more}"
        raise DataError([*lines, f"{total}; correct them, or set data.skip_bad_rows=true to leave them out"])
    if not rows:
        raise DataError(f"{source}: none of its {len(bad)} rows can be used; the first: {bad[0].id}: {bad[0].reason}")
    if bad:
        log.warning("%s: %d of %d rows left out: %s", source, len(bad), len(bad) + len(rows), listing(bad))
    return Rows(source=source, rows=tuple(rows), skipped=tuple(bad))


def listing(skipped: list[SkippedRow]) -> str:
    """Ids and reasons of skipped rows, for a log line."""
    more = f"; and {len(skipped) - SHOWN_ROWS} more" if len(skipped) > SHOWN_ROWS else ""
    return "; ".join(f"{s.id}: {s.reason}" for s in skipped[:SHOWN_ROWS]) + more


# one row ---------------------------------------------------------------------------------------------------------


def _checked(
    row_id: str, found: Mapping[str, Any], columns: tuple[str, str], answer_required: bool, whole_entry: bool
) -> Row:
    question_column, answer_column = columns
    question = _present(found, question_column)
    if not isinstance(question, str):
        raise _BadRow(f"{question_column} must be text, found {_kind(question)}")
    _check_text(question, question_column)
    answer, used = "", {question_column}
    value = found.get(answer_column)
    if answer_required or isinstance(value, int | float | Decimal) or (isinstance(value, str) and _given(value)):
        answer = _answer_text(_present(found, answer_column), answer_column)
        used.add(answer_column)
    others = dict(found) if whole_entry else {k: v for k, v in found.items() if k not in used}
    return Row(id=row_id, question=question, answer=answer, fields=others)


def _present(found: Mapping[str, Any], column: str) -> Any:
    if column not in found:
        raise _BadRow(f"no {column}, only {', '.join(found) or 'nothing'}")
    if found[column] is None:
        raise _BadRow(f"{column} is null")
    if not _given(found[column]):
        raise _BadRow(f"{column} is empty")
    return found[column]


def _given(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _answer_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        _check_text(value, column)
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _BadRow(f"{column} must be a finite number, found {value}")
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int | Decimal):
        try:
            return str(value)
        except ValueError as error:  # Python's limit on the digits of an int
            raise _BadRow(f"{column} has too many digits") from error
    raise _BadRow(f"{column} must be text or a number, found {_kind(value)}")


def _check_text(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadRow(f"{column} holds half a surrogate pair at character {error.start + 1}") from error


def _kind(value: Any) -> str:
    names = {"str": "text", "int": "a number", "float": "a number", "bool": "true/false", "dict": "an object"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _check_columns(
    config: DataConfig, source: str, columns: tuple[str, str], seen: list[str], answer_required: bool
) -> None:
    """One line instead of one for each row when a column exists nowhere."""
    if not seen or config.task is not None:
        return
    # An absent answer is fine where none is required, but a column the user named must exist.
    needed = columns if answer_required or columns[1] != "answer" else columns[:1]
    problems = [
        f"{source}: no row has a column {column!r}: set data.{key} to one of {', '.join(seen)}"
        for key, column in zip(("question", "answer"), needed, strict=False)
        if column not in seen
    ]
    if problems:
        raise DataError(problems)


# files -----------------------------------------------------------------------------------------------------------

_READERS = (".jsonl", ".ndjson", ".parquet")
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})")


def _file_rows(config: DataConfig) -> Iterator[_Raw]:
    path = expand(str(config.path))
    try:
        files = _folder_files(path, config.split) if path.is_dir() else [path]
        for file in files:
            kind = file.suffix.lower()
            if not file.exists():
                raise DataError(f"{file} does not exist: give a {' or '.join(_READERS)} file or a dataset folder")
            check_regular(file)
            if kind == ".parquet":
                yield from _parquet(file)
            elif kind == ".arrow":
                yield from _arrow(file)
            elif kind in _READERS:
                yield from _jsonl(file)
            else:
                raise DataError(f"{file}: cannot read {kind or 'a file without extension'}, give {', '.join(_READERS)}")
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def _jsonl(path: Path) -> Iterator[_Raw]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{path} is UTF-16: save it as UTF-8")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line := line.strip():
                yield f"{path.name}:{number}", _json_object(line)


def _json_object(line: bytes) -> Mapping[str, Any] | str:
    try:
        text = line.decode()
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"broken JSON at column {error.colno}: {error.msg}"
    except RecursionError:
        return "broken JSON: nested too deeply"
    except ValueError as error:
        return f"broken JSON: {error}"
    return value if isinstance(value, dict) else f"must be a JSON object, found {_kind(value)}"


def _finite(text: str) -> float:
    """Also refuses NaN and Infinity, which are not JSON, and 1e999, which is but becomes infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return content


def _parquet(path: Path) -> Iterator[_Raw]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from _batches(path, pq.ParquetFile(path).iter_batches(batch_size=1024))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {_one_line(error)}") from error


def _arrow(path: Path) -> Iterator[_Raw]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            yield from _batches(path, pa.ipc.open_stream(source))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {_one_line(error)}") from error


def _batches(path: Path, batches: Any) -> Iterator[_Raw]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path.name}:{number}", row


def _folder_files(path: Path, split: str) -> list[Path]:
    """The files of one split of a dataset folder, in order."""
    if (path / "dataset_dict.json").exists():
        splits = _json_file(path / "dataset_dict.json").get("splits")
        splits = splits if isinstance(splits, list) else []
        if split not in splits:
            raise DataError(f"{path} has no split {split!r}: set data.split to one of {', '.join(map(str, splits))}")
        path = path / split
    if (path / "state.json").exists():
        listed = _json_file(path / "state.json").get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(e, dict) and "filename" in e for e in listed):
            raise DataError(f"{path / 'state.json'} does not list its _data_files by filename: copy the whole folder")
        files = [path / Path(str(entry["filename"])).name for entry in listed]
    else:
        files = _loose_files(path, split)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise DataError(f"{path}: {', '.join(missing)} missing: copy the whole folder")
    return files


def _loose_files(path: Path, split: str) -> list[Path]:
    by_split: dict[str | None, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path)
        if file.suffix.lower() in _READERS and not any(part.startswith(".") for part in inner.parts):
            by_split.setdefault(_split_of(inner), []).append(file)
    if not by_split:
        raise DataError(f"{path} holds no {' or '.join(_READERS)} file (scripts in it are never run)")
    named = sorted(name for name in by_split if name is not None)
    if split not in by_split and (named or split != "train"):
        advice = f"set data.split to one of {', '.join(named)}" if named else "leave data.split at train to read it all"
        raise DataError(f"{path} has no split {split!r}: {advice}")
    files = by_split.get(split) or by_split[None]
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise DataError(f"{path} keeps several datasets: give data.path one of {', '.join(folders)}")
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) > 1:
        raise DataError(f"{path} holds {' and '.join(kinds)} for split {split!r}: keep one kind")
    for file in files:
        shard = _SHARD.fullmatch(file.stem)
        if shard and int(shard["total"]) != len(files):
            total = int(shard["total"])
            raise DataError(f"{path} holds {len(files)} of the {total} files of split {split!r}: copy the others")
    return files


def _split_of(inner: Path) -> str | None:
    """ "data/train-00000-of-00002.parquet" -> "train"; "test.jsonl" -> "test"; "sums.jsonl" -> None."""
    shard = _SHARD.fullmatch(inner.stem)
    if shard:
        return shard["split"]
    words = re.split(r"[^a-z0-9]+", inner.with_suffix("").as_posix().lower())
    return next((word for word in reversed(words) if word in _SPLITS), None)


def _json_file(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object, found {_kind(content)}")
    return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# reasoning-gym ---------------------------------------------------------------------------------------------------


def _task_entries(config: DataConfig, seed: int) -> Iterator[_Raw]:
    task = str(config.task)
    dataset = _task(task, config.task_args, config.rows, seed)
    for i in range(config.rows):
        yield f"{task}:{i}", _entry(dataset, i)


def _task(task: str, args: Mapping[str, Any], rows: int, seed: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library of its own, when it is compiled
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"data.task={task} needs reasoning-gym: pip install reasoning-gym") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"data.task={task}: reasoning-gym has no such task{hint}")
    settings = [f.name for f in fields(DATASETS[task][1]) if f.name not in ("seed", "size")]
    unknown = [key for key in args if key not in settings]
    if unknown:
        elsewhere = "; the seed and data.rows are set outside it" if {"seed", "size"} & set(unknown) else ""
        raise DataError(
            f"data.task_args: {task} has no {', '.join(unknown)}; its settings are {', '.join(settings)}{elsewhere}"
        )
    try:
        return reasoning_gym.create_dataset(task, size=rows, seed=seed, **args)
    except Exception as error:  # each task checks its settings in its own way
        raise DataError(f"data.task_args={dict(args)} does not suit {task}: {_one_line(error)}") from error


def _entry(dataset: Any, index: int) -> Mapping[str, Any] | str:
    """One entry, proven: its own scorer gives its own answer full marks."""
    try:
        entry = dataset[index]
    except Exception as error:  # a task may fail on single entries in any way
        return f"cannot be generated: {type(error).__name__}: {_one_line(error)}"
    if not isinstance(entry, dict):
        return f"must be an object, found {_kind(entry)}"
    answer = entry.get("answer")
    if _given(answer):
        try:
            score = dataset.score_answer(answer=answer, entry=entry)
        except Exception as error:
            return f"its scorer fails on its own answer: {type(error).__name__}: {_one_line(error)}"
        if not score >= 1:
            return f"its scorer gives its own answer {answer!r} only {score}"
    try:
        pickle.dumps(entry)
    except Exception as error:  # whatever the entry's objects raise
        return f"cannot be sent to another process: {_one_line(error)}"
    return entry
