"""The invariants of a disturbed run: each fault of a run folder is seen, and a sound one passes."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forge.buffer import DataOrder
from forge.chaos import draw, violations
from forge.checkpoint import Checkpoints, RunState

STEPS, PROMPTS, MEMBERS = 4, 2, 3
Rows = list[dict[str, Any]]


def check(run: Path, metrics: Rows, episodes: Rows, *, losses: dict[int, float] | None = None) -> list[str]:
    for name, rows in (("metrics", metrics), ("rollouts", episodes)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return violations(run, steps=STEPS, prompts_per_step=PROMPTS, group_size=MEMBERS, age_bound=1, losses=losses)


@pytest.fixture
def sound(tmp_path: Path) -> tuple[Path, Rows, Rows]:
    metrics: Rows = [{"step": s, "age/max": 1, "loss/total": 0.1 * s} for s in range(1, STEPS + 1)]
    episodes: Rows = [{"group": g} for g in range(STEPS * PROMPTS) for _ in range(MEMBERS)]
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    partial = checkpoints.begin()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (partial / "trainer-00000-of-00001.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    checkpoints.commit(partial, RunState(step=4, seed=0, prompts_per_step=PROMPTS, order=DataOrder(next_group=8)))
    return tmp_path, metrics, episodes


def test_a_sound_run_passes(sound: tuple[Path, Rows, Rows]) -> None:
    run, metrics, episodes = sound
    assert check(run, metrics, episodes, losses={s: 0.1 * s for s in range(1, 5)}) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda m, e: m.pop(1), "metrics have steps [1, 3, 4], not 1 to 4 once each"),
        (lambda m, e: m.insert(2, m[1]), "metrics have steps [1, 2, 2, 3, 4]"),
        (lambda m, e: e.pop(), "groups [7] were not trained whole"),
        (lambda m, e: e.append({"group": 3}), "groups [3] were trained more than once"),
        (lambda m, e: e.append({"group": 8}), "groups [8] were never to be trained"),
        (lambda m, e: m[2].update({"age/max": 2}), "step 3 trained age 2, above the bound 1"),
        (lambda m, e: m[2].update({"loss/total": None}), "step 3 has loss None"),
        (lambda m, e: m[3].update({"loss/total": 0.4001}), "step 4 has loss 0.4001, undisturbed it is 0.4"),
    ],
)
def test_each_fault_is_seen(sound: tuple[Path, Rows, Rows], damage: Callable[[Rows, Rows], Any], says: str) -> None:
    run, metrics, episodes = sound
    damage(metrics, episodes)
    assert any(says in problem for problem in check(run, metrics, episodes, losses={s: 0.1 * s for s in range(1, 5)}))


def test_checkpoints_must_be_there_and_readable(sound: tuple[Path, Rows, Rows]) -> None:
    run, metrics, episodes = sound
    file = run / "checkpoints/step-4/trainer-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    assert "step-4 cannot be loaded" in check(run, metrics, episodes)[0]
    (run / "checkpoints/step-4/state.json").unlink()
    assert check(run, metrics, episodes) == ["there is no complete checkpoint"]


def test_strikes_are_drawn_by_the_seed_over_all_parts_and_moments() -> None:
    parts = ["trainer", "generator-0", "controller"]
    first, second = ([draw(Random(s), parts, steps=5, can_hang=["generator-0"]) for s in range(200)] for _ in range(2))
    assert first == second
    assert {s.victim for s in first} == set(parts)
    assert {s.step for s in first} == set(range(5))
    assert {s.number.name for s in first if s.victim == "generator-0"} == {"SIGKILL", "SIGSTOP"}
    assert {s.number.name for s in first if s.victim != "generator-0"} == {"SIGKILL"}
