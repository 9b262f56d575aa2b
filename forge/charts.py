"""Charts as inline SVG text: no script, no font, no network, and colours that follow the page's theme.

    series ── line_chart / stacked_bars / histogram ── "<svg …>" to be put into a page that has CHART_STYLE

Colours are the page's CSS variables --c0 … --c5 (one a series), --ink, --muted and --grid, so that one picture is
right in light and dark. Each chart has a text for screen readers, and shows the values under the pointer.
Sizes are in units of the view box; the page scales the picture to the width it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from forge.formats import number

WIDTH, WIDE, HEIGHT = 560, 1130, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 34
"""Margins: room for the numbers of the y axis, the values under the pointer and the x axis."""
MOST_POINTS = 240
"""Of more steps than this, neighbours are drawn together; a screen shows no more."""
COLOURS = 6

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
    """"" a solid line, "thin" or "faint" one that stays behind it, "dashed" one beside a stack, "dots"."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that span [low, high], at most `most` + 1 of them.

    Example: ticks(0, 0.93) is [0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    if not high > low:
        pad = abs(high) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9)), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


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
) -> str:
    """Lines over steps; "" when no series has a point.

    Args:
        label: what the picture shows, for those who cannot see it.
        unit: written after values under the pointer, for example " s".
        zero: the y axis includes 0.
        top: the y axis reaches at least this far.
        wide: drawn for the whole width of the page.
    """
    shown = [s for s in series if s.points]
    if not shown:
        return ""
    ys = [y for s in shown for _, y in s.points] + ([0.0] if zero else []) + ([top] if top is not None else [])
    xs = sorted({x for s in shown for x, _ in s.points})
    scale = _Scale(x_low=xs[0], x_high=xs[-1], y_ticks=ticks(min(ys), max(ys)), width=WIDE if wide else WIDTH)
    return _svg(label, scale, [_frame(scale), *(_line(s, scale) for s in shown), _hits(shown, xs, scale, unit)])


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


def _svg(label: str, scale: _Scale, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {scale.width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
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
        parts.append(f'<text x="{LEFT - 7}" y="{scale.floor + 17}" text-anchor="end">step</text>')
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


def _hits(series: Sequence[Series], xs: Sequence[float], scale: _Scale, unit: str, *, dots: bool = True) -> str:
    """One invisible strip a step, which shows the values of its step while the pointer is over it."""
    values = [(s, dict(s.points)) for s in series]
    xs = xs[:: max(1, math.ceil(len(xs) / MOST_POINTS))]
    parts = []
    for at, x in enumerate(xs):
        begin = scale.x((xs[at - 1] + x) / 2) if at else LEFT
        end = scale.x((xs[at + 1] + x) / 2) if at + 1 < len(xs) else scale.right
        here = [(s, v[x]) for s, v in values if x in v]
        text = f"step {x:.0f}" + "".join(f" · {escape(s.name)} {number(y)}{unit}" for s, y in here)
        marks = "".join(
            f'<circle class="f{s.colour}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3.5"/>'
            for s, y in (here if dots else [])
        )
        parts.append(
            f'<g class="hit"><rect x="{begin:.1f}" y="{TOP}" width="{max(0.1, end - begin):.1f}" '
            f'height="{scale.floor - TOP}"/><line x1="{scale.x(x):.1f}" x2="{scale.x(x):.1f}" y1="{TOP}" '
            f'y2="{scale.floor}"/>{marks}<text x="{scale.right}" y="{TOP - 10}" text-anchor="end">{text}</text></g>'
        )
    return "".join(parts)
