"""The whole command on the tiny model: real processes, real engines, real store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")

TINY = (
    "model=tiny",
    "steps=3",
    "prompts_per_step=2",
    "group_size=4",
    "trainer.micro_batch=4",
    "trainer.lr=1e-3",
    "sampling.max_new_tokens=8",
    "data.heldout=4",
    "data.rows=40",
    "reward.name=tests_reward:Even",
    "tracker.tensorboard=false",
    "out=runs",
    "name=t",
)

REWARD = """
from forge import Episode, Reward


class Even(Reward):
    '''Half of the random tokens are even, so groups differ.'''

    def __call__(self, episode: Episode) -> float:
        ids = episode.completion.token_ids
        return sum(t % 2 == 0 for t in ids) / max(1, len(ids))
"""


@pytest.fixture(autouse=True)
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise ValueError(text)

    return [json.loads(line, parse_constant=refuse) for line in (folder / name).read_text().splitlines()]


def test_a_synchronous_run_leaves_all_it_promises(forge: Callable[..., Any], tmp_path: Path) -> None:
    done = forge("grpo", *TINY)
    assert done.status == 0, done.out
    assert "\x1b" not in done.out
    run = tmp_path / "runs" / "grpo" / "t"
    metrics = rows(run)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(m["age/max"] == 0 for m in metrics)
    # on policy: the sampler serves bfloat16, the trainer computes in float32
    assert metrics[0]["logprob_gap/mean"] < 0.05
    assert metrics[0]["ratio/mean"] == pytest.approx(1.0, abs=0.02)
    assert all(0 < m["weights/changed_share"] <= 1 for m in metrics)
    episodes = rows(run, "rollouts.jsonl")
    assert len(episodes) == 3 * 2 * 4
    for e in episodes:
        assert len(e["token_ids"]) == len(e["logprobs"]) == len(e["versions"]) <= 8
        assert set(e["versions"]) == {e["step"] - 1}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["max_age_measured"] == summary["max_age_bound"] == 0
    assert summary["steps_without_training"] == 0
    assert summary["heldout_before"] is not None
    assert summary["heldout_after"] is not None
    assert (run / "report.html").stat().st_size > 1000
    assert (run / "config.yaml").exists()
    assert "max_age: 0" in (run / "config.yaml").read_text()

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "export")
    prompt = tokenizer("Calculate 1 + 2.", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_running_ahead_with_two_generators_and_kl_stays_within_the_bound(
    forge: Callable[..., Any], tmp_path: Path
) -> None:
    done = forge(
        "grpo",
        *TINY,
        "steps=5",
        "async.max_age=1",
        "generator.replicas=2",
        "algo.kl=0.05",
        "trainer.ranks=1",
        "data.heldout=0",
    )
    assert done.status == 0, done.out
    run = tmp_path / "runs" / "grpo" / "t"
    metrics = rows(run)
    assert [m["age/max"] for m in metrics][2:] == [1, 1, 1]
    assert {e["replica"] for e in rows(run, "rollouts.jsonl")} == {0, 1}
    assert metrics[0]["loss/kl_reference"] == pytest.approx(0.0, abs=1e-6)  # the policy still is the reference
    assert metrics[-1]["loss/kl_reference"] > 0


def test_a_run_resumes_with_its_weights_version_and_data_order(forge: Callable[..., Any], tmp_path: Path) -> None:
    common = (*TINY, "trainer.ranks=1", "data.heldout=0", "checkpoint.export=false")
    whole = forge("grpo", *common, "steps=4", "name=whole")
    assert whole.status == 0, whole.out
    first = forge("grpo", *common, "steps=2", "checkpoint.every=2")
    assert first.status == 0, first.out
    second = forge("grpo", *common, "steps=4", "resume=auto")
    assert second.status == 0, second.out
    expected, found = (rows(tmp_path / "runs" / "grpo" / name) for name in ("whole", "t"))
    assert [m["step"] for m in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("reward/mean", "loss/total", "trainer/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9), (ours["step"], key)
    order = [[e["prompt_id"] for e in rows(tmp_path / "runs" / "grpo" / n, "rollouts.jsonl")] for n in ("whole", "t")]
    assert order[0] == order[1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_within_15_seconds(
    number: int, status: int, forge: Callable[..., Any], tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    done = forge("grpo", *TINY, "steps=500", "trainer.ranks=1", "data.heldout=0", signal_at="step 2/", send=number)
    assert done.status == status, done.out
    assert done.seconds < 15
    assert set(Path("/dev/shm").iterdir()) - before == set()
    summary = json.loads((tmp_path / "runs" / "grpo" / "t" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_a_failing_reward_ends_the_run_with_its_name(forge: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tests_reward.py").write_text(REWARD.replace("ids = ", "raise KeyError('no such column'); ids = "))
    done = forge("grpo", *TINY, "data.heldout=0", "trainer.ranks=1")
    assert done.status == 1
    assert "reward: scoring failed for 8 of 8 episodes of step 1" in done.out
    assert "no such column" in done.out
    assert "Traceback" not in done.out


def test_a_script_trains_with_a_reward_of_its_own(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "short.py"
    overrides = [*TINY, "steps=6", "trainer.ranks=1", "data.heldout=0"]
    overrides.remove("reward.name=tests_reward:Even")
    done = subprocess.run([sys.executable, str(example), *overrides], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [int(version) for version, _ in lines] == [1, 2, 3, 4, 5, 6]
    assert all(0 < float(reward) <= 0.5 for _, reward in lines)
