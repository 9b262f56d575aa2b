"""Checkpoints are complete or absent, and the last good one stays."""

from pathlib import Path

import pytest

from forge.buffer import DataOrder
from forge.checkpoint import Checkpoints, RunState, check_resumable, read_state
from forge.errors import ConfigError


def state(step: int) -> RunState:
    order = DataOrder(next_group=8 * step + 2, pending=[8 * step - 3, 8 * step + 1])
    return RunState(step=step, seed=0, prompts_per_step=8, order=order)


def test_a_folder_is_a_checkpoint_only_after_commit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    partial = checkpoints.begin()
    (partial / "trainer.safetensors").write_text("x")
    assert checkpoints.latest() is None
    final = checkpoints.commit(partial, state(3))
    assert final == checkpoints.latest() == tmp_path / "step-3"
    assert (final / "trainer.safetensors").exists()
    assert read_state(final) == state(3)


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
        (partial / "trainer.safetensors").write_text(text)
        checkpoints.commit(partial, state(4))
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]
    assert (tmp_path / "step-4/trainer.safetensors").read_text() == "second"


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
