"""What a person sees while a run goes on.

On a terminal a live display:

    ✓ starting generator 0  8.4 s
    grpo smollm2 · runs/grpo/demo
    step 12/20 ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━ 60 %  1:24, 56.0 s left
    reward           0.412 ↗ ▁▂▂▃▄▅▅▆▇█
    loss           -0.0123   grad norm         0.82   lr             1.0e-05
    tokens/s         1,240   age max              1   weight sync     0.31 s
    trainer idle      12 %   gen. idle         30 %   step             4.2 s
    failures             0
    ⠋ step 13  3.2 s

Anywhere else (a pipe, a log file, a notebook, TERM=dumb) plain ASCII lines, one a step, without control codes.
Showing progress never stops a run: a stream that is gone is left alone.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from forge.formats import duration, number

REFRESHES_PER_SECOND = 8
TREND_STEPS = 5
"""The trend compares the mean reward of the last so many steps with that of as many before them."""
TREND_SHARE = 0.05
"""A difference below this share of the range seen so far counts as level."""
RECENT_STEPS = 20
"""The time left is estimated from the pace of the last so many steps."""
NARROWEST = 20
"""Columns below which nothing sensible fits; narrower terminals are drawn as if this wide, cut off."""
CELL_WIDTH = 25
"""Columns of one number with its name, the gap included."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#"


@dataclass(kw_only=True, slots=True, frozen=True)
class _Cell:
    """One number of the display."""

    name: str
    short: str
    """Name in a plain line."""
    value: Callable[[Mapping[str, float]], float | None]
    form: Callable[[float], str]


def _key(name: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda metrics: metrics.get(name)


def _trainer_idle(metrics: Mapping[str, float]) -> float | None:
    share = metrics.get("idle/trainer_share")
    waited, step = metrics.get("time/wait_batch_seconds"), metrics.get("time/step_seconds")
    if share is None and waited is not None and step:
        return min(1.0, waited / step)
    return share


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else duration(value)


CELLS: Sequence[_Cell] = (
    _Cell(name="loss", short="loss", value=_key("loss/policy"), form=number),
    _Cell(name="grad norm", short="grad", value=_key("trainer/grad_norm"), form=number),
    _Cell(name="lr", short="lr", value=_key("trainer/lr"), form=lambda v: f"{v:.1e}"),
    _Cell(name="tokens/s", short="tok/s", value=_key("rollout/tokens_per_second"), form=lambda v: f"{v:,.0f}"),
    _Cell(name="age max", short="age", value=_key("age/max"), form=lambda v: f"{v:.0f}"),
    _Cell(name="weight sync", short="sync", value=_key("weights/sync_seconds"), form=_seconds),
    _Cell(name="trainer idle", short="trainer idle", value=_trainer_idle, form=_percent),
    _Cell(name="gen. idle", short="gen idle", value=_key("idle/generator_share"), form=_percent),
    _Cell(name="step", short="step time", value=_key("time/step_seconds"), form=_seconds),
    _Cell(name="failures", short="failures", value=_key("failures/total"), form=lambda v: f"{v:.0f}"),
)
"""What is shown besides the reward, in order; a number that is absent is a dash."""


class Progress:
    """Shows the stages of the start, then each step; a context manager.

    Example:
        with Progress(total_steps=20, title="grpo smollm2") as p:
            p.stage("starting generator 0", waiting_for="vLLM to load the model")
            p.step(1, {"reward/mean": 0.25})
            p.note("generator 0 was restarted")

    Args:
        total_steps: steps of the whole run; a resumed run starts its bar where it continues.
        title: first line of the display.
        file: where to write; by default standard output.
        began: when the command began, on the clock; by default now.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        title: str = "",
        file: TextIO | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.title = _printable(title)
        self.metrics: Mapping[str, float] = {}
        self.current = 0
        self.rewards: list[float] = []
        self._out = sys.stdout if file is None else file
        self._clock = clock
        self._begin = clock() if began is None else began
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS + 1)
        self._stage: tuple[str, str, float] | None = None
        self._live: Live | None = None
        self._over = False
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        if is_terminal(self._out):
            console = Console(file=self._out, highlight=False, markup=False)
            self._live = Live(self, console=console, refresh_per_second=REFRESHES_PER_SECOND)
            self._guarded(self._live.start)
        elif self.title:
            self._line(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_stage(finished=kind is None)
        self._stop()

    def stage(self, what: str, waiting_for: str = "") -> None:
        """Says what happens now, and what it waits for; ends the stage before."""
        self._end_stage(finished=True)
        self._stage = (_printable(what), _printable(waiting_for), self._clock())
        if self._live is None:
            waits = f" (waiting for {self._stage[1]})" if waiting_for else ""
            self._line(f"{self._gone()} {self._stage[0]}{waits}")
        else:
            self._guarded(self._live.refresh)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step (1-based) and its metrics."""
        self._end_stage(finished=True)
        now = self._clock()
        if not self._ends:
            took = metrics.get("time/step_seconds", math.nan)
            self._ends.append((now - took if _is_finite(took) else self._begin, step - 1))
        self._ends.append((now, step))
        self.current = step
        self.metrics = {key: value for key, value in metrics.items() if _is_finite(value)}
        if (reward := self.metrics.get("reward/mean")) is not None:
            self.rewards.append(reward)
        if self._live is None:
            self._line(self._plain_step())
        else:
            self._guarded(self._live.refresh)

    def note(self, text: str) -> None:
        """Says something once, above the display."""
        if self._live is None:
            self._line(f"{self._gone()} note: {_printable(text)}")
        else:
            self._above(Text.assemble(("! ", "yellow"), self._encodable(_printable(text))))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Prints the final table below everything; see `summary_table`."""
        self._end_stage(finished=True)
        self._stop()
        summary_table(summary, file=self._out)

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace of the recent steps; None before the first."""
        if len(self._ends) < 2:
            return None
        (start, first), (end, last) = self._ends[0], self._ends[-1]
        return (end - start) / max(1, last - first) * max(0, self.total_steps - last)

    def _end_stage(self, *, finished: bool) -> None:
        if self._stage is None:
            return
        what, _, begin = self._stage
        self._stage = None
        if self._live is not None:
            mark = ("✓ " if self._unicode() else "+ ", "green") if finished else ("x ", "red")
            took = (f"  {_seconds(self._clock() - begin)}", "dim")
            self._above(Text.assemble(mark, self._encodable(what), took))

    # Live display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The display, each line cut to the width of the terminal."""
        width = max(options.max_width, NARROWEST)
        lines: list[Text | Table] = []
        if self.title:
            lines.append(Text(self._encodable(self.title), style="bold"))
        if self.current:
            lines += [self._bar(width), self._reward_line(width), *self._cell_lines(width)]
        if not self._over:
            lines.append(self._now_line())
        for at, line in enumerate(lines):
            if at:
                yield Segment.line()
            if isinstance(line, Text):
                line.truncate(options.max_width, overflow="ellipsis" if self._unicode() else "crop")
                yield from line.render(console, end="")
            else:
                rendered = console.render_lines(line, options.update(width=width), pad=False)
                yield from Segment.adjust_line_length(list(rendered[0]), options.max_width)

    def _bar(self, width: int) -> Table:
        head = f"step {self.current}/{self.total_steps}"
        tail = f"{100 * self.current / max(1, self.total_steps):.0f} %"
        left = self.seconds_left
        times = duration(self._clock() - self._begin) + (f", {duration(left)} left" if left is not None else "")
        if width >= len(head) + len(tail) + len(times) + 14:
            tail = f"{tail}  {times}"
        grid = Table.grid(padding=(0, 1))
        room = max(4, width - len(head) - len(tail) - 2)
        done = min(self.current, self.total_steps)
        bar = ProgressBar(self.total_steps, done, width=room)
        grid.add_row(Text(head, no_wrap=True), bar, Text(tail, no_wrap=True))
        return grid

    def _reward_line(self, width: int) -> Text:
        line = Text("reward".ljust(13), style="dim")
        if not self.rewards:
            return line.append("—" if self._unicode() else "-", style="default not dim")
        trend, style = trend_of(self.rewards)
        blocks = BLOCKS if self._unicode() else ASCII_BLOCKS
        arrow = {"up": "↗", "down": "↘", "level": "→"}[trend] if self._unicode() else trend
        line.append(f"{number(self.rewards[-1]):>9} ", style="bold not dim")
        line.append(f"{arrow} ", style=f"{style} not dim")
        return line.append(sparkline(self.rewards[-max(0, width - 26) :], blocks), style=f"{style} not dim")

    def _cell_lines(self, width: int) -> list[Text]:
        columns = max(1, (width + 3) // CELL_WIDTH)
        columns = min(columns, 5)
        dash = "—" if self._unicode() else "-"
        lines = []
        for begin in range(0, len(CELLS), columns):
            line = Text()
            for cell in CELLS[begin : begin + columns]:
                value = cell.value(self.metrics)
                text = dash if value is None else cell.form(value)
                alarm = cell.name == "failures" and value
                line.append(cell.name.ljust(13), style="dim")
                line.append(text.rjust(9), style="bold red" if alarm else "default").append("   ")
            line.rstrip()
            lines.append(line)
        return lines

    def _now_line(self) -> Text:
        now = self._clock()
        frame = self._spinner.render(now) if self._unicode() else Text("-\\|/"[int(now * 4) % 4])
        line = Text.assemble((frame.plain if isinstance(frame, Text) else "", "cyan"), " ")
        if self._stage is not None:
            what, waiting_for, begin = self._stage
            line.append(self._encodable(what))
            if waiting_for:
                line.append(self._encodable(f": waiting for {waiting_for}"), style="dim")
            return line.append(f"  {duration(now - begin)}", style="dim")
        if self.current >= self.total_steps:
            return line.append("finishing", style="dim")
        begin = self._ends[-1][0] if self._ends else self._begin
        return line.append(f"step {self.current + 1}  {duration(now - begin)}", style="dim")

    def _above(self, text: Text) -> None:
        live = self._live
        if live is not None:
            self._guarded(lambda: live.console.print(text, overflow="fold", soft_wrap=False))

    def _guarded(self, show: Callable[[], object]) -> None:
        try:
            show()
        except (OSError, ValueError):  # the terminal is gone; the run is not
            self._out = _Nowhere()
            self._stop()

    def _stop(self) -> None:
        """Leaves the last state on the screen and gives the cursor back."""
        self._over = True
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, ValueError):
                live.stop()

    def _unicode(self) -> bool:
        return (getattr(self._out, "encoding", None) or "").lower().startswith("utf")

    def _encodable(self, text: str) -> str:
        return _encodable(text, self._out)

    # Plain lines

    def _line(self, text: str) -> None:
        _write_line(self._out, text)

    def _gone(self) -> str:
        return f"[{duration(self._clock() - self._begin)}]"

    def _plain_step(self) -> str:
        reward = self.metrics.get("reward/mean")
        shown = "-" if reward is None else f"{number(reward)} {trend_of(self.rewards)[0]}"
        parts = [f"step {self.current}/{self.total_steps}", f"reward {shown}"]
        for cell in CELLS:
            value = cell.value(self.metrics)
            parts.append(f"{cell.short} {'-' if value is None else cell.form(value)}")
        left = self.seconds_left
        parts.append(f"left {'-' if left is None else duration(left)}")
        return f"{self._gone()} {' | '.join(parts)}"


# Summary ---------------------------------------------------------------------------------------------------------

_SUMMARY_NAMES = {
    "status": "status",
    "steps": "steps",
    "resumed_from_step": "resumed from step",
    "wall_seconds": "wall time",
    "time_to_first_step_seconds": "time to first step",
    "tokens_per_second": "tokens/s",
    "max_age_measured": "largest age",
    "max_age_bound": "age bound",
    "weight_sync_seconds": "weight sync (median)",
    "peak_rss_gib": "peak memory",
    "failures": "failures",
}


def _summary_pairs(summary: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Rows made of two numbers: both keys, and what they are. After a resume only the steps since then count."""
    begin, end = summary.get("resumed_from_step") or 0, summary.get("steps") or 0
    return {
        "reward": (
            "reward_first3",
            "reward_last5",
            f"mean of steps {begin + 1}-{min(begin + 3, end)}, {max(begin + 1, end - 4)}-{end}",
        ),
        "held-out reward": ("heldout_before", "heldout_after", f"after step {begin}, after step {end}"),
    }


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as names and values a person reads; keys without a name of their own follow as they are."""
    left = dict(summary)
    if left.get("resumed_from_step") is None:
        left.pop("resumed_from_step", None)
    if isinstance(failures := left.get("failures"), Mapping):
        left["failures"] = {part: count for part, count in failures.items() if count}
    rows: list[tuple[str, str]] = []
    for name, (before, after, meaning) in _summary_pairs(summary).items():
        if before in left or after in left:
            first, last = left.pop(before, None), left.pop(after, None)
            rows.append((name, f"{_plain_value('', first)} -> {_plain_value('', last)}  ({meaning})"))
    named = [(name, _plain_value(key, left.pop(key))) for key, name in _SUMMARY_NAMES.items() if key in left]
    others = [(key.replace("_", " "), _plain_value(key, value)) for key, value in left.items()]
    head = sum(name in ("status", "steps", "resumed from step") for name, _ in named)
    return [(name, _printable(value)) for name, value in [*named[:head], *rows, *named[head:], *others]]


def summary_table(summary: Mapping[str, Any], *, file: TextIO | None = None) -> None:
    """Prints the summary of a run, as a table on a terminal and as plain lines anywhere else."""
    out = sys.stdout if file is None else file
    rows = summary_rows(summary)
    if not is_terminal(out):
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            _write_line(out, f"{name.ljust(width)}  {value}")
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    unicode = (getattr(out, "encoding", None) or "").lower().startswith("utf")
    for name, value in rows:
        good = name == "status" and value == "done"
        style = ("bold green" if good else "bold red") if name == "status" else ""
        shown = value.replace("->", "→") if unicode else value
        table.add_row(Text(_encodable(name, out)), Text(_encodable(shown, out), style=style))
    with suppress(OSError, ValueError):
        Console(file=out, highlight=False, markup=False).print(table)


def _plain_value(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain_value('', item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain_value("", item) for item in value) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return "-"
    if key.endswith("_seconds"):
        return _seconds(value)
    if key.endswith("_gib"):
        return f"{value:.1f} GiB"
    return f"{value:,}" if isinstance(value, int) else number(value)


# Small parts -----------------------------------------------------------------------------------------------------


def is_terminal(stream: TextIO) -> bool:
    """True where cursor movement works; a set FORCE_COLOR does not make a pipe a terminal."""
    with suppress(ValueError, AttributeError):  # closed, or not a real stream
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    return False


def sparkline(values: Sequence[float], blocks: str = BLOCKS) -> str:
    """One character a value between the smallest and the largest; equal values are drawn at middle height."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[min(len(blocks) - 1, int((v - low) / (high - low) * len(blocks)))] for v in values)


def trend_of(rewards: Sequence[float]) -> tuple[str, str]:
    """("up" | "down" | "level", its style) of the last steps against those before."""
    recent, before = rewards[-TREND_STEPS:], rewards[-2 * TREND_STEPS : -TREND_STEPS] or rewards[:1]
    difference = fmean(recent) - fmean(before) if recent else 0.0
    if abs(difference) <= TREND_SHARE * (max(rewards, default=0.0) - min(rewards, default=0.0)):
        return "level", "cyan"
    return ("up", "green") if difference > 0 else ("down", "yellow")


class _Nowhere(io.StringIO):
    """Stands in for a stream that is gone."""

    def write(self, text: str) -> int:
        """Takes the text and forgets it."""
        return len(text)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _printable(text: str) -> str:
    """One line without control codes, whatever an error message brings along."""
    return "".join(c if c.isprintable() else " " for c in text)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding, "replace")


def _write_line(stream: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # closed, or nobody reads any more
        stream.write(_encodable(text, stream) + "\n")
        stream.flush()
