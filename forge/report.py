"""report.html: a run as one page that needs nothing else, no network, no script.

    config.yaml  metrics.jsonl  rollouts.jsonl  calibration.jsonl  samples.json  summary.json
                                     └── read_run ── RunRecord ── page ── report.html

Whatever is missing is left out: a run that died in its first step still gets a page that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from forge.charts import CHART_STYLE
from forge.errors import ForgeError
from forge.formats import duration, number
from forge.jsonl import write_atomic
from forge.report_calibration import calibration_section
from forge.report_data import MOST_ROLLOUT_BYTES, Points, RunRecord, is_finite, read_run
from forge.report_figures import sections

MOST_EXAMPLES = 12
"""Rows of the table of samples that stand open; the others are folded."""
LONG_TEXT = 700
"""Characters of an answer after which the rest is folded."""


def write_report(folder: Path) -> Path:
    """Writes `folder/report.html` from the run's files and returns its path.

    Raises:
        ForgeError: the folder is not there, or the page cannot be written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ForgeError(f"a report needs a run folder, and {folder} is none; name one such as runs/grpo/demo")
    path = folder / "report.html"
    try:
        write_atomic(path, page(read_run(folder)))
    except OSError as error:
        raise ForgeError(f"{path} cannot be written ({error.strerror or error}); free space or copy the run") from error
    return path


# Tables and tiles ------------------------------------------------------------------------------------------------


def _tiles(run: RunRecord) -> str:
    s = run.summary
    rewards = [y for _, y in run.points("reward/mean")]
    first = s.get("reward_first3", fmean(rewards[:3]) if len(rewards) > 3 else None)
    last = s.get("reward_last5", fmean(rewards[-5:]) if len(rewards) > 3 else None)
    speed = s.get("tokens_per_second") or _median(run.points("rollout/tokens_per_second"))
    age = s.get("max_age_measured", max((y for _, y in run.points("age/max")), default=None))
    failures = s.get("failures")
    failed = sum(v for v in failures.values() if is_finite(v)) if isinstance(failures, dict) else failures
    bound, first_step = s.get("max_age_bound"), s.get("time_to_first_step_seconds")
    steps = s["steps"] if is_finite(s.get("steps")) else len(run.rows)
    sampled = run.total("reward/count") + run.total("reward/failed") or run.episodes
    resumed = _if(", since step ", s.get("resumed_from_step"), number)
    tiles = [
        _change("Reward", first, last, "mean of the first 3 and last 5 steps" + resumed),
        _change(
            "Held-out reward", s.get("heldout_before"), s.get("heldout_after"), "before and after, greedy" + resumed
        ),
        _tile("Steps", steps, number, "optimizer steps"),
        _tile("Wall time", s.get("wall_seconds"), duration, _if("first step after ", first_step, duration)),
        _tile("Tokens per second", speed, number, "sampled, all generators"),
        _tile("Largest age", age, number, _if("bound ", bound, number)),
        _tile("Weight sync", s.get("weight_sync_seconds"), lambda v: f"{v:.2f} s", "median, publish to live"),
        _published(run),
        _tile("Peak memory", s.get("peak_rss_gib"), lambda v: f"{v:.1f} GiB", "all processes"),
        _tile("Completions", sampled or None, number, "sampled and scored"),
        _tile("Failures", failed, number, "tolerated and counted"),
    ]
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{value}</dd><small>{escape(note)}</small></div>'
        for name, value, note in filter(None, tiles)
    )


def _tile(name: str, value: Any, form: Callable[[float], str], note: str) -> tuple[str, str, str] | None:
    return (name, escape(form(float(value))), note) if is_finite(value) else None


def _change(name: str, before: Any, after: Any, note: str) -> tuple[str, str, str] | None:
    if not (is_finite(before) and is_finite(after)):
        return _tile(name, after if is_finite(after) else before, number, note)
    difference = after - before
    kind = "better" if difference > 0 else "worse" if difference < 0 else ""
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    change = f'<span class="change {kind}">{sign}{number(abs(difference))}</span>'
    return name, f"{number(before)} → {number(after)} {change}", note


def _published(run: RunRecord) -> tuple[str, str, str] | None:
    """Size of a published version of quantized weights."""
    size, whole = _median(run.points("quant/published_bytes")), _median(run.points("quant/bf16_bytes"))
    note = f"quantized, {100 * size / whole:.0f} % of bfloat16" if size and whole else "quantized"
    return _tile("Published weights", size, lambda v: f"{v / 2**20:,.1f} MiB", note)


def _if(words: str, value: object, form: Callable[[float], str]) -> str:
    """The words and the value, or nothing when there is no value."""
    return words + form(value) if is_finite(value) else ""


def _median(points: Points) -> float | None:
    return median(y for _, y in points) if points else None


COUNTED = (
    ("reward/failed", "completions without a reward", "scoring failed; not trained"),
    ("trainer/skipped_nonfinite", "steps with a non-finite loss or gradient", "skipped, weights unchanged"),
    ("trainer/skipped_empty", "steps with nothing to train on", "weights unchanged"),
    ("group/incomplete", "groups with missing completions", "trained with what was there"),
    ("metrics/not_finite", "metrics that were not finite", "left out of the pictures"),
)
"""Metrics that count what was tolerated, its name and what was done about it."""
FAILURE_NAMES = {
    "reward": "completions without a reward",
    "records/failed_writes": "writes to the run folder that failed and were tried again",
    "records/lost_lines": "lines lost from the run folder",
    "records/waiting_lines": "lines that never reached the run folder",
    "records/not_finite": "recorded numbers that were not finite",
    "trackers/failed": "trackers switched off",
}


def _fates(run: RunRecord) -> str:
    """What became of the completions, in one sentence."""
    if not run.episodes:
        return ""
    trained = run.episodes - run.drops.total()
    reasons = ", ".join(
        f"{reason.replace('_', ' ')} {number(count)} ({100 * count / run.episodes:.0f} %)"
        for reason, count in run.drops.most_common()
    )
    cut = run.finishes["length"]
    return (
        f"<p>Of {run.episodes:,} completions {trained:,} were trained"
        + (f"; not trained: {escape(reasons)}" if reasons else "")
        + (f". {cut:,} were cut off at the length limit" if cut else "")
        + ".</p>"
    )


def _failures(run: RunRecord) -> str:
    """What went wrong and was tolerated: counts by part, and what the failures said."""
    rows: list[tuple[str, float, str]] = []
    failures = run.summary.get("failures")
    for part, count in failures.items() if isinstance(failures, dict) else ():
        if is_finite(count) and count and not (part == "reward" and run.total("reward/failed")):
            rows.append((FAILURE_NAMES.get(part, str(part)), count, "counted by the run"))
    rows += [(name, run.total(key), meaning) for key, name, meaning in COUNTED if run.total(key)]
    if not rows:
        return f'{_fates(run)}<p class="quiet">No failure was counted.</p>'
    body = [
        f"<tr><td>{escape(name)}</td><td class=num>{number(count)}</td><td>{escape(meaning)}</td></tr>"
        for name, count, meaning in rows
    ]
    table = _table("<tr><th>what<th class=num>how often<th>what became of it</tr>", body)
    said = "".join(f"<li><b>{n} ×</b> {escape(text)}</li>" for text, n in run.reasons.most_common(8))
    listed = f"<p>What scoring failures said:</p><ul class=said>{said}</ul>" if said else ""
    return _fates(run) + table + listed


def _samples(run: RunRecord) -> str:
    """Held-out answers before and after; without them, completions from the first and the last step."""
    kind = "samples" if run.samples else "examples"
    if run.samples:
        head = "<tr><th>question<th>expected<th>before<th>after</tr>"
        rows = [
            f"<tr><td>{_text(s.get('question'))}</td><td>{_text(s.get('answer'))}</td>"
            f"<td>{_answer(s.get('before'), s.get('reward_before'))}</td>"
            f"<td>{_answer(s.get('after'), s.get('reward_after'))}</td></tr>"
            for s in run.samples
        ]
        gains = [_gain(s) for s in run.samples]
        better, worse = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
        note = (
            f"Greedy answers to held-out rows, by the initial and by the trained policy, in the order of the data: "
            f"{better} better, {worse} worse, {len(gains) - better - worse} rewarded the same."
        )
    elif run.first:
        head = "<tr><th>step<th>question<th>expected<th>completion</tr>"
        shown = run.first if run.first[0]["step"] == run.last[0]["step"] else [*run.first, *run.last]
        rows = [
            f"<tr><td>{e['step']}</td><td>{_text(e['question'])}</td><td>{_text(e['answer'])}</td>"
            f"<td>{_answer(e['text'], e['reward'])}</td></tr>"
            for e in shown
        ]
        note = "Completions sampled in the first and in the last step."
    else:
        return '<p class="quiet">No samples were recorded.</p>'
    table = _table(head, rows[:MOST_EXAMPLES], kind)
    more = rows[MOST_EXAMPLES:]
    folded = f"<details><summary>{len(more)} more</summary>{_table(head, more, 'samples')}</details>" if more else ""
    return f"<p>{note}</p>{table}{folded}"


def _table(head: str, rows: Iterable[str], kind: str = "") -> str:
    body = "".join(rows)
    return f'<div class="scroll"><table class="{kind}"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _gain(sample: Mapping[str, Any]) -> float:
    before, after = sample.get("reward_before"), sample.get("reward_after")
    return float(after or 0) - float(before or 0) if is_finite(after or 0) and is_finite(before or 0) else 0.0


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    if len(text) <= LONG_TEXT:
        return f"<pre>{escape(text)}</pre>"
    rest = f"<details><summary>{len(text) - LONG_TEXT:,} more characters</summary><pre>{escape(text[LONG_TEXT:])}</pre>"
    return f"<pre>{escape(text[:LONG_TEXT])}</pre>{rest}</details>"


def _answer(text: Any, reward: Any) -> str:
    kind = "" if not is_finite(reward) else "good" if reward >= 0.5 else "bad"
    shown = f"reward {number(reward)}" if is_finite(reward) else "no reward"
    return f'{_text(text)}<span class="chip {kind}">{shown}</span>'


# The page --------------------------------------------------------------------------------------------------------

STATUS_KINDS = {"done": "good", "failed": "bad", "interrupted": "warn"}


def page(run: RunRecord) -> str:
    """The whole page as HTML."""
    status = str(run.summary.get("status") or ("unfinished" if run.rows else "no step yet"))
    parts = [
        f'<header><p class="eyebrow">Forge run report</p><h1>{escape(run.title)} '
        f'<span class="status {STATUS_KINDS.get(status, "warn")}">{escape(status)}</span></h1>{_verdict(run)}'
        f'<dl class="tiles">{_tiles(run)}</dl></header>'
    ]
    if len(run.rows) < 2:
        many = "no step" if not run.rows else "one step"
        parts.append(f'<p class="quiet">This run recorded {many}, so there is little to draw yet.</p>')
    for title, figures in sections(run):
        if any(figures):
            parts.append(f'<section><h2>{escape(title)}</h2><div class="figures">{"".join(figures)}</div></section>')
    parts.append(calibration_section(run))
    parts.append(f'<section><h2>What was lost on the way?</h2><div class="card">{_failures(run)}</div></section>')
    heading = "Before and after" if run.samples else "Samples"
    parts.append(f'<section><h2>{heading}</h2><div class="card">{_samples(run)}</div></section>')
    if run.config:
        parts.append(
            f"<section><h2>Configuration</h2><details class=card><summary>config.yaml, as resolved</summary>"
            f"<pre>{escape(run.config)}</pre></details></section>"
        )
    parts.append(f"<footer>{_footer(run)}</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(run.title)} · Forge</title><style>{STYLE}{CHART_STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(run: RunRecord) -> str:
    """One sentence on what came out, or why it ended."""
    error = run.summary.get("error") or run.summary.get("reason")
    if error:
        return f'<p class="error">{escape(str(error))}</p>'
    before, after = run.summary.get("heldout_before"), run.summary.get("heldout_after")
    if is_finite(before) and is_finite(after):
        move = "rose" if after > before else "fell" if after < before else "stayed"
        where = f"from {number(before)} to {number(after)}" if after != before else f"at {number(after)}"
        return f'<p class="verdict">Held-out reward {move} {where} in {len(run.rows):,} steps.</p>'
    return ""


def _footer(run: RunRecord) -> str:
    rollouts = f"{run.episodes:,} episodes in rollouts.jsonl"
    if run.partly:
        rollouts += f" (only its last {MOST_ROLLOUT_BYTES // 2**20} MiB were read)"
    made = f"Made from {len(run.rows):,} steps in metrics.jsonl and {rollouts}."
    return f"{made} Hold the pointer over a chart for its values."


STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --page: #f5f6f8; --card: #fff; --ink: #1b1f27; --muted: #5a6373; --grid: #e6e9ee; --edge: #dfe3ea;
  --c0: #0b66c3; --c1: #c8570b; --c2: #14804f; --c3: #9a3f96; --c4: #8b93a1; --c5: #b58900;
  --good: #0f7a46; --good-bg: #e2f5ea; --bad: #b3261e; --bad-bg: #fdeae8; --warn: #8a5a00; --warn-bg: #fdf1d8; }
@media (prefers-color-scheme: dark) { :root {
  --page: #101318; --card: #181c23; --ink: #e8ebf1; --muted: #a0a9b8; --grid: #282e38; --edge: #2a303b;
  --c0: #6cb2ff; --c1: #ff9d5c; --c2: #57cf97; --c3: #df97da; --c4: #7f8898; --c5: #e2c044;
  --good: #6fdca4; --good-bg: #12321f; --bad: #ff9c94; --bad-bg: #3d1715; --warn: #f2c66d; --warn-bg: #372a0e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 var(--font); }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 56px; }
.eyebrow { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .06em; text-transform: uppercase; }
h1 { margin: 2px 0 6px; font-size: 30px; line-height: 1.25; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 20px; letter-spacing: -.005em; }
h3 { margin: 0 0 4px; font-size: 15px; }
.verdict { margin: 0; font-size: 17px; color: var(--muted); }
.status, .chip, .change { display: inline-block; border-radius: 999px; font-weight: 600; white-space: nowrap;
  background: var(--warn-bg); color: var(--warn); }
.status { font-size: 14px; padding: 3px 12px; vertical-align: 5px; margin-left: 6px; letter-spacing: 0; }
.chip { font-size: 12px; padding: 1px 9px; margin-top: 6px; background: var(--page); color: var(--muted); }
.change { font-size: 13px; padding: 1px 8px; vertical-align: 3px; background: var(--page); color: var(--muted); }
.warn { background: var(--warn-bg); color: var(--warn); }
.note { background: color-mix(in srgb, var(--c3) 14%, transparent); color: var(--c3); }
.good, .better { background: var(--good-bg); color: var(--good); }
.bad, .worse { background: var(--bad-bg); color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(168px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; }
.tile { padding: 12px 16px 13px; }
.tile dt { color: var(--muted); font-size: 13px; }
.tile dd { margin: 0; font-size: 23px; font-weight: 620; line-height: 1.35; font-variant-numeric: tabular-nums; }
.tile small { color: var(--muted); font-size: 12px; }
.tile:has(.change) { grid-column: span 2; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.card { margin: 0; padding: 16px 18px; min-width: 0; }
.wide { grid-column: 1 / -1; overflow-x: auto; }
.wide svg.chart { min-width: 680px; }
figcaption { margin-top: 6px; color: var(--muted); font-size: 13.5px; line-height: 1.5; max-width: 84ch; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--muted); margin-bottom: 4px; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.key i { width: 14px; height: 4px; border-radius: 2px; background: currentColor; }
.key i.thin { height: 2px; }
.key i.faint { height: 2px; opacity: .6; }
.key i.band { height: 11px; opacity: .25; }
.key i.rule { width: 2px; height: 12px; }
.key svg.sign { width: 14px; height: 14px; }
.key i.dots { width: 9px; height: 9px; border-radius: 50%; }
.key i.dashed { background: linear-gradient(90deg, currentColor 40%, transparent 40% 60%, currentColor 60%); }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 600; font-size: 13px; }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; padding-right: 22px; }
.samples td { min-width: 90px; }
.examples td:last-child { width: 60%; min-width: 220px; }
.samples td:nth-child(n + 3) { min-width: 220px; }
.decisions th, .decisions td { padding: 7px 12px 7px 0; white-space: nowrap; }
.decisions thead tr:first-child th { border-bottom: 0; padding-bottom: 0; vertical-align: bottom; }
.decisions thead tr th[rowspan] { border-bottom: 1px solid var(--grid); padding-bottom: 7px; }
.decisions th.group { text-align: right; color: var(--ink); }
.decisions .chip { margin: 0; }
.decisions td:first-child { padding-left: 12px; box-shadow: inset 3px 0 var(--edge-of, var(--edge)); }
.decisions tr.open td { border-bottom: 0; padding-bottom: 2px; }
.decisions tr.below td { white-space: normal; padding-top: 0; color: var(--muted); font-size: 13.5px; }
.decisions ul { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
.decisions p { margin: 2px 0 0; }
.good-edge { --edge-of: var(--good); } .bad-edge { --edge-of: var(--bad); }
.warn-edge { --edge-of: var(--warn); } .note-edge { --edge-of: var(--c3); }
.none { color: var(--muted); }
.meanings { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 14px; padding: 0;
  font-size: 13.5px; color: var(--muted); }
.meanings .chip { margin: 0 4px 0 0; }
section > .card + .figures { margin-top: 16px; }
pre { margin: 0; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--muted); font-size: 14px; }
details[open] > summary { margin-bottom: 10px; }
.card > p:first-child { margin-top: 0; }
.quiet { color: var(--muted); margin: 0; }
header + .quiet { margin-top: 22px; }
.error { background: var(--bad-bg); color: var(--bad); padding: 10px 14px; border-radius: 8px; white-space: pre-wrap; }
.said { margin: 6px 0 0; padding-left: 20px; color: var(--muted); }
footer { margin-top: 44px; color: var(--muted); font-size: 13px; }
@media print { body { background: none; } .card, .tile { break-inside: avoid; } }
"""
