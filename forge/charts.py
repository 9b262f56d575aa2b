"""Charts as inline SVG text: no script, no font, no network, and colours that follow the page's theme.

    series ── line_chart / stacked_bars / histogram / bar_rows ── "<svg …>" to be put into a page with CHART_STYLE

Colours are the page's CSS variables --c0 … --c5 (one a series), --good, --warn, --bad, --ink, --muted and --grid, so
that one picture is right in light and dark. Each chart has a text for screen readers, and shows the values under the
pointer.
Sizes are in units of the view box; the page scales the picture to the width it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import fmean

from forge.formats import number

WIDTH, WIDE, HEIGHT = 560, 1130, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 34
"""Margins: room for the numbers of the y axis, the values under the pointer and the x axis."""
MOST_POINTS = 240
"""Of more steps than this, neighbours are drawn together; a screen shows no more."""
COLOURS = 6
BEHIND = ("band", "rule")
"""Looks of series that are on or off rather than high or low: drawn behind the lines, over the whole height."""
SHAPES = {
    "dot": "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0Z",
    "ring": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0Z",
    "cross": "M-4,-4L4,4M-4,4L4,-4",
    "down": "M-5.5,-4.5L5.5,-4.5L0,5.5Z",
    "diamond": "M0,-6L6,0L0,6L-6,0Z",
}
"""Outlines of marks around their middle: told apart by shape too, since not everybody sees the colours."""
SMALLEST = 1e-290
"""A span of an axis below which its steps could not be told from 0."""
LETTER = 6.5
"""Width of a letter in units of the view box, a little more than the mean of a proportional font."""
MOST_NAME = 46
"""Characters of a bar's name; of a longer one, the end is shown, where layers differ."""

CHART_STYLE = """
svg.chart { display: block; width: 100%; height: auto; font: 11px var(--font, sans-serif); overflow: visible; }
.chart text { fill: var(--muted); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .axis { stroke: var(--muted); stroke-width: 1; opacity: .6; }
.chart .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.chart .faint { stroke-width: 1.2; opacity: .55; }
.chart .thin { stroke-width: 1.4; }
.chart .many { stroke-width: 1.2; }
.chart .dashed { stroke-dasharray: 6 5; stroke-width: 2; }
.chart .halo { stroke: var(--card); stroke-width: 4.5; }
.chart .mark { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 3; }
.chart text.strong { fill: var(--ink); }
.chart .hit rect { fill: transparent; }
.chart .hit line, .chart .hit circle, .chart .hit text { opacity: 0; }
.chart .hit line { stroke: var(--muted); stroke-width: 1; }
.chart .hit text { fill: var(--ink); }
.chart .hit:hover line, .chart .hit:hover circle, .chart .hit:hover text { opacity: 1; }
.chart .bar:hover { opacity: .8; }
.chart .band { opacity: .14; }
.chart .rule { stroke-width: 1.2; stroke-dasharray: 4 4; }
.chart .at { fill: currentColor; stroke: var(--card); stroke-width: 1.2; }
.chart .at.ring { fill: var(--card); stroke: currentColor; stroke-width: 2; }
.chart .at.cross { stroke: currentColor; stroke-width: 2.8; stroke-linecap: round; }
.chart .at.good { color: var(--good); } .chart .at.warn { color: var(--warn); } .chart .at.bad { color: var(--bad); }
.chart .at.note { color: var(--c3); } .chart .at.quiet { color: var(--muted); }
""" + "".join(
    f".chart .s{n} {{ stroke: var(--c{n}); }} .chart .f{n} {{ fill: var(--c{n}); }}\n" for n in range(COLOURS)
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Series:
    """One line, or one layer of a stack."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) with x ascending; steps without a value are simply not there."""
    colour: int = 0
    """Which of the page's colours, 0 to 5."""
    look: str = ""
    """"" a solid line, "thin" or "faint" one that stays behind it, "dashed" one beside a stack, "dots"; of a line
    chart also "band", shaded where y is not 0, and "rule", a line upwards with the new value wherever y changes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Mark:
    """Something that happened at a step, drawn over the lines."""

    x: float
    y: float | None
    """Height in the picture; None puts the mark on the axis."""
    name: str
    shape: str = "dot"
    """One of SHAPES."""
    tone: str = "quiet"
    """"good", "warn", "bad", "note" or "quiet"."""

    def path(self, place: str = "") -> str:
        """Its outline as an SVG element."""
        return f'<path class="at {self.shape} {self.tone}"{place} d="{SHAPES[self.shape]}"/>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that span [low, high], at most `most` + 1 of them.

    Example: ticks(0, 0.93) is [0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    if not high - low > SMALLEST:
        pad = abs(high) * 0.1
        low, high = (low - pad, high + pad) if pad > SMALLEST else (low - 0.5, high + 0.5)
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9)), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(12, 3 - math.floor(math.log10(step)))
    return [round(n * step, digits) for n in range(first, last + 1)]


def blocks(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[Sequence[tuple[float, float]]]:
    """The points in at most `most` runs of equally many neighbours."""
    size = max(1, math.ceil(len(points) / most))
    return [points[at : at + size] for at in range(0, len(points), size)]


def means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, or the mean of each run of neighbours where there are too many to draw."""
    return [(block[len(block) // 2][0], fmean(y for _, y in block)) for block in blocks(points)]


def extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, or the lowest and the highest of each run of neighbours: a single spike stays visible."""
    kept = [sorted({min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])}) for b in blocks(points)]
    return [point for block in kept for point in block]


def tick_texts(values: Sequence[float]) -> list[str]:
    """The numbers of an axis, with as many digits as it takes to tell them apart.

    Example: [0.998, 1.0, 1.002] are "0.998", "1.000" and "1.002".
    """
    texts = [number(value) for value in values]
    if len(set(texts)) == len(texts) or len(values) < 2:
        return texts
    digits = max(0, 1 - math.floor(math.log10(abs(values[1] - values[0]))))
    texts = [f"{value:,.{digits}f}" for value in values]
    return [text[:-1] for text in texts] if all("." in t and t.endswith("0") for t in texts) else texts


@dataclass(kw_only=True, slots=True, frozen=True)
class _Scale:
    """Where a value lies in the picture."""

    x_low: float
    x_high: float
    y_ticks: list[float]
    width: int = WIDTH

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def floor(self) -> float:
        return HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return LEFT + (value - self.x_low) / span * (self.right - LEFT) if span else (LEFT + self.right) / 2

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.floor - (value - low) / (high - low) * (self.floor - TOP)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    zero: bool = False,
    top: float | None = None,
    wide: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Lines over steps; "" when there is no line.

    Args:
        label: what the picture shows, for those who cannot see it.
        unit: written after values under the pointer, for example " s".
        zero: the y axis includes 0.
        top: the y axis reaches at least this far.
        wide: drawn for the whole width of the page.
        marks: what happened at single steps.
    """
    behind = [s for s in series if s.points and s.look in BEHIND]
    shown = [s for s in series if s.points and s.look not in BEHIND]
    if not shown:
        return ""
    ys = [y for s in shown for _, y in s.points] + ([0.0] if zero else []) + ([top] if top is not None else [])
    ys += [mark.y for mark in marks if mark.y is not None]
    xs = sorted({x for s in [*shown, *behind] for x, _ in s.points} | {mark.x for mark in marks})
    scale = _Scale(x_low=xs[0], x_high=xs[-1], y_ticks=ticks(min(ys), max(ys)), width=WIDE if wide else WIDTH)
    back = [_bands(s, scale) if s.look == "band" else _rules(s, scale) for s in behind]
    front = [_mark(mark, scale) for mark in marks]
    hits = _hits([*shown, *behind], xs, scale, unit, marks=marks)
    return _svg(label, scale, [*back, _frame(scale), *(_line(s, scale) for s in shown), *front, hits])


def stacked_bars(
    layers: Sequence[Series], *, label: str, lines: Sequence[Series] = (), unit: str = "", wide: bool = False
) -> str:
    """One bar a step, its layers on top of each other, and lines over them; "" when there is no bar."""
    stacked = [Series(name=s.name, points=means(s.points), colour=s.colour) for s in layers if s.points]
    over = [Series(name=s.name, points=means(s.points), colour=s.colour, look=s.look) for s in lines if s.points]
    if not stacked:
        return ""
    xs = sorted({x for s in [*stacked, *over] for x, _ in s.points})
    values = [dict(s.points) for s in stacked]
    totals = [sum(v.get(x, 0.0) for v in values) for x in xs]
    gap = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1.0)
    highest = max([*totals, *(y for s in over for _, y in s.points), 0.0])
    scale = _Scale(
        x_low=xs[0] - gap / 2,
        x_high=xs[-1] + gap / 2,
        y_ticks=ticks(0.0, highest or 1.0),
        width=WIDE if wide else WIDTH,
    )
    width = min(56.0, max(0.5, (scale.right - LEFT) / max(1, round((xs[-1] - xs[0]) / gap) + 1) * 0.78))
    bars = []
    for x in xs:
        height = 0.0
        for layer, value in zip(stacked, values, strict=True):
            size = max(0.0, value.get(x, 0.0))
            if size:
                above, below = scale.y(height + size), scale.y(height)
                bars.append(
                    f'<rect class="bar f{layer.colour}" x="{scale.x(x) - width / 2:.1f}" y="{above:.1f}" '
                    f'width="{width:.1f}" height="{max(0.0, below - above):.2f}"/>'
                )
                height += size
    hits = _hits([*stacked, *over], xs, scale, unit, dots=False)
    return _svg(label, scale, [_frame(scale), *bars, *(_line(s, scale) for s in over), hits])


def histogram(counts: Mapping[int, float], *, label: str, mark: tuple[float, str] | None = None) -> str:
    """One bar a whole number with its share above it; "" when nothing was counted.

    Args:
        counts: how often each number was seen.
        mark: a limit to draw, and what it is called.
    """
    total = sum(counts.values())
    if not total:
        return ""
    low, high = min(counts), max(counts)
    furthest = max(high, math.ceil(mark[0])) if mark else high
    scale = _Scale(x_low=low - 0.5, x_high=furthest + 0.5, y_ticks=ticks(0.0, max(counts.values())))
    room = (scale.right - LEFT) / (furthest - low + 1)
    width = min(90.0, room * 0.7)
    body = [_frame(scale, whole=True)]
    for value in range(low, high + 1):
        count = counts.get(value, 0.0)
        x, above = scale.x(value), scale.y(count)
        share = 100 * count / total
        body.append(
            f'<rect class="bar f0" x="{x - width / 2:.1f}" y="{above:.1f}" width="{width:.1f}" '
            f'height="{scale.floor - above:.1f}"><title>{value}: {number(count)} ({share:.1f} %)</title></rect>'
        )
        if room > 34 and count:
            shown = f"{share:.0f} %" if share >= 1 else "&lt;1 %"
            body.append(f'<text class="strong" x="{x:.1f}" y="{above - 5:.1f}" text-anchor="middle">{shown}</text>')
    if mark:
        x = scale.x(mark[0] + 0.5)
        body.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{scale.floor}"/>')
        body.append(f'<text class="strong" x="{x - 6:.1f}" y="{TOP - 8}" text-anchor="end">{escape(mark[1])}</text>')
    return _svg(label, scale, body)


def bar_rows(rows: Sequence[tuple[str, float, str]], *, label: str) -> str:
    """One lying bar a row for the whole width of the page; "" without rows.

    Args:
        rows: (name, value from 0 up, what else is known about it).
    """
    if not rows:
        return ""
    names = [name if len(name) <= MOST_NAME else f"…{name[-MOST_NAME:]}" for name, _, _ in rows]
    left, room = 14 + LETTER * max(map(len, names)), 25
    right = left + 330
    largest = max(value for _, value, _ in rows) or 1.0
    body = []
    for at, (name, value, note) in enumerate(rows):
        y, size = at * room + 4, max(0.0, value / largest * (right - left))
        body.append(
            f'<text class="strong" x="{left - 10:.1f}" y="{y + 13}" text-anchor="end">{escape(names[at])}</text>'
            f'<rect class="bar f0" x="{left:.1f}" y="{y}" width="{size:.1f}" height="{room - 7}" rx="2">'
            f"<title>{escape(name)}: {number(value)}</title></rect>"
            f'<text class="strong" x="{left + size + 8:.1f}" y="{y + 13}">{number(value)}</text>'
            f'<text x="{right + 90:.1f}" y="{y + 13}">{escape(note)}</text>'
        )
    return _svg(label, _Scale(x_low=0.0, x_high=1.0, y_ticks=[], width=WIDE), body, height=len(rows) * room + 4)


def _svg(label: str, scale: _Scale, body: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {scale.width} {height}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def _frame(scale: _Scale, *, whole: bool = False) -> str:
    """Grid, axes and their numbers."""
    parts = []
    for value, text in zip(scale.y_ticks, tick_texts(scale.y_ticks), strict=True):
        y = scale.y(value)
        kind = "axis" if value == scale.y_ticks[0] else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{scale.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 3.8:.1f}" text-anchor="end">{text}</text>')
    marks = [x for x in ticks(scale.x_low, scale.x_high, 8) if scale.x_low <= x <= scale.x_high and x == round(x)]
    if whole and scale.x_high - scale.x_low <= 24:
        marks = [float(x) for x in range(math.ceil(scale.x_low), math.floor(scale.x_high) + 1)]
    for value in marks or [round((scale.x_low + scale.x_high) / 2)]:
        parts.append(f'<text x="{scale.x(value):.1f}" y="{scale.floor + 17}" text-anchor="middle">{value:.0f}</text>')
    if not whole:
        parts.append(f'<text x="{LEFT - 16}" y="{scale.floor + 17}" text-anchor="end">step</text>')
    return "".join(parts)


def _line(series: Series, scale: _Scale) -> str:
    if series.look == "dots" or len(series.points) == 1:
        return "".join(
            f'<circle class="f{series.colour}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4"/>'
            for x, y in series.points
        )
    path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in extremes(series.points))
    halo = f'<polyline class="line halo" points="{path}"/>' if series.look == "dashed" else ""
    many = " many" if len(series.points) > MOST_POINTS and series.look != "faint" else ""
    return f'{halo}<polyline class="line {series.look}{many} s{series.colour}" points="{path}"/>'


def _bands(series: Series, scale: _Scale) -> str:
    """Shading from half a step before the first to half a step after the last of each run of steps that are on."""
    xs = [x for x, _ in series.points]
    half = min((b - a for a, b in zip(xs, xs[1:], strict=False) if b > a), default=1.0) / 2
    parts = []
    for on, run in groupby(series.points, key=lambda point: bool(point[1])):
        if on:
            inside = [x for x, _ in run]
            begin = max(LEFT, scale.x(max(inside[0] - half, scale.x_low)))
            end = min(scale.right, scale.x(min(inside[-1] + half, scale.x_high)))
            parts.append(
                f'<rect class="band f{series.colour}" x="{begin:.1f}" y="{TOP}" '
                f'width="{max(2.0, end - begin):.1f}" height="{scale.floor - TOP}"/>'
            )
    return "".join(parts)


def _rules(series: Series, scale: _Scale) -> str:
    """A line upwards at each change, with the new value beside it where there is room."""
    parts, free = [], 0.0
    for (_, before), (at, after) in zip(series.points, series.points[1:], strict=False):
        if before == after:
            continue
        x = scale.x(at)
        line = f'<line class="rule s{series.colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{scale.floor}"/>'
        text = f"{series.name} {number(after)}"
        room = 4 + LETTER * len(text)
        parts.append(line)
        left = x + room > scale.right  # the last step has no room to its right
        if (x - room if left else x) >= free:
            beside = f'x="{x - 4:.1f}" text-anchor="end"' if left else f'x="{x + 4:.1f}"'
            parts.append(f'<text class="strong" {beside} y="{TOP + 9}">{escape(text)}</text>')
            free = x if left else x + room
    return "".join(parts)


def _mark(mark: Mark, scale: _Scale) -> str:
    y = scale.floor if mark.y is None else scale.y(mark.y)
    return mark.path(f' transform="translate({scale.x(mark.x):.1f} {y:.1f})"')


def _hits(
    series: Sequence[Series],
    xs: Sequence[float],
    scale: _Scale,
    unit: str,
    *,
    dots: bool = True,
    marks: Sequence[Mark] = (),
) -> str:
    """One invisible strip a step, which shows the values of its step while the pointer is over it."""
    values = [(s, dict(s.points)) for s in series]
    names: dict[float, str] = {}
    for mark in marks:
        names[mark.x] = f"{names.get(mark.x, '')} · {escape(mark.name)}"
    xs = xs[:: max(1, math.ceil(len(xs) / MOST_POINTS))]
    parts = []
    for at, x in enumerate(xs):
        begin = scale.x((xs[at - 1] + x) / 2) if at else LEFT
        end = scale.x((xs[at + 1] + x) / 2) if at + 1 < len(xs) else scale.right
        here = [(s, v[x]) for s, v in values if x in v]
        text = f"step {x:.0f}" + "".join(
            f" · {escape(s.name)} {number(y)}{'' if s.look in BEHIND else unit}" for s, y in here
        )
        text += names.get(x, "")
        circles = "".join(
            f'<circle class="f{s.colour}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3.5"/>'
            for s, y in (here if dots else [])
            if s.look not in BEHIND
        )
        parts.append(
            f'<g class="hit"><rect x="{begin:.1f}" y="{TOP}" width="{max(0.1, end - begin):.1f}" '
            f'height="{scale.floor - TOP}"/><line x1="{scale.x(x):.1f}" x2="{scale.x(x):.1f}" y1="{TOP}" '
            f'y2="{scale.floor}"/>{circles}<text x="{scale.right}" y="{TOP - 10}" text-anchor="end">{text}</text></g>'
        )
    return "".join(parts)
