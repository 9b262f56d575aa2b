"""Quantized runs of the whole command on the tiny model: calibration, rollback, QAT, export and its proof."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.filterwarnings("default")

SMALL = (
    "model=tiny",
    "prompts_per_step=2",
    "group_size=4",
    "trainer.micro_batch=4",
    "trainer.lr=1e-3",
    "trainer.ranks=1",
    "sampling.max_new_tokens=16",
    "data.heldout=8",
    "data.rows=40",
    "calibration.prompts=8",
    "calibration.samples=16",
    "tracker.tensorboard=false",
    "out=runs",
    "name=q",
)

REWARDS = """
from pathlib import Path

from forge import Episode, Reward

CALLS: dict[str, int] = {}


class Even(Reward):
    def __call__(self, episode: Episode) -> float:
        ids = episode.completion.token_ids
        return sum(t % 2 == 0 for t in ids) / max(1, len(ids))


class QuantizedLoses(Reward):
    '''Once the file "strict" is there, of three scorings of a question only the first is right. Calibration scores the
    unquantized policy, then the quantized one with proposed scales, then with the live ones.'''

    def __call__(self, episode: Episode) -> float:
        if not Path("strict").exists():
            return 0.5
        CALLS[episode.question] = CALLS.get(episode.question, 0) + 1
        return float(CALLS[episode.question] % 3 == 1)
"""


@pytest.fixture(autouse=True)
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quant_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


DRIFT = """
import asyncio

from forge import launch, load_config


async def main() -> None:
    async with launch(load_config("grpo", {overrides!r})) as run:
        async for _ in run.train():
            pass
        await run.calibrate()


asyncio.run(main())
"""


def test_static_int8_is_calibrated_exported_proven_and_drifts_without_calibration(
    forge: Callable[..., Any], tmp_path: Path
) -> None:
    done = forge(
        "grpo", *SMALL, "steps=4", "quant.scheme=int8_static", "calibration.every=2", "reward.name=quant_rewards:Even",
        "checkpoint.every=4", "trainer.ranks=2",
    )  # fmt: skip
    assert done.status == 0, done.out
    run = tmp_path / "runs/grpo/q"
    calibrations = lines(run / "calibration.jsonl")
    assert [c["source"] for c in calibrations] == [
        "prompts before training",
        "rollouts before training",
        "rollouts of the last steps",
    ]
    accepted = [c["scale_version"] for c in calibrations if c["accepted"]]
    assert accepted == list(range(1, len(accepted) + 1))
    assert len(calibrations[-1]["layers"]) == 28
    metrics = lines(run / "metrics.jsonl")
    assert metrics[-1]["quant/scale_version"] == calibrations[-1]["scale_version"]
    assert 0 < metrics[-1]["quant/changed_codes_share"] < 1
    assert metrics[-1]["quant/layers_bytes_share"] < 0.52
    parity = json.loads((run / "export/parity.json").read_text())
    assert parity["ok"]
    # the same codes in the same kernels of another process
    assert parity["exported_vs_served"]["max"] < 1e-4
    assert parity["exported_vs_served"]["mean"] < parity["exported_vs_unquantized"]["mean"]
    assert (run / "export/layers.png").stat().st_size > 1000

    verified = forge("verify", "runs/grpo/q/export")
    assert verified.status == 0, verified.out
    weights = run / "export/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    damaged = forge("verify", "runs/grpo/q/export")
    assert damaged.status == 2
    assert "model.safetensors is damaged" in damaged.out

    refused = forge("grpo", *SMALL, "model.path=runs/grpo/q/export", "name=again")
    assert refused.status == 2
    assert "already quantized" in refused.out

    converted = forge("quantize", "--run", "runs/grpo/q", "--target", "converted")
    assert converted.status == 0, converted.out
    assert "quantized 28 of 28 linears" in converted.out

    (tmp_path / "drift.py").write_text(DRIFT.format(overrides=[
        *SMALL, "steps=8", "quant.scheme=int8_static", "resume=auto", "reward.name=quant_rewards:Even",
        "calibration.every=0", "async.max_age=0", "trainer.lr=0.05", "trainer.warmup_steps=0",
    ]))  # fmt: skip
    drifted = subprocess.run(
        [sys.executable, "drift.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert drifted.returncode == 0, drifted.stdout + drifted.stderr
    resumed = lines(run / "metrics.jsonl")[4:]
    assert [m["quant/scale_version"] for m in resumed] == [metrics[-1]["quant/scale_version"]] * 4
    assert resumed[-1]["logprob_gap/mean"] > 3 * resumed[0]["logprob_gap/mean"]
    before, asked = calibrations[-1], lines(run / "calibration.jsonl")[-1]
    assert asked["source"] == "asked for"
    assert asked["policy"]["live_kl"] > 3 * before["policy"]["live_kl"]
    assert any("leave the live scales' range" in reason for reason in asked["reasons"])


DROP = """
import asyncio
from pathlib import Path

from forge import launch, load_config


async def main() -> None:
    config = load_config("grpo", {overrides!r})
    async with launch(config) as run:
        async for step in run.train():
            if step.step == 2:
                Path("strict").touch()
        decision = await run.calibrate()
        print("ASKED", decision.action.value)


asyncio.run(main())
"""


def test_a_forced_accuracy_drop_rolls_back_and_switches_to_qat(tmp_path: Path) -> None:
    overrides = [
        *SMALL, "steps=8", "quant.scheme=int8_static", "quant.smooth=0", "calibration.every=1",
        "reward.name=quant_rewards:QuantizedLoses", "rollback.patience=2", "rollback.qat_fraction=0.2",
        "sampling.max_new_tokens=8",
    ]  # fmt: skip
    (tmp_path / "drop.py").write_text(DROP.format(overrides=overrides))
    done = subprocess.run(
        [sys.executable, "drop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ASKED" in done.stdout
    run = tmp_path / "runs/grpo/q"
    calibrations = {
        c["step"]: c for c in lines(run / "calibration.jsonl") if c["source"] == "rollouts of the last steps"
    }
    assert calibrations[1]["accepted"]
    assert calibrations[2]["accepted"]
    assert calibrations[3]["action"] == "rollback"
    assert calibrations[3]["scale_version"] == calibrations[2]["scale_version"] - 1
    assert calibrations[3]["policy"]["accuracy_drop"] > 0.02
    assert calibrations[4]["action"] == "qat"
    assert calibrations[4]["qat_steps"] == 2
    metrics = {m["step"]: m for m in lines(run / "metrics.jsonl")}
    assert [metrics[s]["quant/qat"] for s in (4, 5, 6)] == [0, 1, 1]
    assert metrics[5]["trainer/lr"] == pytest.approx(0.1 * metrics[4]["trainer/lr"])
    assert metrics[3]["calibration/rolled_back"] == 1
    assert metrics[4]["calibration/qat_steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model=tiny", "scheme=int4_weight", "layers=q_proj"), "engines fuse k_proj, q_proj, v_proj"),
        (("model=tiny", "scheme=int5"), "quant.scheme must be one of"),
        (("model=tiny",), "scheme must be set"),
        (("--run", "nowhere"), "config file nowhere/config.yaml"),
        (("model=tiny", "scheme=int8_static", "--format", "torchao"), "int8_static cannot be written as torchao"),
        (("model=tiny", "scheme=int8_dynamic", "--target", "/proc/x"), "--target /proc/x cannot be written"),
        (("model=tiny", "scheme=int8_dynamic", "data=empty.jsonl"), "empty.jsonl holds no rows"),
        (("model=tiny", "scheme=x86_static", "--target", "quant_rewards.pt2"), "quant_rewards.pt2 exists"),
        (("model=tiny", "scheme=x86_static", "--target", "x86"), "a file whose name ends in .pt2"),
        (("model=tiny", "scheme=x86_static", "--rollouts", "group_size=64"), "knows no --rollouts, group_size"),
        (("model=tiny", "scheme=int8_dynamic", "--target", ""), "--target must name a folder"),
        (("--run", "nowhere", "model=tiny"), "that run's own model: leave model out"),
        (("model=tiny", "scheme=int8_static", "calibration.min_rows=9", "samples=8"), "min_rows=9 is more than"),
    ],
)
def test_what_cannot_be_quantized_is_refused_at_once(
    forge: Callable[..., Any], arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    for name in ("empty.jsonl", "quant_rewards.pt2"):
        (tmp_path / name).touch()
    done = forge("quantize", *arguments)
    assert done.status == 2, done.out
    assert says in done.out
    assert "loading" not in done.out
    assert "Traceback" not in done.out


def test_pt2e_and_torchao_exports_from_the_command(forge: Callable[..., Any], tmp_path: Path) -> None:
    done = forge("quantize", "model=tiny", "scheme=8da4w", "data.rows=40", "--target", "ao")
    assert done.status == 0, done.out
    config = json.loads((tmp_path / "ao/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "torchao"
    parity = json.loads((tmp_path / "ao/parity.json").read_text())
    assert parity["exported_vs_served"]["mean"] < parity["exported_vs_unquantized"]["mean"] / 3
    assert not (tmp_path / "ao.unproven").exists()
    done = forge("quantize", "model=tiny", "scheme=x86_static", "data.rows=40", "samples=8", "--target", "x86.pt2")
    assert done.status == 0, done.out
    assert "quantized 28 of 29 linears" in done.out
    assert (tmp_path / "x86.pt2").stat().st_size > 10_000


def test_three_short_rows_without_gradable_answers_calibrate_and_prove_and_a_dead_engine_is_named(
    forge: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"question": f"What is {i}+1?", "answer": "who knows"} for i in range(3)]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    short = ("model=tiny", "scheme=int8_static", "data=three.jsonl", "samples=3", "calibration.min_rows=3")
    done = forge("quantize", *short, "--target", "short")
    assert done.status == 0, done.out
    assert forge("verify", "short").status == 0
    for name in ("parity.json", "layers.json"):
        content = (tmp_path / "short" / name).read_text()
        (tmp_path / "short" / name).write_text(content.replace("0.", "1.", 1))
        damaged = forge("verify", "short", "--files-only")
        assert damaged.status == 2
        assert f"{name} is damaged" in damaged.out
        (tmp_path / "short" / name).write_text(content)

    with subprocess.Popen(
        [sys.executable, "-m", "forge.apps", "verify", "short"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not psutil.Process(process.pid).children(recursive=True):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        psutil.Process(process.pid).children(recursive=True)[-1].kill()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert "stock vllm: its process died" in out
