import re
import xml.etree.ElementTree as ET

import pytest

from forge.charts import (
    CHART_STYLE,
    COLOURS,
    MOST_POINTS,
    SHAPES,
    Mark,
    Series,
    bar_rows,
    extremes,
    histogram,
    line_chart,
    means,
    stacked_bars,
    tick_texts,
    ticks,
)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def ys_of(line: ET.Element) -> list[float]:
    return [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]


def lines_in(svg: str) -> list[ET.Element]:
    return [e for e in parsed(svg).iter("polyline")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.12, 0.78, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (-0.03, 0.03, [-0.04, -0.02, 0.0, 0.02, 0.04]),
        (5, 5, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
        (0, 3e-15, [0.0, 1e-15, 2e-15, 3e-15]),
        (0, 0, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round_and_span_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected, rel=1e-6, abs=1e-17)


def test_axis_numbers_can_be_told_apart() -> None:
    assert tick_texts([0.996, 0.998, 1.0, 1.002]) == ["0.996", "0.998", "1.000", "1.002"]
    assert tick_texts([0, 500, 1000]) == ["0", "500", "1,000"]
    assert len(set(tick_texts([10000.5, 10001.0, 10001.5]))) == 3


def test_higher_values_are_drawn_higher() -> None:
    (line,) = lines_in(line_chart([Series(name="a", points=[(1, 0.1), (2, 0.5), (3, 0.3)])], label="x"))
    first, second, third = ys_of(line)
    assert second < third < first


def test_a_chart_without_points_is_no_chart() -> None:
    assert line_chart([Series(name="a", points=[])], label="x") == ""
    assert stacked_bars([Series(name="a", points=[])], label="x") == ""
    assert histogram({}, label="x") == ""
    assert histogram({1: 0.0}, label="x") == ""


def test_one_point_is_a_dot() -> None:
    svg = line_chart([Series(name="a", points=[(1, 0.5)])], label="x")
    assert "<polyline" not in svg
    assert len(list(parsed(svg).findall("circle"))) == 1


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-320, -3.0, 1e12])
def test_equal_values_are_a_level_line_within_the_picture(value: float) -> None:
    (line,) = lines_in(line_chart([Series(name="a", points=[(1, value), (2, value)])], label="x"))
    first, second = ys_of(line)
    assert first == second
    assert 0 < first < 220


def test_every_value_lies_within_the_picture() -> None:
    points = [(float(x), (x % 7) * 0.13 - 0.2) for x in range(1, 50)]
    svg = line_chart([Series(name="a", points=points)], label="x", zero=True, top=1.0)
    _, _, width, height = map(float, parsed(svg).attrib["viewBox"].split())
    (line,) = lines_in(svg)
    for pair in line.attrib["points"].split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_a_single_spike_in_thousands_of_steps_stays_visible() -> None:
    points = [(float(x), 9.0 if x == 1234 else 0.5) for x in range(5000)]
    assert max(y for _, y in extremes(points)) == 9.0
    assert len(extremes(points)) <= 2 * MOST_POINTS
    (line,) = lines_in(line_chart([Series(name="a", points=points)], label="x", zero=True))
    assert min(ys_of(line)) < 0.3 * max(ys_of(line))


def test_bars_of_many_steps_are_means_of_neighbours() -> None:
    points = [(float(x), float(x % 2)) for x in range(2 * MOST_POINTS)]
    assert [y for _, y in means(points)] == [0.5] * MOST_POINTS


def test_a_stack_is_as_high_as_the_sum_of_its_layers() -> None:
    layers = [Series(name="a", points=[(1, 2.0), (2, 2.0)]), Series(name="b", points=[(1, 6.0)], colour=1)]
    bars = [e for e in parsed(stacked_bars(layers, label="x")).findall("rect")]
    heights = [float(b.attrib["height"]) for b in bars]
    assert len(bars) == 3  # step 2 has no b
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.1)
    assert float(bars[1].attrib["y"]) + heights[1] == pytest.approx(float(bars[0].attrib["y"]), abs=0.11)


def test_histogram_bars_are_proportional_and_say_their_share() -> None:
    svg = histogram({0: 30, 1: 10, 3: 0}, label="x", mark=(3, "bound 3"))
    first, second = (float(b.attrib["height"]) for b in list(parsed(svg).findall("rect"))[:2])
    assert first == pytest.approx(3 * second, rel=0.01)
    texts = [t.text for t in parsed(svg).iter("text")]
    assert {"75 %", "25 %", "bound 3"} <= set(texts)


def test_the_mark_of_a_histogram_stands_right_of_the_last_allowed_bar() -> None:
    svg = histogram({0: 1, 1: 1}, label="x", mark=(1, "bound 1"))
    mark = next(e for e in parsed(svg).iter("line") if e.attrib["class"] == "mark")
    last = list(parsed(svg).findall("rect"))[-1]
    assert float(mark.attrib["x1"]) > float(last.attrib["x"]) + float(last.attrib["width"])


def test_the_pointer_shows_the_values_of_its_step() -> None:
    series = [Series(name="a <b>", points=[(1, 0.5), (2, 0.25)]), Series(name="c", points=[(2, 3.0)])]
    groups = [g for g in parsed(line_chart(series, label="x", unit=" s")).iter("g")]
    texts = [t.text for g in groups for t in g.iter("text")]
    assert texts == ["step 1 · a <b> 0.5 s", "step 2 · a <b> 0.25 s · c 3 s"]


def test_what_is_on_or_off_stands_behind_the_line_and_does_not_stretch_the_axis() -> None:
    gap = Series(name="gap", points=[(x, 0.1) for x in range(1, 6)])
    on = Series(name="on", points=[(1, 0), (2, 1), (3, 1), (4, 0), (5, 1)], look="band")
    version = Series(name="v", points=[(1, 70), (2, 70), (3, 80), (4, 80), (5, 90)], look="rule")
    root = parsed(line_chart([gap, on, version], label="x", zero=True))
    bands = [e for e in root.findall("rect") if "band" in e.attrib["class"]]
    # x = 1 … 5 lies at 52 … 548, 124 apart; a band reaches half a step to both sides and ends where the axis does
    assert [(float(b.attrib["x"]), float(b.attrib["width"])) for b in bands] == [(114.0, 248.0), (486.0, 62.0)]
    rules = [e for e in root.findall("line") if "rule" in e.attrib["class"]]
    assert [float(r.attrib["x1"]) for r in rules] == [300.0, 548.0]
    texts = [t.text for t in root.findall("text")]
    assert {"v 80", "v 90", "0.1"} <= set(texts)
    assert "100" not in texts
    assert "step 3 · gap 0.1 · on 1 · v 80" in [t.text for t in root.iter("text")]


def test_names_of_crowded_changes_do_not_overlap() -> None:
    line = Series(name="a", points=[(x, 1.0) for x in range(200)])
    version = Series(name="scales", points=[(x, float(x)) for x in range(200)], look="rule")
    root = parsed(line_chart([line, version], label="x"))
    assert len([e for e in root.findall("line") if "rule" in e.attrib["class"]]) == 199
    named = [t for t in root.findall("text") if (t.text or "").startswith("scales ")]
    places = sorted(float(t.attrib["x"]) for t in named if "text-anchor" not in t.attrib)
    assert 5 < len(named) < 12
    assert min(b - a for a, b in zip(places, places[1:], strict=False)) > 45


def test_only_what_is_on_or_off_is_no_chart() -> None:
    assert line_chart([Series(name="on", points=[(1, 1), (2, 1)], look="band")], label="x") == ""


def test_marks_lie_on_their_values_or_on_the_axis_and_are_named_under_the_pointer() -> None:
    line = Series(name="a", points=[(1, 0.0), (2, 4.0)])
    marks = [
        Mark(x=2, y=4.0, name="<taken>", shape="cross", tone="bad"),
        Mark(x=3, y=None, name="late", shape="down"),
        Mark(x=3, y=8.0, name="high"),
    ]
    root = parsed(line_chart([line], label="x", marks=marks))
    assert [p.attrib["transform"] for p in root.findall("path")] == [
        "translate(300.0 105.0)", "translate(548.0 186.0)", "translate(548.0 24.0)"
    ]  # fmt: skip
    texts = [t.text for g in root.iter("g") for t in g.iter("text")]
    assert texts == ["step 1 · a 0", "step 2 · a 4 · <taken>", "step 3 · late · high"]


def test_lying_bars_are_as_long_as_their_values() -> None:
    svg = bar_rows([("a <b>", 0.4, "note <i>"), ("x" * 50 + "end", 0.1, ""), ("none", 0.0, "")], label="<l>")
    root = parsed(svg)
    lengths = [float(b.attrib["width"]) for b in root.findall("rect")]
    assert lengths == [pytest.approx(4 * lengths[1], rel=0.01), lengths[1], 0.0]
    texts = [t.text or "" for t in root.findall("text")]
    assert {"a <b>", "0.4", "note <i>", "…" + "x" * 43 + "end"} <= set(texts)
    assert [t.text for t in root.iter("title")][1] == "x" * 50 + "end: 0.1"
    assert float(root.attrib["viewBox"].split()[3]) == pytest.approx(3 * 25, abs=5)
    assert bar_rows([], label="x") == ""
    assert 'width="0.0"' in bar_rows([("a", 0.0, "")], label="x")


def test_names_and_labels_are_escaped() -> None:
    svg = line_chart([Series(name='"><script>', points=[(1, 1), (2, 2)])], label='"><script>')
    assert "<script" not in svg
    assert parsed(svg).attrib["aria-label"] == '"><script>'


def test_every_colour_of_a_series_has_a_style() -> None:
    assert set(re.findall(r"\.s(\d)", CHART_STYLE)) == {str(n) for n in range(COLOURS)}


def test_no_two_shapes_are_alike() -> None:
    assert len(set(SHAPES.values())) == len(SHAPES)
