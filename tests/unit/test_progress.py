import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Mapping
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from forge.progress import BLOCKS, Progress, sparkline, summary_rows, summary_table, trend_of

METRICS: Mapping[str, float] = {
    "reward/mean": 0.4123,
    "rollout/tokens_per_second": 1240.4,
    "age/max": 1.0,
    "weights/sync_seconds": 0.31,
    "time/step_seconds": 4.0,
    "time/wait_batch_seconds": 1.0,
    "loss/policy": -0.0123,
    "trainer/grad_norm": 0.82,
    "trainer/lr": 1e-5,
    "failures/total": 2.0,
}
SUMMARY: Mapping[str, Any] = {
    "status": "done",
    "steps": 20,
    "wall_seconds": 303.2,
    "reward_first3": 0.21,
    "reward_last5": 0.834,
    "heldout_before": 0.19,
    "heldout_after": None,
    "tokens_per_second": 12403.3,
    "weight_sync_seconds": 0.31,
    "peak_rss_gib": 6.21,
    "failures": {"generator 0": 1},
    "export": "runs/grpo/demo/export",
}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")

SCRIPT = textwrap.dedent(
    """
    import sys
    from forge.progress import Progress
    with Progress(total_steps=3, title="grpo tiny") as p:
        p.stage("starting generator 0", waiting_for="vLLM to load the model")
        for step in (1, 2, 3):
            p.step(step, {"reward/mean": step / 4, "loss/policy": 0.5})
            if step == 2:
                p.note("generator 0 was restarted \\x1b[31m[bold]")
        p.summary({"status": "done", "steps": 3})
    """
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_piped(**env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0
    return done.stdout.decode()


def run_on_terminal(columns: int = 80, script: str = SCRIPT, **env: str) -> str:
    """Everything the script sends to a terminal of that width."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **env}
    child = subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=side, stdout=side, stderr=side)
    os.close(side)
    received = bytearray()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.2)[0]:
            try:
                data = os.read(main, 65536)
            except OSError:  # Linux says EIO when the other side is closed
                break
            if not data:
                break
            received += data
    os.close(main)
    assert child.wait(10) == 0, received.decode()
    return received.decode()


def drawn(progress: Progress, width: int, encoding: str = "utf-8") -> list[str]:
    """The lines of the live display at a width, without styles."""
    progress._out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(progress)
    return capture.get().rstrip("\n").split("\n")


def in_the_middle(clock: Clock | None = None, steps: int = 12) -> Progress:
    clock = clock or Clock()
    progress = Progress(total_steps=20, title="grpo smollm2 · runs/grpo/demo", clock=clock, file=io.StringIO())
    for step in range(1, steps + 1):
        clock.now += 4.0
        progress.step(step, {**METRICS, "reward/mean": step / 20})
    return progress


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}, {"TERM": "xterm-256color"}])
def test_a_pipe_gets_plain_lines_without_any_control_code(env: dict[str, str]) -> None:
    output = run_piped(**env)
    assert CONTROL.search(output) is None
    assert output.isascii()
    steps = [line for line in output.splitlines() if "step " in line and "/3" in line]
    assert [re.search(r"step (\d)/3", line)[1] for line in steps] == ["1", "2", "3"]  # type: ignore[index]
    assert "starting generator 0 (waiting for vLLM to load the model)" in output
    assert "note: generator 0 was restarted  [31m[bold]" in output


def test_a_terminal_gets_a_live_display_and_its_cursor_back() -> None:
    output = run_on_terminal()
    assert "\x1b[?25l" in output  # cursor hidden while drawing
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert re.search(r"\x1b\[[0-9;]*3\dm", output)  # colours
    assert "3/3" in output
    assert "restarted  [31m[bold]" in output


def test_no_color_means_no_colours() -> None:
    output = run_on_terminal(NO_COLOR="1")
    styles = {code for found in re.findall(r"\x1b\[([0-9;]*)m", output) for code in found.split(";")}
    assert styles <= {"", "0", "1", "2"}  # bold and dim only
    assert "3/3" in output


def test_a_dumb_terminal_is_treated_as_a_pipe() -> None:
    output = run_on_terminal(TERM="dumb")
    assert CONTROL.search(output.replace("\r\n", "\n")) is None
    assert "step 3/3" in output


def test_the_terminal_is_restored_when_the_run_fails() -> None:
    script = (
        "from forge.progress import Progress\n"
        "try:\n"
        "    with Progress(total_steps=3) as p:\n"
        "        p.stage('starting trainer')\n"
        "        raise RuntimeError('boom')\n"
        "except RuntimeError: pass\n"
    )
    output = run_on_terminal(script=script)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert "x \x1b[0mstarting trainer" in output
    assert "step 1" not in output.rsplit("\x1b[2K", 1)[1]  # no spinner is left behind: the last one was erased


@pytest.mark.parametrize("width", [20, 40, 41, 53, 64, 79, 80, 100, 127, 200])
def test_no_line_is_wider_than_the_terminal_at_any_width(width: int) -> None:
    progress = in_the_middle()
    progress.stage("evaluating 64 held-out rows", waiting_for="generator 0 to finish its long answers")
    lines = drawn(progress, width)
    assert max(cell_len(line) for line in lines) <= width
    assert sum("step 12/20" in line for line in lines) == 1
    assert sum("failures" in line for line in lines) == 1
    if width >= 40:
        assert "60 %" in "\n".join(lines)
        assert "0.6 ↗" in "\n".join(lines)


def test_the_display_shows_each_number_with_its_unit() -> None:
    text = "\n".join(drawn(in_the_middle(), 80))
    for shown in ("-0.0123", "0.82", "1.0e-05", "1,240", "0.31 s", "4.0 s", "25 %", "48.0 s, 32.0 s left"):
        assert shown in text, shown


def test_a_terminal_that_cannot_show_unicode_gets_ascii() -> None:
    progress = in_the_middle()
    progress.stage("naïve")
    lines = drawn(progress, 80, encoding="ascii")
    lines = [line for line in lines if "12/20" not in line]  # the bar is drawn by rich, which asks the console
    assert "\n".join(lines).isascii()
    assert "up" in "\n".join(lines)


def test_absent_numbers_are_dashes() -> None:
    out = io.StringIO()
    with Progress(total_steps=2, file=out) as p:
        p.step(1, {"reward/mean": float("nan")})
    line = out.getvalue()
    assert "reward - | loss - | grad - | lr - | tok/s - | age - | sync -" in line


def test_the_stage_shows_what_it_waits_for_and_how_long() -> None:
    clock = Clock()
    progress = Progress(total_steps=3, clock=clock, file=io.StringIO())
    progress.stage("starting generator 0", waiting_for="vLLM")
    clock.now += 12
    assert drawn(progress, 80)[-1].endswith("starting generator 0: waiting for vLLM  12.0 s")


def test_time_left_follows_the_recent_pace() -> None:
    clock = Clock()
    progress = in_the_middle(clock)
    # 12 steps of 4 s done, 8 to go
    assert progress.seconds_left == pytest.approx(32.0, rel=1e-9)


def test_a_resumed_run_counts_only_the_steps_it_made_itself() -> None:
    clock = Clock()
    progress = Progress(total_steps=20, clock=clock, file=io.StringIO())
    for step in (11, 12):
        clock.now += 3.0
        progress.step(step, {"time/step_seconds": 3.0})
    assert progress.seconds_left == pytest.approx(24.0, rel=1e-9)


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    code = (
        "import os, sys; from forge.progress import Progress\n"
        "r, w = os.pipe(); os.close(r)\n"
        "with Progress(total_steps=2, title='t', file=os.fdopen(w, 'w')) as p:\n"
        "    p.stage('a'); p.step(1, {}); p.note('b'); p.step(2, {}); p.summary({'status': 'done'})\n"
        "print('end'); sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_closed_stream_does_not_stop_the_run() -> None:
    out = io.StringIO()
    with Progress(total_steps=1, file=out) as p:
        out.close()
        p.step(1, METRICS)
        p.note("x")


def test_plain_lines_fit_the_encoding_of_the_stream() -> None:
    raw = io.BytesIO()
    with Progress(total_steps=1, title="日本", file=io.TextIOWrapper(raw, encoding="ascii")) as p:
        p.step(1, METRICS)
    assert raw.getvalue().startswith(b"??\n")


def test_the_plain_summary_is_aligned_and_says_what_each_number_is() -> None:
    out = io.StringIO()
    summary_table(SUMMARY, file=out)
    assert out.getvalue().splitlines() == [
        "status                done",
        "steps                 20",
        "reward                0.21 -> 0.834  (mean of steps 1-3, 16-20)",
        "held-out reward       0.19 -> -  (after step 0, after step 20)",
        "wall time             5:03",
        "tokens/s              12,403",
        "weight sync (median)  0.31 s",
        "peak memory           6.2 GiB",
        "failures              generator 0 1",
        "export                runs/grpo/demo/export",
    ]


def test_a_summary_says_which_steps_its_means_are_of() -> None:
    def shown(**numbers: Any) -> list[tuple[str, str]]:
        return [row for row in summary_rows(SUMMARY | numbers) if row[0] in ("resumed from step", "reward")]

    assert shown(steps=2) == [("reward", "0.21 -> 0.834  (mean of steps 1-2, 1-2)")]
    assert shown(resumed_from_step=None, steps=20) == [("reward", "0.21 -> 0.834  (mean of steps 1-3, 16-20)")]
    assert shown(resumed_from_step=10, steps=12) == [
        ("resumed from step", "10"),
        ("reward", "0.21 -> 0.834  (mean of steps 11-12, 11-12)"),
    ]


def test_one_clock_for_the_log_and_the_summary() -> None:
    out = io.StringIO()
    with Progress(total_steps=1, file=out, began=100.0, clock=lambda: 104.5) as p:
        p.stage("checking model and data")
    assert out.getvalue().splitlines()[0].startswith("[4.5 s] checking")


def test_an_empty_summary_prints_nothing() -> None:
    assert summary_rows({}) == []
    out = io.StringIO()
    summary_table({}, file=out)
    assert out.getvalue() == ""


def test_the_summary_holds_every_key_it_was_given() -> None:
    rows = summary_rows({"status": "failed", "reason": "trainer: nan", "odd": [1, 2.5], "none": {}, "x": float("nan")})
    assert rows == [("status", "failed"), ("reason", "trainer: nan"), ("odd", "1, 2.5"), ("none", "none"), ("x", "-")]


def test_a_summary_on_a_terminal_uses_arrows() -> None:
    script = f"from forge.progress import summary_table\nsummary_table({dict(SUMMARY)!r})"
    assert "0.21 → 0.834" in run_on_terminal(script=script)


def test_a_sparkline_spans_its_range_and_is_flat_for_equal_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert sparkline([0.5, 0.5]) == "▅▅"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("rewards", "trend"),
    [
        ([0.1] * 5 + [0.4] * 5, "up"),
        ([0.4] * 5 + [0.1] * 5, "down"),
        ([0.3] * 10, "level"),
        ([0.2], "level"),
        ([0.0, 1.0] + [0.5] * 5 + [0.51] * 5, "level"),  # 0.01 of a range of 1
        ([], "level"),
    ],
)
def test_the_trend_compares_the_last_steps_with_those_before(rewards: list[float], trend: str) -> None:
    assert trend_of(rewards)[0] == trend


def test_failures_that_did_not_happen_are_not_listed() -> None:
    assert summary_rows({"failures": {"reward": 0, "generator 0": 2, "trackers/failed": 0.0}}) == [
        ("failures", "generator 0 2")
    ]
    assert summary_rows({"failures": {"reward": 0}}) == [("failures", "none")]
