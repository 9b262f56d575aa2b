import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import forge.report_calibration as report_calibration
from forge.report_calibration import ACTIONS, calibration_section
from forge.report_data import RunRecord, read_run


def a_row(step: int, action: str = "accept", **more: Any) -> dict[str, Any]:
    policy = {
        "kl": 0.031,
        "logprob_gap": 0.12,
        "live_kl": 0.052,
        "live_logprob_gap": 0.21,
        "greedy_reward": 0.61,
        "greedy_reward_unquantized": 0.63,
        "accuracy_drop": 0.02,
        "argmax_agreement": 0.934,
    }
    row = {"step": step, "scale_version": 2, "action": action, "reasons": [], "rows": 1280, "tokens": 9120,
           "rows_refused": 0, "resampled": False, "seconds": 84.0, "policy": policy}  # fmt: skip
    return row | more


def a_run(calibration: list[dict[str, Any]], metrics: list[dict[str, Any]] | None = None) -> RunRecord:
    rows = [{"step": n, **row} for n, row in enumerate(metrics or [], 1)]
    return RunRecord(title="x", rows=rows, calibration=calibration)


def layers(key: str, *values: Any) -> list[dict[str, Any]]:
    return [{"layer": f"layers.{n}", key: value} for n, value in enumerate(values)]


def cells(html: str) -> list[list[str]]:
    """Texts of the cells of each row of decisions, the rows of reasons left out."""
    rows = [row for row in re.findall(r"<tr class=\"[^\"]*-edge[^\"]*\">(.*?)</tr>", html) if "colspan" not in row]
    return [[text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def figure_of(html: str, title: str) -> str:
    assert f"<h3>{title}</h3>" in html, title
    return html.split(f"<h3>{title}</h3>")[1].split("</figure>")[0]


def pointed(html: str, title: str) -> list[str]:
    """What a figure shows under the pointer, step by step."""
    return [unescape(found) for found in re.findall(r">(step \d[^<]*)</text></g>", figure_of(html, title))]


def test_a_run_that_quantized_nothing_has_no_section() -> None:
    assert calibration_section(a_run([], [{"logprob_gap/mean": 0.01}] * 3)) == ""


def test_each_calibration_is_one_row_with_all_that_was_measured() -> None:
    measured = ["0.031", "0.052", "0.12", "0.21", "0.61", "0.63", "0.02", "93.4 %", "1,280", "1:24"]
    assert cells(calibration_section(a_run([a_row(10), a_row(1200, "reject", scale_version=3)]))) == [
        ["10", "v2", "accepted", *measured],
        ["1,200", "v3", "rejected", *measured],
    ]


def test_the_columns_of_the_head_are_those_of_a_row() -> None:
    upper, lower = re.findall(r"<tr>(.*?)</tr>", report_calibration.HEAD)
    spans = [int(found or 1) for found in re.findall(r"<th(?: rowspan=2)?(?: colspan=(\d))?", upper)]
    assert sum(spans) == report_calibration.COLUMNS == len(cells(calibration_section(a_run([a_row(1)])))[0])
    assert lower.count("<th") == sum(span for span in spans if span > 1) == len(report_calibration.MEASURED)


@pytest.mark.parametrize(("action", "label", "tone"), [(name, a.label, a.tone) for name, a in ACTIONS.items()])
def test_each_decision_has_a_label_of_its_own_colour(action: str, label: str, tone: str) -> None:
    html = calibration_section(a_run([a_row(1, action)]))
    assert f'<tr class="{tone}-edge">' in html
    assert html.count(f'<span class="chip {tone}">{label}</span>') == 2  # in the table and in what the labels mean
    assert f"1 ×: {ACTIONS[action].meaning}" in html
    assert len({a.tone for a in ACTIONS.values()}) == len({a.shape for a in ACTIONS.values()}) == len(ACTIONS)


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"accepted": True}, "accepted"),
        ({"accepted": False}, "rejected"),
        ({"action": "rollback", "accepted": True}, "rolled back"),
        ({"action": "<b>", "accepted": True}, "<b>"),
        ({"accepted": 1}, "not said"),
        ({}, "not said"),
    ],
)
def test_a_row_says_what_was_decided_as_far_as_it_is_known(row: dict[str, Any], label: str) -> None:
    assert cells(calibration_section(a_run([row])))[0][2] == label


def test_missing_values_are_dashes_and_not_zeros() -> None:
    (row,) = cells(calibration_section(a_run([{"action": "qat", "policy": {"kl": None, "accuracy_drop": 0}}])))
    assert row == ["–", "–", "QAT", "–", "–", "–", "–", "–", "–", "0", "–", "–", "–"]


def test_reasons_stand_below_the_row_and_the_many_are_folded_and_counted() -> None:
    reasons = [f"layer {n} moved" for n in range(100)]
    html = calibration_section(a_run([a_row(1, "reject", reasons=reasons)]))
    below = html.split("<td colspan=13>")[1].split("</td>")[0]
    opened, folded = below.split("<details>")
    assert re.findall(r"layer \d+ moved", opened) == reasons[:3]
    assert "97 more</summary>" in folded
    assert re.findall(r"layer \d+ moved", folded) == reasons[3:40]
    assert "60 more in calibration.jsonl" in folded


def test_few_reasons_are_not_folded_and_none_leave_no_row() -> None:
    assert "<details>" not in calibration_section(a_run([a_row(1, "reject", reasons=["a", "b", "c"])]))
    assert "1 more</summary>" in calibration_section(a_run([a_row(1, "reject", reasons=["a", "b", "c", "d"])]))
    assert "colspan=13" not in calibration_section(a_run([a_row(1)]))


def test_an_endless_reason_is_cut_and_says_by_how_much() -> None:
    html = calibration_section(a_run([a_row(1, "reject", reasons=["a" * 600 + "b" * 1500])]))
    assert "… (1,500 more characters)" in html
    assert "aaab" not in html


def test_rows_that_were_refused_or_sampled_anew_are_told() -> None:
    html = calibration_section(a_run([a_row(1, rows_refused=2, resampled=True)]))
    assert "2 rows refused, rows were sampled anew, 9,120 tokens used" in html
    assert "refused" not in calibration_section(a_run([a_row(1)]))


def test_the_last_calibrations_stand_open_and_all_are_there() -> None:
    html = calibration_section(a_run([a_row(n) for n in range(1, 31)]))
    folded, opened = html.split("</details>")
    assert "18 earlier" in folded
    assert [row[0] for row in cells(folded)] == [str(n) for n in range(1, 19)]
    assert [row[0] for row in cells(opened)] == [str(n) for n in range(19, 31)]


def test_the_divergence_is_drawn_with_what_was_decided() -> None:
    unmeasured = {"kl": None, "live_kl": None}
    rows = [a_row(1), a_row(2, "reject"), a_row(3, "qat", policy={"live_kl": 0.052}), a_row(4, "measure")]
    html = calibration_section(a_run([*rows, a_row(5, "rollback", policy=unmeasured)]))
    assert pointed(html, "KL of the quantized policy") == [
        "step 1 · scales in use 0.052 · proposed scales 0.031 · accepted",
        "step 2 · scales in use 0.052 · proposed scales 0.031 · rejected",
        "step 3 · scales in use 0.052 · QAT",
        "step 4 · scales in use 0.052 · proposed scales 0.031 · measured",
        "step 5 · rolled back",
    ]
    drawn = re.findall(r'class="at (\w+) (\w+)" transform="translate\(([\d.]+) ([\d.]+)\)"', html)
    assert [mark[:2] for mark in drawn] == [
        ("dot", "good"), ("cross", "bad"), ("diamond", "note"), ("ring", "quiet"), ("down", "warn")
    ]  # fmt: skip
    heights = [float(mark[3]) for mark in drawn]
    assert heights[0] == heights[1] == heights[3] > heights[2]  # on the proposed scales' line; QAT on the higher one
    assert heights[4] == 186  # nothing was measured: on the axis


def test_shifts_are_drawn_as_the_largest_and_the_median_of_their_sizes() -> None:
    rows = [
        a_row(1, layers=layers("zero_point_shift", 0.01, -0.09, 0.02, None)),
        a_row(2, layers=layers("zero_point_shift", 0.0, "x", 0.04)),
    ]
    html = calibration_section(a_run(rows))
    assert pointed(html, "Shift of the zero points") == [
        "step 1 · largest 0.09 · median layer 0.02",
        "step 2 · largest 0.04 · median layer 0.02",
    ]
    assert "Shift of the scales" not in html


def test_changed_codes_come_from_the_steps_and_from_the_calibrations() -> None:
    rows = [a_row(2, layers=layers("changed_codes_share", 0.1, 0.3, 0.2))]
    html = calibration_section(a_run(rows, [{"quant/changed_codes_share": 0.01}] * 2))
    assert pointed(html, "Changed codes") == [
        "step 1 · published each step 0.01",
        "step 2 · published each step 0.01 · new scales, median layer 0.2 · new scales, largest 0.3",
    ]


def test_greedy_rewards_and_gaps_are_drawn_side_by_side() -> None:
    html = calibration_section(a_run([a_row(1)]))
    assert pointed(html, "Greedy reward") == ["step 1 · not quantized 0.63 · quantized 0.61"]
    assert pointed(html, "Log-prob gap of the quantized policy") == [
        "step 1 · scales in use 0.21 · proposed scales 0.12"
    ]


def test_the_worst_layers_are_those_of_the_last_calibration_that_measured_any() -> None:
    errors = [0.001 * n for n in range(1, 21)]
    rows = [
        a_row(10, layers=layers("mean_abs_error", 9.0)),
        a_row(20, layers=[{"layer": "odd"}, 3, *layers("mean_abs_error", *errors, float("nan"))]),
        a_row(30, layers=[]),
    ]
    figure = figure_of(calibration_section(a_run(rows)), "Layers with the largest error")
    assert re.findall(r"<title>([^<]*)</title>", figure) == [
        f"layers.{n - 1}: {0.001 * n:.3g}" for n in range(20, 8, -1)
    ]
    assert "at step 20: the 12 largest of 20 layers" in figure
    widths = [float(width) for width in re.findall(r'<rect class="bar f0"[^>]* width="([\d.]+)"', figure)]
    assert widths[-1] / widths[0] == pytest.approx(9 / 20, abs=0.001)


def test_a_layer_says_what_may_explain_its_error() -> None:
    layer = {"layer": "x", "mean_abs_error": 0.1, "range_over_std": 21.0, "saturated_share": 0.012, "scale": 0.1}
    figure = figure_of(calibration_section(a_run([a_row(1, layers=[layer])])), "Layers with the largest error")
    assert ">range / std 21 · saturated 1.2 %</text>" in figure


METRICS = [
    {"quant/scale_version": 1 + (n >= 3), "quant/qat": int(n >= 4), "logprob_gap/mean": 0.1 * n} for n in range(1, 6)
]


def test_scales_and_qat_are_drawn_behind_the_gap() -> None:
    html = calibration_section(a_run([], METRICS))
    assert "<h2>Quantization</h2>" in html
    figure = figure_of(html, "Quantization")
    assert re.findall(r"</i>([^<]*)</span>", figure) == ["log-prob gap", "new scales", "QAT on"]
    assert pointed(html, "Quantization")[2:4] == [
        "step 3 · log-prob gap 0.3 · scales 2 · QAT 0",
        "step 4 · log-prob gap 0.4 · scales 2 · QAT 1",
    ]
    # Steps 1 to 5 lie at 52 to 1118: step 3 is the middle, and 3.5 is where the shading of 4 and 5 begins.
    assert re.findall(r'<line class="rule s1" x1="([\d.]+)"', figure) == ["585.0"]
    assert re.findall(r'<rect class="band f3" x="([\d.]+)" y="24" width="([\d.]+)"', figure) == [("718.2", "399.8")]
    assert ">scales 2</text>" in figure


def test_without_the_gap_the_version_is_the_line() -> None:
    rows = [{key: value for key, value in row.items() if key != "logprob_gap/mean"} for row in METRICS]
    html = calibration_section(a_run([], rows))
    assert pointed(html, "Quantization")[2] == "step 3 · scale version 2 · QAT on (1) or off (0) 0"


def test_scales_that_never_change_have_no_key() -> None:
    html = calibration_section(a_run([], [{"quant/scale_version": 1, "quant/qat": 0, "logprob_gap/mean": 0.1}] * 3))
    assert "new scales" not in re.findall(r"</i>([^<]*)</span>", figure_of(html, "Quantization"))
    assert 'class="rule' not in html
    assert 'class="band' not in html


DAMAGED: list[Any] = [
    None,
    "x",
    "<script>",
    -1,
    0,
    1e-320,
    1e-14,
    1e308,
    -1e308,
    10**400,
    True,
    [],
    {},
    [None],
    {"a": {}},
]


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: repr(value)[:12])
def test_no_value_of_a_row_can_stop_the_report(tmp_path: Path, value: Any) -> None:
    whole = a_row(2, layers=layers("scale_shift", 0.1) + layers("mean_abs_error", 0.1), reasons=["r"])
    rows = [whole | {key: value} for key in whole]
    rows += [whole | {"policy": whole["policy"] | {key: value}} for key in whole["policy"]]
    keys = ("layer", "scale_shift", "zero_point_shift", "range_over_std", "saturated_share", "mean_abs_error")
    rows += [a_row(3, layers=[{key: value}, {"mean_abs_error": 0.2, "layer": "l"} | {key: value}]) for key in keys]
    metrics = [{"step": 1, key: value, "quant/qat": 1} for key in (*METRICS[0], "quant/published_bytes")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for row in rows:
        (tmp_path / "calibration.jsonl").write_text('{"step": \n[1]\n' + json.dumps(row) + "\n")
        html = calibration_section(read_run(tmp_path))
        assert len(cells(html)) == 1
        assert "<script" not in html
        assert "nan" not in html


def test_two_calibrations_of_one_step_are_both_there() -> None:
    html = calibration_section(a_run([a_row(4, "measure"), a_row(4, "reject")]))
    assert [row[2] for row in cells(html)] == ["measured", "rejected"]
    assert pointed(html, "KL of the quantized policy")[0].endswith("· measured · rejected")
