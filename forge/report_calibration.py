"""The calibration part of a report: what each calibration decided and why, and what quantization costs.

    calibration.jsonl ──┬── decisions: a table, one row a calibration, with the reasons below it
                        └── figures:   divergence, greedy reward, shift of the scales, changed codes, worst layers
    metrics.jsonl ─────────────────┘

Rows come from a file that may be damaged or of another version, so that every value is looked at before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

from forge.charts import Mark, Series, bar_rows, line_chart
from forge.formats import duration, number
from forge.report_data import Points, RunRecord, is_finite
from forge.report_figures import figure

MOST_DECISIONS = 12
"""Calibrations of the table that stand open, the last ones; those before are folded."""
OPEN_REASONS, MOST_REASONS = 3, 40
"""Reasons of a calibration that stand open, and those on the page at all: a bad one names every layer of a model."""
LONGEST_REASON = 600
"""Characters of a reason that are shown."""
WORST_LAYERS = 12


@dataclass(kw_only=True, slots=True, frozen=True)
class Action:
    """What a calibration can come to."""

    label: str
    meaning: str
    tone: str
    shape: str


ACTIONS = {
    "accept": Action(label="accepted", meaning="the proposed scales went live", tone="good", shape="dot"),
    "reject": Action(label="rejected", meaning="the scales in use stayed", tone="bad", shape="cross"),
    "rollback": Action(label="rolled back", meaning="earlier scales were put back", tone="warn", shape="down"),
    "qat": Action(
        label="QAT", meaning="training went on with the rounding of the quantized policy", tone="note", shape="diamond"
    ),
    "measure": Action(label="measured", meaning="nothing was to be decided", tone="quiet", shape="ring"),
}


def calibration_section(run: RunRecord) -> str:
    """The whole section; "" for a run that quantized nothing."""
    drawn = "".join(figures(run))
    table = f'<div class="card">{decisions(run)}</div>' if run.calibration else ""
    if not table and not drawn:
        return ""
    heading = "Calibration" if table else "Quantization"
    return f'<section><h2>{heading}</h2>{table}<div class="figures">{drawn}</div></section>'


# The decisions ---------------------------------------------------------------------------------------------------

HEAD = (
    "<tr><th rowspan=2 class=num>step<th rowspan=2 class=num>scales<th rowspan=2>decision<th colspan=2 class=group>KL"
    "<th colspan=2 class=group>log-prob gap<th colspan=3 class=group>greedy reward<th rowspan=2 class=num>same token"
    "<th rowspan=2 class=num>rows<th rowspan=2 class=num>time</tr>"
    "<tr><th class=num>proposed<th class=num>live<th class=num>proposed<th class=num>live"
    "<th class=num>quantized<th class=num>original<th class=num>lost</tr>"
)
COLUMNS = 13
MEASURED = (
    "kl",
    "live_kl",
    "logprob_gap",
    "live_logprob_gap",
    "greedy_reward",
    "greedy_reward_unquantized",
    "accuracy_drop",
)
"""What is measured of the policy, in the order of the columns."""


def decisions(run: RunRecord) -> str:
    """One row a calibration, its reasons below it; the last ones stand open."""
    rows = [_decision(row) for row in run.calibration]
    earlier, shown = rows[:-MOST_DECISIONS], rows[-MOST_DECISIONS:]
    folded = f"<details><summary>{len(earlier)} earlier</summary>{_table(earlier)}</details>" if earlier else ""
    counts = Counter(_action(row) for row in run.calibration)
    meanings = "".join(
        f"<li>{_chip(name)} {count} ×{': ' + ACTIONS[name].meaning if name in ACTIONS else ''}</li>"
        for name, count in sorted(counts.items(), key=lambda item: _rank(item[0]))
    )
    note = (
        "Each row is one estimate of scales from fresh rollouts. Proposed is the quantized policy with the new scales, "
        "live with those in use then, both against the policy that is not quantized; smaller is better. Same token is "
        "how often both would choose the same one."
    )
    return f'<p>{note}</p><ul class="meanings">{meanings}</ul>{folded}{_table(shown)}'


def _table(rows: Sequence[str]) -> str:
    table = f'<table class="decisions"><thead>{HEAD}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _decision(row: dict[str, Any]) -> str:
    policy, action = _policy(row), _action(row)
    tone = ACTIONS[action].tone if action in ACTIONS else "quiet"
    measured = "".join(f"<td class=num>{_number(policy.get(key))}</td>" for key in MEASURED)
    same = _number(policy.get("argmax_agreement"), lambda v: f"{100 * v:.1f} %")
    below = _reasons(row)
    version = row.get("scale_version")
    cells = (
        f"<td class=num>{_number(row.get('step'), '{:,.0f}'.format)}</td>"
        f"<td class=num>{_number(version, 'v{:.0f}'.format)}</td><td>{_chip(action)}</td>{measured}"
        f"<td class=num>{same}</td><td class=num>{_number(row.get('rows'), '{:,.0f}'.format)}</td>"
        f"<td class=num>{_number(row.get('seconds'), duration)}</td>"
    )
    upper = f'<tr class="{tone}-edge{" open" if below else ""}">{cells}</tr>'
    return upper + (f'<tr class="{tone}-edge below"><td colspan={COLUMNS}>{below}</td></tr>' if below else "")


def _reasons(row: dict[str, Any]) -> str:
    """Why it was decided so, and what was odd about its rows; a few in the open, the rest folded."""
    given = row.get("reasons")
    texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    items = [f"<li>{escape(_shortened(str(text)))}</li>" for text in texts[:MOST_REASONS] if text is not None]
    more, beyond = items[OPEN_REASONS:], len(texts) - MOST_REASONS
    rest = f"<p>{beyond:,} more in calibration.jsonl</p>" if beyond > 0 else ""
    count = len(more) + max(0, beyond)
    folded = f"<details><summary>{count:,} more</summary><ul>{''.join(more)}</ul>{rest}</details>" if more else ""
    listed = f"<ul>{''.join(items[:OPEN_REASONS])}</ul>{folded}" if items else ""
    refused, tokens = row.get("rows_refused"), row.get("tokens")
    odd = [
        f"{number(refused)} rows refused" if is_finite(refused) and refused else "",
        "rows were sampled anew" if row.get("resampled") is True else "",
    ]
    noted = [text for text in odd if text]
    if noted and is_finite(tokens):
        noted.append(f"{tokens:,.0f} tokens used")
    return listed + (f'<p class="quiet">{escape(", ".join(noted))}</p>' if noted else "")


def _shortened(text: str) -> str:
    cut = len(text) - LONGEST_REASON
    return text if cut <= 0 else f"{text[:LONGEST_REASON]}… ({cut:,} more characters)"


def _number(value: Any, form: Callable[[float], str] = number) -> str:
    return escape(form(value)) if is_finite(value) else '<span class="none">–</span>'


def _action(row: dict[str, Any]) -> str:
    """The action's name; of a row that has none, what `accepted` says."""
    action = row.get("action")
    if isinstance(action, str) and action:
        return action
    accepted = row.get("accepted")
    return "accept" if accepted is True else "reject" if accepted is False else ""


def _chip(action: str) -> str:
    known = ACTIONS.get(action)
    label, tone = (known.label, known.tone) if known else (action[:40] or "not said", "")
    return f'<span class="chip {tone}">{escape(label)}</span>'


def _rank(action: str) -> tuple[int, str]:
    return (list(ACTIONS).index(action) if action in ACTIONS else len(ACTIONS), action)


# The figures -----------------------------------------------------------------------------------------------------


def figures(run: RunRecord) -> list[str]:
    """The pictures of the section; those without data are empty strings."""
    return [
        _quantization(run),
        _divergence(run),
        _greedy_rewards(run),
        _shift(
            run,
            "Shift of the zero points",
            "zero_point_shift",
            "How far each calibration would move the zero points, as a share of the range (0.05 is 5 %), over all "
            "layers. A jump of a single layer is a sign of outliers.",
        ),
        _shift(
            run,
            "Shift of the scales",
            "scale_shift",
            "How far each calibration would change the scales, relative to those in use (0.05 is 5 %), over all "
            "layers. It should shrink as training settles.",
        ),
        _gap(run),
        _changed_codes(run),
        _worst_layers(run),
    ]


def _quantization(run: RunRecord) -> str:
    """The gap between trainer and sampler with the scales in use and QAT behind it; "" without quantization."""
    versions, qat = run.points("quant/scale_version"), run.points("quant/qat")
    gap = run.points("logprob_gap/mean")
    if not versions and not qat:
        return ""
    changes = [after for before, after in pairwise(versions) if before[1] != after[1]]
    if not gap:
        lines = [
            Series(name="scale version", points=versions, colour=0),
            Series(name="QAT on (1) or off (0)", points=qat, colour=3),
        ]
        meaning = "The scales that were in use at each step, and whether training rounded as the quantized policy does."
        return figure("Quantization", line_chart(lines, label=meaning, zero=True, wide=True), meaning, lines, wide=True)
    lines = [
        Series(name="log-prob gap", points=gap, colour=0),
        Series(name="scales", points=versions, colour=1, look="rule"),
        Series(name="QAT", points=qat, colour=3, look="band"),
    ]
    meaning = (
        "Mean log-prob gap between the trainer and the quantized sampler, in nats per token. Dashed lines are steps "
        "that took new scales, numbered by their version; where it is shaded, training rounded as the quantized "
        "policy does (QAT). New scales and QAT are to bring the gap down."
    )
    keys = [
        lines[0],
        Series(name="new scales", points=changes, colour=1, look="rule"),
        Series(name="QAT on", points=[point for point in qat if point[1]], colour=3, look="band"),
    ]
    svg = line_chart(lines, label=f"Quantization. {meaning}", zero=True, wide=True)
    return figure("Quantization", svg, meaning, keys, wide=True)


def _divergence(run: RunRecord) -> str:
    proposed, live = _measured(run, "kl"), _measured(run, "live_kl")
    series = [
        Series(name="scales in use", points=live, colour=4, look="dashed" if len(live) > 1 else ""),
        Series(name="proposed scales", points=proposed, colour=0),
    ]
    heights = dict(live) | dict(proposed)
    marks = []
    for step, row in _by_step(run):
        action = ACTIONS.get(_action(row))
        if action:
            mark = Mark(x=step, y=heights.get(step), name=action.label, shape=action.shape, tone=action.tone)
            marks.append(mark)
    meaning = (
        "How far the quantized policy is from the one that is not quantized, in nats per token, with the proposed "
        "scales and with those in use. The marks say what was decided."
    )
    svg = line_chart(series, label=f"KL of the quantized policy. {meaning}", zero=True, marks=marks)
    return figure("KL of the quantized policy", svg, meaning, series, marks=marks)


def _gap(run: RunRecord) -> str:
    series = [
        Series(name="scales in use", points=_measured(run, "live_logprob_gap"), colour=4),
        Series(name="proposed scales", points=_measured(run, "logprob_gap"), colour=0),
    ]
    meaning = (
        "Mean log-prob gap of the quantized policy to the one that is not quantized, in nats per token, on the rows "
        "of each calibration. Lower is better."
    )
    svg = line_chart(series, label=f"Log-prob gap of the quantized policy. {meaning}", zero=True)
    return figure("Log-prob gap of the quantized policy", svg, meaning, series)


def _greedy_rewards(run: RunRecord) -> str:
    series = [
        Series(name="not quantized", points=_measured(run, "greedy_reward_unquantized"), colour=4),
        Series(name="quantized", points=_measured(run, "greedy_reward"), colour=2),
    ]
    meaning = (
        "Mean reward of greedy answers to the rows of each calibration, by the policy before and after quantization. "
        "The distance between the lines is what quantization costs."
    )
    svg = line_chart(series, label=f"Greedy reward. {meaning}", zero=True)
    return figure("Greedy reward", svg, meaning, series)


def _shift(run: RunRecord, title: str, key: str, meaning: str) -> str:
    series = [
        Series(name="largest", points=_over_layers(run, key, max), colour=1),
        Series(name="median layer", points=_over_layers(run, key, median), colour=0),
    ]
    return figure(title, line_chart(series, label=f"{title}. {meaning}", zero=True), meaning, series)


def _changed_codes(run: RunRecord) -> str:
    proposed = _over_layers(run, "changed_codes_share", median)
    most = _over_layers(run, "changed_codes_share", max)
    published = run.points("quant/changed_codes_share")
    few = "dots" if published else ""
    series = [
        Series(name="published each step", points=published, colour=0),
        Series(name="new scales, median layer", points=proposed, colour=2, look=few),
        Series(name="new scales, largest", points=most, colour=1, look=few),
    ]
    meaning = (
        "Share of the quantized weights that get another code: from one published version to the next, and by the "
        "proposed scales alone. Near 0 the updates are too small to reach the quantized policy."
    )
    return figure("Changed codes", line_chart(series, label=f"Changed codes. {meaning}", zero=True), meaning, series)


NOTES = (
    ("range_over_std", "range / std", number),
    ("saturated_share", "saturated", lambda v: f"{100 * v:.2g} %"),
    ("zero_point_shift", "zero-point shift", number),
)
"""What is said of a layer beside its error, its name, and how it is written."""


def _worst_layers(run: RunRecord) -> str:
    """The layers with the largest error of the last calibration that measured any."""
    for row in reversed(run.calibration):
        known = [layer for layer in _layers(row) if is_finite(layer.get("mean_abs_error"))]
        if not known:
            continue
        worst = sorted(known, key=lambda layer: -abs(layer["mean_abs_error"]))[:WORST_LAYERS]
        bars = [(str(layer.get("layer", "?")), float(abs(layer["mean_abs_error"])), _note(layer)) for layer in worst]
        step = row.get("step")
        when = f"step {step:,.0f}" if is_finite(step) else "an unknown step"
        meaning = (
            f"Mean absolute error of rounding in the last calibration, at {when}: the {len(bars)} largest of "
            f"{len(known):,} layers. A range of many standard deviations is stretched by a few outliers, and all "
            f"other values are rounded more coarsely for it."
        )
        title = "Layers with the largest error"
        return figure(title, bar_rows(bars, label=f"{title}. {meaning}"), meaning, wide=True)
    return ""


def _note(layer: dict[str, Any]) -> str:
    return " · ".join(f"{name} {form(layer[key])}" for key, name, form in NOTES if is_finite(layer.get(key)))


# Rows that may be damaged ----------------------------------------------------------------------------------------


def _policy(row: dict[str, Any]) -> dict[str, Any]:
    policy = row.get("policy")
    return policy if isinstance(policy, dict) else {}


def _layers(row: dict[str, Any]) -> list[dict[str, Any]]:
    layers = row.get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def _by_step(run: RunRecord) -> list[tuple[float, dict[str, Any]]]:
    """Calibrations that say their step, in order of it; those of one step in the order of the file."""
    known = [(float(row["step"]), row) for row in run.calibration if is_finite(row.get("step"))]
    return sorted(known, key=lambda pair: pair[0])


def _measured(run: RunRecord, key: str) -> Points:
    return [(step, float(_policy(row)[key])) for step, row in _by_step(run) if is_finite(_policy(row).get(key))]


def _over_layers(run: RunRecord, key: str, reduce: Callable[[list[float]], float]) -> Points:
    """One number a calibration from the sizes of its layers' values."""
    points: Points = []
    for step, row in _by_step(run):
        sizes = [float(abs(layer[key])) for layer in _layers(row) if is_finite(layer.get(key))]
        if sizes:
            points.append((step, float(reduce(sizes))))
    return points
