import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forge.jsonl as jsonl
from forge.errors import ConfigError, ForgeError
from forge.runfolder import RunFolder
from forge.types import Completion, Episode, FinishReason, Group, Prompt


def strict_rows(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def a_group(index: int = 0, *, version: int = 3, dropped: str | None = None) -> Group:
    prompt = Prompt(id=f"sums.jsonl:{index + 1}", question="2 + 2 =", answer="4", token_ids=(9, 8, 7))
    answers = (" 4", " five")
    return Group(
        index=index,
        dropped=dropped,
        episodes=tuple(
            Episode(
                prompt=prompt,
                completion=Completion(
                    token_ids=(11 + member, 2),
                    logprobs=(-0.25, -0.5),
                    versions=(version - 1, version),
                    text=text,
                    finish_reason=FinishReason.STOP,
                    replica=1,
                ),
                group=index,
                member=member,
                reward=1.0 - member,
                rewards={"exact": 1.0 - member},
                advantage=0.7 - 1.4 * member,
            )
            for member, text in enumerate(answers)
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "grpo", "x")


def full_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> Callable[[], None]:
    """The disk takes `room` more bytes of appended lines, then is full; the returned call frees it."""
    real = os.write
    left = [room]

    def write(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    return lambda: monkeypatch.setattr(os, "write", real)


def test_a_named_run_is_kept_under_its_app_and_name(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "runs", "grpo", "demo")
    assert folder.path == tmp_path / "deep" / "runs" / "grpo" / "demo"
    assert folder.logs.is_dir()
    assert folder.checkpoints.is_dir()
    assert not folder.export.exists()


def test_runs_started_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths = {RunFolder.create(tmp_path, "grpo", None).path for _ in range(5)}
    assert len(paths) == 5


def test_a_taken_name_is_refused_and_the_ways_out_are_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "grpo", "x").close()
    with pytest.raises(ConfigError, match=r"name=x is taken: .*logs.*resume=auto, choose another name"):
        RunFolder.create(tmp_path, "grpo", "x")


def test_an_empty_folder_of_that_name_is_used(tmp_path: Path) -> None:
    (tmp_path / "grpo" / "x").mkdir(parents=True)
    assert RunFolder.create(tmp_path, "grpo", "x").path == tmp_path / "grpo" / "x"


def test_resume_continues_the_named_folder(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "grpo", "x")
    first.append_metrics({"step": 1})
    first.close()
    second = RunFolder.create(tmp_path, "grpo", "x", resume=True)
    second.append_metrics({"step": 2})
    assert [row["step"] for row in strict_rows(second.metrics)] == [1, 2]


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forge.runfolder import RunFolder\n"
        f"f = RunFolder.create(Path({str(tmp_path)!r}), 'grpo', 'x')\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"in use by another run \(process {other.pid}\)"):
            RunFolder.create(tmp_path, "grpo", "x", resume=True)
        other.kill()  # even then the lock goes with it
    assert RunFolder.create(tmp_path, "grpo", "x", resume=True).path.is_dir()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "a\nb", "../../x"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name must be one folder name"):
        RunFolder.create(tmp_path, "grpo", name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\); choose a place with out="):
        RunFolder.create(tmp_path / "file", "grpo", None)


def test_every_metrics_line_is_strict_json_and_counts_what_became_null(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1, "loss/policy": float("nan"), "deep": {"x": [float("inf"), 1.5]}})
    folder.append_metrics({"step": 2, "loss/policy": 0.5})
    assert strict_rows(folder.metrics) == [
        {"step": 1, "loss/policy": None, "deep": {"x": [None, 1.5]}, "metrics/not_finite": 2},
        {"step": 2, "loss/policy": 0.5},
    ]
    assert folder.statistics()["records/not_finite"] == 2.0


def test_a_metrics_row_may_hold_values_json_has_no_type_for(folder: RunFolder) -> None:
    numpy = pytest.importorskip("numpy")
    folder.append_metrics({"step": 1, "a": numpy.float32(0.5), "b": numpy.float32("nan"), "c": Path("x"), "d": {1}})
    assert strict_rows(folder.metrics)[0] == {
        "step": 1, "a": 0.5, "b": None, "c": "x", "d": "{1}", "metrics/not_finite": 1
    }  # fmt: skip


def test_a_late_row_is_merged_into_its_step(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "loss/policy": step / 10})
    folder.append_metrics({"step": 2, "eval/reward": 0.9})
    assert strict_rows(folder.metrics) == [
        {"step": 1, "loss/policy": 0.1},
        {"step": 2, "loss/policy": 0.2, "eval/reward": 0.9},
        {"step": 3, "loss/policy": 0.3},
    ]


def test_replayed_steps_replace_the_old_ones_after_a_resume(tmp_path: Path) -> None:
    # six steps, a checkpoint at 4, a crash: steps 5 and 6 are run again
    first = RunFolder.create(tmp_path, "grpo", "x")
    for step in range(1, 7):
        first.append_metrics({"step": step, "try": 1})
        first.append_rollouts([a_group(step)], version=step - 1)
    first.append_calibration({"step": 6, "accepted": True})
    first.close()

    second = RunFolder.create(tmp_path, "grpo", "x", resume=True)
    assert second.truncate_after(4) == ()
    for step in range(5, 8):
        second.append_metrics({"step": step, "try": 2})
        second.append_rollouts([a_group(step)], version=step - 1)
    rows = strict_rows(second.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["try"] for row in rows] == [1, 1, 1, 1, 2, 2, 2]
    assert [row["step"] for row in strict_rows(second.rollouts)] == [s for s in range(1, 8) for _ in range(2)]
    assert second.calibration.read_text() == ""


def test_a_line_cut_in_half_by_a_crash_disappears(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "loss')
    folder.append_metrics({"step": 2})
    assert [row["step"] for row in strict_rows(folder.metrics)] == [1, 2]


def test_truncating_names_the_steps_that_are_missing_and_keeps_one_row_a_step(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 3, "n": 1}\n{"step": 3, "n": 2}\nnoise\n{"step": 5}\n')
    assert folder.truncate_after(4) == (2, 4)
    assert strict_rows(folder.metrics) == [{"step": 1}, {"step": 3, "n": 2}]


def test_truncating_an_empty_folder_reports_every_step_missing(folder: RunFolder) -> None:
    assert folder.truncate_after(0) == ()
    assert folder.truncate_after(2) == (1, 2)


def test_a_rollout_line_holds_the_lineage_of_its_episode(folder: RunFolder) -> None:
    folder.append_rollouts([a_group(12, version=5)], version=6)
    row = strict_rows(folder.rollouts)[0]
    assert row == {
        "step": 7,
        "group": 12,
        "member": 0,
        "prompt_id": "sums.jsonl:13",
        "kept": True,
        "dropped": None,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "failure": None,
        "advantage": 0.7,
        "trained_version": 6,
        "min_version": 4,
        "max_version": 5,
        "age": 2,  # trained on 6, oldest token from 4
        "replica": 1,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "question": "2 + 2 =",
        "answer": "4",
        "text": " 4",
        "token_ids": [11, 2],
        "logprobs": [-0.25, -0.5],
        "versions": [4, 5],
    }


def test_a_rollout_line_says_why_an_episode_was_not_trained(folder: RunFolder) -> None:
    base = a_group().episodes[0]
    cut = replace(base, completion=replace(base.completion, finish_reason=FinishReason.LENGTH))
    failed = replace(base, failure="timed out", reward=None)
    empty = replace(base, completion=replace(base.completion, token_ids=(), logprobs=(), versions=()))
    groups = [Group(index=0, episodes=(cut, failed, empty)), a_group(1, dropped="equal_rewards")]
    folder.append_rollouts(groups, version=3)
    folder.append_rollouts([Group(index=2, episodes=(cut,))], version=4, mask_truncated=True)
    rows = strict_rows(folder.rollouts)
    assert [row["dropped"] for row in rows] == [
        None, "scoring_failed", "no_tokens", "equal_rewards", "equal_rewards", "truncated"
    ]  # fmt: skip
    assert [row["kept"] for row in rows] == [True, False, False, False, False, False]
    assert rows[1]["failure"] == "timed out"


def test_a_logprob_that_is_not_finite_becomes_null_in_its_place(folder: RunFolder) -> None:
    base = a_group().episodes[0]
    odd = replace(base, completion=replace(base.completion, logprobs=(float("-inf"), -0.5)))
    folder.append_rollouts([Group(index=0, episodes=(odd,))], version=3)
    assert strict_rows(folder.rollouts)[0]["logprobs"] == [None, -0.5]
    assert folder.statistics()["records/not_finite"] == 1.0


def test_any_text_a_model_can_produce_survives_the_record(folder: RunFolder) -> None:
    text = 'a "quote"\n\u2028 \x00 \x85 日本 😀 </script>'
    base = a_group().episodes[0]
    for t in (text, "lone \ud800"):
        episode = replace(base, completion=replace(base.completion, text=t))
        folder.append_rollouts([Group(index=0, episodes=(episode,))], version=3)
    assert [row["text"] for row in strict_rows(folder.rollouts)] == [text, "lone \ud800"]


def test_a_full_disk_is_warned_about_once_and_leaves_no_gap_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    folder = RunFolder.create(tmp_path, "grpo", "x", warn=warnings.append)
    folder.append_metrics({"step": 1})
    free = full_disk(monkeypatch, room=7)
    for step in (2, 3, 4):
        folder.append_metrics({"step": step})  # does not raise
    assert strict_rows(folder.metrics) == [{"step": 1}]
    assert folder.statistics() | {"records/not_finite": 0} == {
        "records/failed_writes": 3.0,
        "records/lost_lines": 0.0,
        "records/waiting_lines": 3.0,
        "records/not_finite": 0,
    }
    assert len(warnings) == 1
    assert "metrics.jsonl cannot be written (No space left on device)" in warnings[0]
    free()
    folder.append_metrics({"step": 5})
    assert [row["step"] for row in strict_rows(folder.metrics)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("small_disk", [256], indirect=True)
def test_a_really_full_file_system_does_not_stop_the_run(small_disk: Path) -> None:
    warnings: list[str] = []
    folder = RunFolder.create(small_disk, "grpo", "x", warn=warnings.append)
    for step in range(1, 200):
        folder.append_metrics({"step": step, "padding": "x" * 4000})
    assert len(warnings) == 1
    steps = [row["step"] for row in strict_rows(folder.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert 20 < len(steps) < 70
    with pytest.raises(ForgeError, match=r"summary.json cannot be written \(No space left on device\)"):
        folder.write_summary({"padding": "x" * 100_000})
    assert [p.name for p in folder.path.glob("*.part")] + [p.name for p in folder.path.glob(".*.part")] == []
    folder.close()


def test_a_record_that_is_a_directory_is_counted_and_warned_about_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    folder = RunFolder.create(tmp_path, "grpo", "x", warn=warnings.append)
    folder.rollouts.mkdir()
    folder.append_rollouts([a_group()], version=3)
    folder.append_rollouts([a_group()], version=4)
    assert folder.statistics()["records/failed_writes"] == 2.0
    assert len(warnings) == 1


def test_lines_that_wait_too_long_are_given_up_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "RETRY_LIMIT_BYTES", 40)  # '{"step": 2}\n' is 12 bytes: three fit
    folder = RunFolder.create(tmp_path, "grpo", "x", warn=lambda _: None)
    free = full_disk(monkeypatch, room=0)
    for step in range(1, 6):
        folder.append_metrics({"step": step})
    assert folder.statistics()["records/lost_lines"] == 2.0
    free()
    folder.close()
    assert [row["step"] for row in strict_rows(folder.metrics)] == [3, 4, 5]


def test_a_summary_is_replaced_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_summary({"status": "running", "reward": float("nan")})
    assert json.loads(folder.summary.read_text()) == {"status": "running", "reward": None}

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ForgeError, match=r"summary.json cannot be written \(Input/output error\)"):
        folder.write_summary({"status": "done"})
    assert json.loads(folder.summary.read_text())["status"] == "running"


def test_a_config_that_cannot_be_written_stops_the_start(folder: RunFolder) -> None:
    folder.config.mkdir()
    with pytest.raises(ForgeError, match=r"config.yaml cannot be written"):
        folder.write_config("steps: 3\n")


def test_the_config_is_written_without_its_secrets(folder: RunFolder) -> None:
    folder.write_config("steps: 3\ntracker:\n  wandb_api_key: abc123\n")
    assert folder.config.read_text() == 'steps: 3\ntracker:\n  wandb_api_key: "<redacted>"\n'
