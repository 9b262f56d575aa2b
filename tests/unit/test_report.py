import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import forge.report as report
from forge.errors import ForgeError
from forge.report import read_run, running_mean, write_report

VOID = {"meta", "line", "rect", "circle", "polyline", "i"}


def example_run(folder: Path, *, steps: int = 60, seed: int = 0) -> Path:
    """A run folder as a small GRPO run on additions leaves it, with everything a report can show."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_metrics(step, rng) for step in range(1, steps + 1)]
    _write_lines(folder / "metrics.jsonl", rows)
    _write_lines(folder / "rollouts.jsonl", [e for row in rows for e in _episodes(int(row["step"]), row, rng)])
    _write_lines(
        folder / "calibration.jsonl",
        [
            {
                "step": step,
                "accepted": step != 40,
                "reason": "within bounds" if step != 40 else "zero point of layers.3 moved by 7.1 % of the range",
                "kl": round(0.004 + 0.001 * rng.random(), 5),
                "mean_abs_error": 0.0061,
                "flagged": ["layers.3"],
            }
            for step in (20, 40, 60)
            if step <= steps
        ],
    )
    (folder / "samples.json").write_text(json.dumps(_samples(rng)))
    (folder / "config.yaml").write_text(
        "# forge 0.1.0, torch 2.13.0, vllm 0.29.0\nname: demo\nsteps: 60\nprompts_per_step: 8\ngroup_size: 8\n"
        "model:\n  path: models/SmolLM2-135M-Instruct\ntrainer:\n  lr: 1.0e-05\ntracker:\n  wandb_api_key: <redacted>\n"
    )
    rewards = [row["reward/mean"] for row in rows]
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "status": "done",
                "steps": steps,
                "wall_seconds": 412.6,
                "time_to_first_step_seconds": 31.4,
                "reward_first3": sum(rewards[:3]) / 3,
                "reward_last5": sum(rewards[-5:]) / 5,
                "heldout_before": 0.203,
                "heldout_after": 0.781,
                "tokens_per_second": 1243.7,
                "max_age_bound": 3,
                "max_age_measured": 2,
                "weight_sync_seconds": 0.312,
                "peak_rss_gib": 6.24,
                "failures": {"generator 0": 1, "reward": 9},
            }
        )
    )
    return folder


def _metrics(step: int, rng: random.Random) -> dict[str, Any]:
    learned = 1 - math.exp(-step / 18)
    wait, train, publish, pull = 2.6 + rng.random(), 2.2 + 0.3 * rng.random(), 0.2 + 0.1 * rng.random(), 0.12
    equal, fresh = min(7, int(rng.random() * 3 + 3 * learned)), rng.randint(2, 5)
    stale = rng.randint(0, 1) if step > 2 else 0
    row: dict[str, Any] = {
        "step": step,
        "reward/mean": min(1.0, max(0.0, 0.18 + 0.62 * learned + rng.gauss(0, 0.06))),
        "reward/std": 0.42,
        "reward/group_std": 0.35 - 0.2 * learned + rng.gauss(0, 0.02),
        "reward/count": 64,
        "reward/failed": int(rng.random() < 0.12),
        "reward/exact": min(1.0, max(0.0, 0.1 + 0.6 * learned + rng.gauss(0, 0.05))),
        "reward/exact/count": 64,
        "reward/format": min(1.0, max(0.0, 0.5 + 0.48 * (1 - math.exp(-step / 5)) + rng.gauss(0, 0.02))),
        "reward/format/count": 64,
        "loss/policy": rng.gauss(0, 0.012),
        "loss/kl_reference": 0.04 * learned + abs(rng.gauss(0, 0.002)),
        "policy/entropy": 0.9 - 0.55 * learned + rng.gauss(0, 0.03),
        "ratio/mean": 1 + rng.gauss(0, 0.002),
        "ratio/effective_sample_share": 0.985 - 0.03 * stale + rng.gauss(0, 0.004),
        "ratio/outside_clip": abs(rng.gauss(0.004, 0.002)),
        "logprob_gap/mean": 0.011 + abs(rng.gauss(0, 0.001)),
        "logprob_gap/max": 0.2 + abs(rng.gauss(0, 0.1)),
        "logprob_gap/kl_sampler_trainer": abs(rng.gauss(0.0006, 0.0002)),
        "trainer/grad_norm": 0.5 + abs(rng.gauss(0, 0.15)) + (2.5 if step == 33 else 0.0),
        "trainer/lr": 1e-5 * min(1.0, step / 5),
        "completion/tokens_mean": 38 - 22 * learned + rng.gauss(0, 1.5),
        "completion/tokens_max": 96 if step < 25 else 60 + rng.randint(0, 20),
        "completion/truncated_share": max(0.0, 0.22 * (1 - learned) + rng.gauss(0, 0.02)),
        "rollout/tokens_per_second": 1240 + rng.gauss(0, 60),
        "weights/sync_seconds": publish + pull,
        "group/count": 8,
        "group/kept": 8 - equal,
        "group/incomplete": 0,
        "group/dropped_equal_rewards": equal,
        "group/dropped_too_few_valid_episodes": 0,
        "age/mean": 0.6,
        "age/max": 2 if stale else 1,
        "age/0": fresh,
        "age/1": 8 - fresh - stale,
        "age/2": stale,
        "time/wait_batch_seconds": wait,
        "time/train_seconds": train,
        "time/publish_seconds": publish,
        "time/pull_seconds": pull,
        "time/generate_seconds": wait + 1.4 + 0.4 * rng.random(),
        "time/step_seconds": wait + train + publish + pull + 0.2,
        "failures/total": 0,
    }
    if step == 33:
        row["trainer/skipped_nonfinite"] = 1
        row["loss/policy"] = None
    return row


def _episodes(step: int, row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    episodes = []
    for member in range(8):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        right = rng.random() < row["reward/mean"]
        failed = member == 0 and bool(row["reward/failed"])
        episodes.append(
            {
                "step": step,
                "group": step * 8 + member,
                "member": member,
                "prompt_id": f"sums.jsonl:{step * 8 + member}",
                "kept": not failed,
                "dropped": "scoring_failed" if failed else None,
                "failure": "expression took longer than 2 s" if failed else None,
                "reward": None if failed else float(right),
                "finish_reason": "length" if rng.random() < 0.1 else "stop",
                "question": f"{a} + {b} =",
                "answer": str(a + b),
                "text": f"The sum of {a} and {b} is {a + b if right else a + b + rng.randint(1, 9)}.",
                "token_ids": [1, 2],
                "logprobs": [-0.1, None],
                "versions": [step - 1, step - 1],
            }
        )
    return episodes


def _samples(rng: random.Random) -> list[dict[str, Any]]:
    samples = []
    for number in range(20):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        better, good = rng.random() < 0.7, rng.random() < 0.25
        ramble = "Let us think. The first number has tens and ones, and so does the second. " * (9 if number == 3 else 1)
        samples.append(
            {
                "id": f"heldout.jsonl:{number + 1}",
                "question": f"{a} + {b} =",
                "answer": str(a + b),
                "before": f"{ramble}So {a} + {b} = {a + b if good else a + b + 10}",
                "after": f"{a + b if better or good else a + b - 1}",
                "reward_before": float(good),
                "reward_after": float(better or good),
            }
        )
    return samples


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
