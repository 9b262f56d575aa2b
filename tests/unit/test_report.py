import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import forge.report as report
from forge.errors import ForgeError
from forge.report import write_report

VOID = {"meta"}


def example_run(folder: Path, *, steps: int = 60, seed: int = 0) -> Path:
    """A run folder as a small GRPO run on additions leaves it, with everything a report can show."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_metrics(step, rng) for step in range(1, steps + 1)]
    _write_lines(folder / "metrics.jsonl", rows)
    _write_lines(folder / "rollouts.jsonl", [e for row in rows for e in _episodes(int(row["step"]), row, rng)])
    _write_lines(folder / "calibration.jsonl", [_calibrated(step, rng) for step in range(10, steps + 1, 10)])
    (folder / "samples.json").write_text(json.dumps(_samples(rng)))
    (folder / "config.yaml").write_text(
        "# forge 0.1.0, torch 2.13.0, vllm 0.29.0\nname: demo\nsteps: 60\nprompts_per_step: 8\ngroup_size: 8\n"
        "model:\n  path: models/SmolLM2-135M-Instruct\ntrainer:\n  lr: 1.0e-05\ntracker:\n  wandb_api_key: <redacted>\n"
    )
    rewards = [row["reward/mean"] for row in rows]
    failed = sum(row["reward/failed"] for row in rows)
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
                "failures": {"generator 0": 1, "reward": failed, "records/failed_writes": 0.0},
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
        "quant/scale_version": 1 + (step >= 20) + (step >= 60),
        "quant/qat": int(step > 50),
        "quant/changed_codes_share": 0.002 + 0.001 * rng.random(),
        "quant/published_bytes": 92 * 2**20,
        "quant/bf16_bytes": 257 * 2**20,
    }
    if step == 33:
        row["trainer/skipped_nonfinite"] = 1
        row["loss/policy"] = None
    return row


ACTIONS = {10: "accept", 20: "measure", 30: "reject", 40: "rollback", 50: "qat", 60: "accept"}
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def _calibrated(step: int, rng: random.Random) -> dict[str, Any]:
    action = ACTIONS.get(step, "accept")
    names = [f"model.layers.{n}.{kind}" for n in range(30) for kind in KINDS]
    moved = "zero point moved 7.1 % of the range, more than calibration.max_zero_point_shift=5 %"
    reasons = {
        "reject": [f"layer {name}: {moved}" for name in names[:8]],
        "rollback": ["greedy reward fell by 0.09, more than calibration.max_accuracy_drop=0.05"],
        "qat": ["two calibrations in a row were not accepted, calibration.qat=auto"],
    }
    live = 0.02 + (0.03 if 20 < step < 50 else 0.0) + 0.004 * rng.random()
    reward = 0.3 + 0.4 * step / 60
    return {
        "step": step,
        "scale_version": 1 + (step >= 20) + (step >= 60),
        "action": action,
        "accepted": action == "accept",
        "reasons": reasons.get(action, []),
        "rows": 128,
        "tokens": 9120 + step,
        "rows_refused": 2 if action == "reject" else 0,
        "resampled": action == "reject",
        "seconds": 4.1 + rng.random(),
        "policy": {
            "kl": None if action == "qat" else live * (2.2 if action == "reject" else 0.8),
            "logprob_gap": 0.09 + 0.02 * rng.random(),
            "live_kl": live,
            "live_logprob_gap": 0.12,
            "greedy_reward": reward - (0.09 if action == "rollback" else 0.01),
            "greedy_reward_unquantized": reward,
            "accuracy_drop": 0.09 if action == "rollback" else 0.01,
            "argmax_agreement": 0.93,
        },
        "layers": [
            {
                "layer": name,
                "scale": 0.031,
                "zero_point": 4,
                "scale_shift": 0.01 + 0.01 * rng.random(),
                "zero_point_shift": 0.071 if action == "reject" and n < 8 else 0.004 * rng.random(),
                "range_over_std": 11 + 10 * rng.random(),
                "saturated_share": 0.0,
                "mean_abs_error": 0.003 + 0.002 * rng.random() + (0.004 if n == 17 else 0.0),
                "changed_codes_share": 0.008 + 0.008 * rng.random(),
            }
            for n, name in enumerate(names)
        ],
    }


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
        ramble = "Let us think. The first number has tens and ones, and so does the second. "
        ramble *= 11 if number == 3 else 1
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


class Checker(HTMLParser):
    """Collects what a page refers to and whether its tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":  # closes the cells of a heading row
            while self.open[-1] == "th":
                self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def checked(folder: Path) -> Checker:
    checker = Checker(write_report(folder).read_text(encoding="utf-8"))
    assert checker.open == []
    return checker


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = write_report(example_run(tmp_path / "grpo" / "demo")).read_text(encoding="utf-8")
    checker = Checker(page)
    assert checker.references == []
    assert "script" not in checker.tags
    assert "@import" not in page
    assert "url(" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_the_page_holds_every_part_of_a_full_run(tmp_path: Path) -> None:
    text = checked(example_run(tmp_path / "grpo" / "demo")).text
    for heading in (
        "grpo / demo",
        "Held-out reward rose from 0.203 to 0.781 in 60 steps.",
        "Does it learn?",
        "Reward by part",
        "Policy loss",
        "Gradient norm",
        "Divergence (KL)",
        "Importance ratio",
        "Effective sample share",
        "Log-prob gap between trainer and sampler",
        "Completion length",
        "Rollout speed",
        "Age of the data",
        "Where the time of a step goes",
        "What was lost on the way?",
        "Calibration",
        "2 ×: the proposed scales went live",
        "Quantization",
        "KL of the quantized policy",
        "Greedy reward",
        "Shift of the zero points",
        "Shift of the scales",
        "Changed codes",
        "Layers with the largest error",
        "Published weights",
        "quantized, 36 % of bfloat16",
        "Before and after",
        "Configuration",
    ):
        assert heading in text, heading


def test_every_picture_says_in_words_what_it_shows(tmp_path: Path) -> None:
    page = write_report(example_run(tmp_path / "x")).read_text(encoding="utf-8")
    figures = page.split("<figure")[1:]
    assert len(figures) >= 15
    for figure in figures:
        assert "<figcaption>" in figure
        assert 'role="img" aria-label="' in figure


def test_the_page_follows_the_theme_of_the_reader(tmp_path: Path) -> None:
    page = write_report(example_run(tmp_path / "x", steps=2)).read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in page
    body = page.split("</style>")[1]
    assert "#" not in body.split("<details class=card>")[0].replace("&#", "")  # no colour outside the style sheet


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_short_runs_get_a_page(tmp_path: Path, steps: int) -> None:
    folder = example_run(tmp_path / "x", steps=max(1, steps))
    if steps == 0:
        (folder / "metrics.jsonl").write_text("")
        (folder / "rollouts.jsonl").write_text("")
    (folder / "summary.json").unlink()
    text = checked(folder).text
    assert ("recorded no step" in text, "recorded one step" in text) == (steps == 0, steps == 1)
    assert ("Policy loss" in text) == (steps > 0)


def test_an_empty_folder_gets_a_page(tmp_path: Path) -> None:
    text = checked(tmp_path).text
    assert "no step yet" in text
    assert "No samples were recorded." in text


@pytest.mark.parametrize(
    "missing", ["config.yaml", "metrics.jsonl", "rollouts.jsonl", "calibration.jsonl", "samples.json", "summary.json"]
)
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    folder = example_run(tmp_path / "x", steps=4)
    (folder / missing).unlink()
    checked(folder)


def test_damaged_files_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=4)
    for name in ("metrics.jsonl", "rollouts.jsonl", "calibration.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'[1]\n{"step": "x"}\n{"step": 5, "reward/mean": null, "age/0": "y"}\n')
            file.write(b'{"step": "x", "policy": [1], "layers": {}, "reasons": 3, "action": {}}\n')
            file.write(b'{"step": 1e999, "seconds": 1e400}\n{"step": ' + b"9" * 400 + b', "policy": {"kl": "x"}}\n')
            file.write(b'\xff{"step": 6, "rew')
    (folder / "summary.json").write_text('{"status": 3, "steps": "many", "failures": [1], "max_age_bound": "x"}')
    (folder / "samples.json").write_text('[1, {"question": null, "reward_before": "a", "after": 5}]')
    checked(folder)


def test_a_failed_run_says_why_at_the_top(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=3)
    (folder / "summary.json").write_text('{"status": "failed", "error": "trainer rank 1: the process ended"}')
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.index("trainer rank 1: the process ended") < page.index("<section>")
    assert 'class="status bad">failed' in page


def test_text_of_the_run_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    folder = example_run(tmp_path / evil.replace("/", "_"), steps=3)
    (folder / "config.yaml").write_text(evil)
    sample = {"question": evil, "answer": evil, "before": evil, "after": evil, "reward_before": 0, "reward_after": 1}
    (folder / "samples.json").write_text(json.dumps([sample]))
    (folder / "summary.json").write_text(json.dumps({"status": evil, "error": evil, "failures": {evil: 2}}))
    calibration = {evil: evil, "action": evil, "reasons": [evil, {evil: evil}], "step": evil, "rows": evil}
    layer = {"layer": evil, "mean_abs_error": 0.1, "scale": evil}
    _write_lines(folder / "calibration.jsonl", [calibration | {"policy": {evil: evil, "kl": evil}, "layers": [layer]}])
    rows = [{"step": step, f"reward/{evil}": 0.5, "reward/b": 0.5, f"group/dropped_{evil}": 1} for step in (1, 2)]
    _write_lines(folder / "metrics.jsonl", rows)
    _write_lines(folder / "rollouts.jsonl", [{"step": 1, "failure": evil, "dropped": evil, "text": evil}])
    checker = checked(folder)
    assert not {"script", "img"} & set(checker.tags)
    assert evil in checker.text


def test_failures_are_listed_with_their_counts_and_reasons(tmp_path: Path) -> None:
    text = checked(example_run(tmp_path / "x")).text
    assert "generator 0" in text
    assert "steps with a non-finite loss or gradient" in text
    assert "expression took longer than 2 s" in text
    assert "writes to the run folder" not in text  # a count of 0


def test_samples_before_and_after_are_counted_and_kept_in_order(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=3)
    rewards = [(0, 1), (1, 0), (0.5, 0.5), (None, 1)]
    samples = [
        {"question": f"question {n}", "answer": "a", "before": "b", "after": "c", "reward_before": b, "reward_after": a}
        for n, (b, a) in enumerate(rewards)
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    text = checked(folder).text
    assert "2 better, 1 worse, 1 rewarded the same" in text
    assert [text.index(f"question {n}") for n in range(4)] == sorted(text.index(f"question {n}") for n in range(4))
    assert "no reward" in text


def test_without_held_out_samples_the_first_and_the_last_step_are_shown(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=5)
    (folder / "samples.json").unlink()
    text = checked(folder).text
    assert "Completions sampled in the first and in the last step." in text


def test_long_answers_are_folded_and_none_is_lost(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=2)
    long = "a" * report.LONG_TEXT + "b" * 1234
    (folder / "samples.json").write_text(json.dumps([{"question": "q", "before": long}]))
    checker = checked(folder)
    assert "1,234 more characters" in checker.text
    assert "".join(checker.texts).count("b" * 1234) == 1


def test_a_place_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="a report needs a run folder"):
        write_report(tmp_path / "nowhere")


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    folder = example_run(tmp_path / "x", steps=2)
    (folder / "report.html").mkdir()
    with pytest.raises(ForgeError, match=r"report.html cannot be written"):
        write_report(folder)
