"""Checkpoints are complete or absent, and the last good one stays."""

import asyncio
from pathlib import Path

import pytest

from forge.buffer import DataOrder
from forge.checkpoint import BackgroundSaves, Checkpoints, RunState, check_resumable, read_state
from forge.errors import ConfigError, PartFailed
from forge.model_folder import read_header

EMPTY = b"\x02\0\0\0\0\0\0\0{}"
"""A safetensors file without tensors."""


def state(step: int) -> RunState:
    order = DataOrder(next_group=8 * step + 2, pending=[8 * step - 3, 8 * step + 1])
    return RunState(step=step, seed=0, prompts_per_step=8, order=order)


def test_a_folder_is_a_checkpoint_only_after_commit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    partial = checkpoints.begin()
    (partial / "trainer-00000-of-00001.safetensors").write_bytes(EMPTY)
    assert checkpoints.latest() is None
    final = checkpoints.commit(partial, state(3))
    assert final == checkpoints.latest() == tmp_path / "step-3"
    assert read_state(final) == state(3)
    (final / "trainer-00000-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match="a file of the trainer is missing or damaged"):
        read_state(final)


def test_the_newest_are_kept_in_order_of_steps_not_of_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 9, 10):
        checkpoints.commit(checkpoints.begin(), state(step))
    assert [p.name for p in checkpoints.complete()] == ["step-9", "step-10"]


def test_a_save_that_was_cut_off_neither_counts_nor_removes_the_last_good_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.commit(checkpoints.begin(), state(1))
    (checkpoints.begin() / "half.safetensors").write_text("x")
    assert checkpoints.latest() == tmp_path / "step-1"
    (tmp_path / "step-5").mkdir()  # no state.json
    assert checkpoints.latest() == tmp_path / "step-1"


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for text in ("first", "second"):
        partial = checkpoints.begin()
        (partial / "note").write_text(text)
        checkpoints.commit(partial, state(4))
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]
    assert (tmp_path / "step-4/note").read_text() == "second"


@pytest.mark.parametrize("content", [None, "", "[]", '{"step": 1}'])
def test_a_folder_that_is_no_checkpoint_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(ConfigError, match=r"resume=.*: not a complete checkpoint"):
        read_state(tmp_path)


def test_settings_that_would_change_the_data_order_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_resumable(state(20), seed=1, prompts_per_step=4, steps=20)
    assert len(caught.value.problems) == 3
    for part in ("written under seed=0", "written under 8", "has taken 20 already"):
        assert part in str(caught.value)
    check_resumable(state(20), seed=0, prompts_per_step=8, steps=21)


def test_a_kill_while_a_checkpoint_replaces_its_namesake_loses_neither(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    partial = checkpoints.begin()
    (partial / "trainer-00000-of-00001.safetensors").write_bytes(EMPTY)
    checkpoints.commit(partial, state(4))
    (tmp_path / "step-4").rename(tmp_path / "replaced.partial")  # where a kill between the two renames leaves it
    assert Checkpoints(tmp_path, keep=1).latest() == tmp_path / "step-4"


class Saves:
    """BackgroundSaves whose write waits for `gate` and can be told to fail."""

    def __init__(self, folder: Path) -> None:
        self.step, self.gate, self.warnings = 0, asyncio.Event(), list[str]()
        self.error: Exception | None = None
        self.content = EMPTY
        self.saves = BackgroundSaves(
            Checkpoints(folder, keep=1), snapshot=self.snapshot, write=self.write, warn=self.warnings.append
        )

    async def snapshot(self) -> RunState:
        self.step += 1
        return state(self.step)

    async def write(self, partial: Path) -> None:
        await self.gate.wait()
        (partial / "trainer-00000-of-00001.safetensors").write_bytes(self.content)
        if self.error is not None:
            raise self.error


async def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path: Path) -> None:
    s = Saves(tmp_path)
    await s.saves.start()
    assert s.saves.checkpoints.latest() is None
    s.gate.set()
    assert await s.saves.result() == s.saves.checkpoints.latest() == tmp_path / "step-1"
    assert set(s.saves.seconds) == {"copy", "write"}
    assert await s.saves.result() is None


async def test_the_next_save_begins_when_the_one_before_is_done(tmp_path: Path) -> None:
    s = Saves(tmp_path)
    await s.saves.start()
    second = asyncio.ensure_future(s.saves.start())
    await asyncio.sleep(0.01)
    assert s.step == 1
    s.gate.set()
    await second
    await s.saves.settle()
    assert s.saves.checkpoints.latest() == tmp_path / "step-2"


@pytest.mark.parametrize(
    ("error", "content"),
    [(PartFailed("checkpoint", "No space left on device"), b"half"), (None, b"\x02\0\0\0\0\0\0\0{")],
)
async def test_a_save_that_fails_is_counted_and_the_one_before_stays(
    error: Exception | None, content: bytes, tmp_path: Path
) -> None:
    s = Saves(tmp_path)
    s.gate.set()
    await s.saves.start()
    await s.saves.settle()
    good, s.error, s.content = s.content, error, content
    await s.saves.start()
    await s.saves.settle()
    assert s.saves.failed == 1
    assert "earlier ones are whole" in s.warnings[0]
    assert s.saves.checkpoints.complete() == [tmp_path / "step-1"]
    s.error, s.content = None, good
    await s.saves.start()
    assert await s.saves.result() == tmp_path / "step-3"
    assert s.saves.failed == 1


async def test_a_cancelled_wait_does_not_end_the_save(tmp_path: Path) -> None:
    s = Saves(tmp_path)
    await s.saves.start()
    waiting = asyncio.ensure_future(s.saves.settle())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    s.gate.set()
    assert await s.saves.result() == tmp_path / "step-1"


@pytest.mark.parametrize("small_disk", [1536], indirect=True)
async def test_a_disk_with_room_for_one_and_a_half_keeps_the_one_it_has(small_disk: Path) -> None:
    import torch

    from forge.engine_titan_files import Snapshot, write_snapshot

    s = Saves(small_disk)
    taken = Snapshot(file="trainer-00000-of-00001.safetensors", tensors={"w": torch.rand(2**18)}, metadata={})

    async def write(partial: Path) -> None:
        await asyncio.to_thread(write_snapshot, taken, partial)

    s.saves = BackgroundSaves(s.saves.checkpoints, snapshot=s.snapshot, write=write, warn=s.warnings.append)
    for _ in range(3):
        await s.saves.start()
    await s.saves.settle()
    assert s.saves.failed == 2
    assert "No space left on device" in s.warnings[0]
    (only,) = s.saves.checkpoints.complete()
    assert only.name == "step-1"
    assert list(read_header(only / taken.file)) == ["w"]


async def test_a_folder_that_cannot_be_written_costs_the_save_alone(tmp_path: Path) -> None:
    s = Saves(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    s.gate.set()
    await s.saves.start()
    with pytest.raises(PartFailed, match="cannot be made"):
        await s.saves.result()
