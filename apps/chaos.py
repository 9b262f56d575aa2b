"""`forge chaos trials=N seed=S`: train small jobs, kill a random part of each at a random moment, check what must hold.

Each trial runs `forge grpo` on the tiny model in a folder of its own. It may recover, or end non-zero and name the part
within a minute; then it is resumed. After it is done, forge.chaos checks the run folder and the process table.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from forge.chaos import CONTROLLER, Strike, draw, losses_of, processes, violations
from forge.errors import ConfigError

STEPS, PROMPTS, MEMBERS = 6, 2, 4
HANG_TIMEOUT_S = 15
ENDS_WITHIN_S = 60.0
GONE_WITHIN_S = 5.0
"""How long processes may take to be gone after their job: workers look for their controller every second."""
JOB = (
    "model=tiny", "data=task", "data.task=chain_sum", "data.rows=40", "data.heldout=0", f"steps={STEPS}",
    f"prompts_per_step={PROMPTS}", f"group_size={MEMBERS}", "trainer.micro_batch=4", "trainer.ranks=1",
    "trainer.lr=1e-4", "sampling.max_new_tokens=16", "reward.name=chaos_reward:Even", "tracker.tensorboard=false",
    "checkpoint.every=2", "checkpoint.export=false", f"hang_timeout_s={HANG_TIMEOUT_S}", "out=runs", "name=c",
)  # fmt: skip
KINDS = {
    "synchronous": ("async.max_age=0",),
    "ahead": ("async.max_age=1", "generator.replicas=2"),
    "quantized": ("async.max_age=1", "algo.kl=0.05", "quant.scheme=int8_static", "calibration.every=2",
                  "calibration.prompts=4", "calibration.samples=8", "calibration.min_rows=4"),
}  # fmt: skip
AGE_BOUND = {"synchronous": 0, "ahead": 1, "quantized": 1}
PARTS = {
    "synchronous": ("generator-0", "trainer", "weight-store", "reward", "reward worker", CONTROLLER),
    "ahead": ("generator-0", "generator-1", "trainer", "weight-store", "reward", CONTROLLER),
    "quantized": ("generator-0", "trainer", "weight-store", "reward", "reference", "calibrator", CONTROLLER),
}
REWARD = """
from forge import Episode, Reward


class Even(Reward):
    def __call__(self, episode: Episode) -> float:
        ids = episode.completion.token_ids
        return sum(t % 2 == 0 for t in ids) / max(1, len(ids))
"""


def run_job(folder: Path, kind: str, strike: Strike | None, *more: str) -> tuple[int, str, float | None]:
    """Run the job once; returns its status, its output, and seconds from the strike to its end (None: no strike)."""
    out: list[str] = []
    struck: list[float] = []
    with subprocess.Popen(
        [sys.executable, "-m", "forge.apps", "grpo", *JOB, *KINDS[kind], *more],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    ) as job:  # fmt: skip
        limit = threading.Timer(600, job.kill)
        limit.start()

        def hit() -> None:
            assert strike is not None
            pids = [job.pid] if strike.victim == CONTROLLER else processes(job.pid).get(strike.victim, [])
            if pids:
                os.kill(pids[0], strike.number)
                struck.append(time.monotonic())

        marker = None if strike is None else ("evaluating before" if strike.step == 0 else f"step {strike.step}/")
        assert job.stdout is not None
        try:
            for line in job.stdout:
                out.append(line)
                if marker is not None and strike is not None and marker in line:
                    marker = None
                    threading.Timer(strike.delay_s, hit).start()
            status = job.wait()
        finally:
            limit.cancel()
            job.terminate()
    return status, "".join(out), time.monotonic() - struck[0] if struck else None


def trial(folder: Path, kind: str, strike: Strike, losses: dict[int, float]) -> tuple[list[str], str]:
    """One job, struck once; returns what did not hold, and what happened in a word."""
    (folder / "chaos_reward.py").write_text(REWARD)
    before = set(Path("/dev/shm").iterdir())
    status, out, seconds = run_job(folder, kind, strike)
    problems: list[str] = []
    outcome = "not struck" if seconds is None else "recovered"
    if status != 0:
        outcome = "resumed"
        if strike.victim == CONTROLLER:
            problems += [f"it outlived its controller: {p}" for p in still_running(folder)]
        elif seconds is not None and seconds > ENDS_WITHIN_S:
            problems.append(f"it took {seconds:.0f} s to end")
        if strike.victim != CONTROLLER and strike.victim.replace("-", " ").removesuffix(" worker") not in out:
            problems.append(f"it ended with status {status} and did not name {strike.victim}: {out[-300:]}")
        status, out, _ = run_job(folder, kind, None, "resume=auto")
        if status != 0:
            problems.append(f"the resumed run ended with status {status}: {out[-500:]}")
    if status == 0:
        problems += violations(
            folder / "runs/grpo/c", steps=STEPS, prompts_per_step=PROMPTS, group_size=MEMBERS,
            age_bound=AGE_BOUND[kind], losses=losses if kind == "synchronous" else None,
        )  # fmt: skip
    if left_running := still_running(folder):
        problems.append(f"processes left behind: {left_running}")
    if left := sorted(p.name for p in set(Path("/dev/shm").iterdir()) - before):
        problems.append(f"shared memory left behind: {left[:3]}")
    return problems, outcome


def still_running(folder: Path) -> list[str]:
    """Processes that work in a trial's folder, also `GONE_WITHIN_S` after its job ended."""
    for _ in range(int(GONE_WITHIN_S / 0.1)):
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{entry.name} {command[:200]}")
            except OSError:
                continue
        if not found:
            return []
        time.sleep(0.1)
    return found


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status: 1 when something did not hold."""
    from forge.apps.common import refuse

    try:
        trials, seed = _arguments(argv)
    except ConfigError as error:
        return refuse(error)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job under way ends as well
    random = Random(seed)
    log = Path("runs/chaos.jsonl")
    log.parent.mkdir(exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="forge-chaos-") as scratch, log.open("w") as lines:
        quiet = Path(scratch) / "undisturbed"
        quiet.mkdir()
        (quiet / "chaos_reward.py").write_text(REWARD)
        status, out, _ = run_job(quiet, "synchronous", None)
        if status != 0:
            sys.stderr.write(f"forge: the undisturbed job ended with status {status}: {out[-1000:]}\n")
            return 1
        losses = losses_of(quiet / "runs/grpo/c")
        for number in range(1, trials + 1):
            kind = random.choice(list(KINDS))
            strike = draw(random, PARTS[kind], steps=STEPS, can_hang=("generator-0", "generator-1"))
            folder = Path(scratch) / f"trial-{number}"
            folder.mkdir()
            start = time.monotonic()
            problems, outcome = trial(folder, kind, strike, losses)
            failed += bool(problems)
            row = {
                "trial": number, "kind": kind, "victim": strike.victim, "signal": strike.number.name,
                "after_step": strike.step, "delay_s": round(strike.delay_s, 2), "outcome": outcome,
                "seconds": round(time.monotonic() - start, 1), "problems": problems,
            }  # fmt: skip
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            sys.stdout.write(
                f"{number:3}/{trials} {kind:12} {strike.number.name} {strike.victim:14} after step {strike.step}: "
                f"{outcome}, {'; '.join(problems) or 'all holds'}\n"
            )
            sys.stdout.flush()
            if not problems:
                shutil.rmtree(folder)
    sys.stdout.write(f"{trials - failed} of {trials} trials hold every invariant (seed={seed}); {log}\n")
    return 1 if failed else 0


def _arguments(argv: Sequence[str]) -> tuple[int, int]:
    """trials and seed from key=value arguments."""
    values = {"trials": 10, "seed": 0}
    for text in argv:
        key, equals, value = text.partition("=")
        if key not in values or not equals or not value.isdigit():
            raise ConfigError(f"forge chaos takes trials=N and seed=S with whole numbers, got {text!r}")
        values[key] = int(value)
    if values["trials"] < 1:
        raise ConfigError("trials must be at least 1, got 0")
    return values["trials"], values["seed"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
