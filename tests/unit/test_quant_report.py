import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import forge.quant_report as quant_report
from forge.errors import ForgeError
from forge.quant_report import write_layer_report


def a_layer(name: str, error: float | None = 0.02, scheme: str | None = "int8", **more: Any) -> dict[str, Any]:
    row = {"layer": name, "shape": [64, 32], "scheme": scheme, "weight_mean_abs_error": 0.001,
           "weight_relative_error": error, "output_relative_error": None, "range_over_std": 12.5,
           "saturated_share": 0.0005}  # fmt: skip
    return row | more


def a_model(depth: int = 3) -> list[dict[str, Any]]:
    kinds = [("self_attn", k) for k in ("q", "k", "v", "o")] + [("mlp", k) for k in ("gate", "up", "down")]
    rows = [
        a_layer(f"model.layers.{n}.{part}.{kind}_proj", 0.01 * (n + 1), output_relative_error=0.005)
        for n in range(depth)
        for part, kind in kinds
    ]
    return [*rows, a_layer("lm_head", 0.0, None)]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, to look at what is in them."""
    drawn: list[Figure] = []

    class Kept(Figure):
        def savefig(self, *args: Any, **options: Any) -> None:
            drawn.append(self)
            super().savefig(*args, **options)

    monkeypatch.setattr(quant_report, "Figure", Kept)
    return drawn


def panels(figure: Figure) -> dict[str, Any]:
    return {axes.get_title(): axes for axes in figure.axes if axes.axison}


def names(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def read(folder: Path) -> str:
    return (folder / "layers.md").read_text(encoding="utf-8")


def test_the_numbers_are_kept_as_strict_json(tmp_path: Path) -> None:
    rows = [a_layer("a", math.nan, range_over_std=math.inf), a_layer("b", scheme=None, shape=(3, 4))]
    write_layer_report(tmp_path / "new" / "folder", rows, title="t")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "new" / "folder" / "layers.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=refuse)
    assert (content["title"], content["quantized"], content["linears"]) == ("t", 1, 2)
    assert content["layers"][0] == a_layer("a", None, range_over_std=None)
    assert content["layers"][1] == a_layer("b", scheme=None, shape=[3, 4])


def test_numpy_numbers_are_taken(tmp_path: Path) -> None:
    write_layer_report(tmp_path, [a_layer("a", np.float32(0.5))], title="t")
    assert json.loads((tmp_path / "layers.json").read_text())["layers"][0]["weight_relative_error"] == 0.5
    assert "| 0.5 |" in read(tmp_path)


def test_the_table_is_headed_by_the_counts_and_the_worst_comes_first(tmp_path: Path) -> None:
    rows = [a_layer("low", 0.01), a_layer("high", 0.3), a_layer("unknown", math.nan), a_layer("head", 0.0, None)]
    write_layer_report(tmp_path, [*rows, a_layer("middle", 0.02)], title="int8 of a model")
    text = read(tmp_path)
    assert text.startswith("# int8 of a model\n\n## quantized 4 of 5 linears\n")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == ["unknown", "high", "middle", "low"]
    assert "| `high` | 64 × 32 | int8 | 0.3 | – | 0.001 | 12.5 | 0.05 % |" in text
    assert "## left unquantized: 1\n\n- `head` 64 × 32\n" in text


def test_all_columns_of_the_table_have_a_heading(tmp_path: Path) -> None:
    write_layer_report(tmp_path, a_model(), title="t")
    table = [line for line in read(tmp_path).splitlines() if line.startswith("|")]
    assert len(table) == 2 + 21
    assert {line.count("|") for line in table} == {9}


@pytest.mark.parametrize("scheme", ["int8", None])
def test_headings_without_a_layer_are_left_out(tmp_path: Path, scheme: str | None) -> None:
    write_layer_report(tmp_path, [a_layer("a", scheme=scheme)], title="t")
    assert ("| layer |" in read(tmp_path)) is (scheme is not None)
    assert ("left unquantized" in read(tmp_path)) is (scheme is None)


def test_names_cannot_break_the_table(tmp_path: Path) -> None:
    evil = "a|b`c\n| d $x_{"
    write_layer_report(tmp_path, [a_layer(evil, scheme="<b>|*", shape="[x](y)"), a_layer(evil, None, None)], title=evil)
    table = [line for line in read(tmp_path).splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len(re.findall(r"(?<!\\)\|", table[2])) == 9
    assert r"\<b\>\|\*" in table[2]
    assert read(tmp_path).startswith(r"# a\|b\`c \| d $x\_{" + "\n")


def test_each_projection_has_a_panel_of_its_errors_by_layer(tmp_path: Path, figures: list[Figure]) -> None:
    write_layer_report(tmp_path, a_model(), title="int8")
    (figure,) = figures
    shown = panels(figure)
    assert list(shown) == [*(f"{kind}_proj" for kind in "q k v o gate up down".split()), "other linears"]
    for title in list(shown)[:-1]:
        weights, outputs = shown[title].lines
        assert shown[title].get_yscale() == "log"
        assert (list(weights.get_xdata()), list(weights.get_ydata())) == ([0, 1, 2], [0.01, 0.02, 0.03])
        assert list(outputs.get_ydata()) == [0.005] * 3
    assert names(figure) == ["weights", "outputs", "left unquantized"]
    assert "quantized 21 of 22 linears" in figure.legends[0].get_title().get_text()
    low, high = shown["q_proj"].get_ylim()
    assert low < 0.005
    assert high > 0.03


def test_layers_left_out_are_shown_where_they_are_and_not_as_exact(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [a_layer(f"layers.{n}.q_proj", 0.0 if n in (0, 3) else 0.1, None if n in (0, 3) else "i") for n in range(4)]
    write_layer_report(tmp_path, rows, title="t")
    axes = panels(figures[0])["q_proj"]
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1, 2]
    assert [round(patch.get_x() + patch.get_width() / 2, 6) for patch in axes.patches] == [0, 3]
    assert names(figures[0]) == ["weights", "left unquantized"]


def test_errors_that_a_log_axis_cannot_show_are_marked(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [a_layer("layers.0.k_proj", 0.0), a_layer("layers.1.k_proj", math.inf), a_layer("layers.2.k_proj", 0.1)]
    write_layer_report(tmp_path, rows, title="t")
    assert names(figures[0]) == ["weights", "no error", "error unknown"]
    weights, exact, unknown = panels(figures[0])["k_proj"].lines
    assert list(weights.get_xdata()) == [2]
    assert (list(exact.get_xdata()), list(unknown.get_xdata())) == ([0], [1])


def test_experts_of_one_layer_are_not_joined(tmp_path: Path, figures: list[Figure]) -> None:
    experts = [a_layer(f"layers.{n}.mlp.experts.{e}.up_proj", 0.1 + e) for n in range(2) for e in range(3)]
    write_layer_report(tmp_path, [*experts, a_layer("layers.0.q_proj"), a_layer("layers.1.q_proj")], title="t")
    shown = panels(figures[0])
    assert list(shown["up_proj"].lines[0].get_xdata()) == [0, 0, 0, 1, 1, 1]
    assert shown["up_proj"].lines[0].get_linestyle() == "None"
    assert shown["q_proj"].lines[0].get_linestyle() == "-"


def test_other_linears_are_named_when_few_and_numbered_when_many(tmp_path: Path, figures: list[Figure]) -> None:
    write_layer_report(tmp_path, [a_layer("h.0.c_attn"), a_layer("a_very_long_name.of.a.head")], title="t")
    write_layer_report(tmp_path, [a_layer(f"h.{n}.qkv_proj") for n in range(9)], title="t")
    few, many = (panels(figure)["other linears"] for figure in figures)
    assert [label.get_text() for label in few.get_xticklabels()] == ["h.0.c_attn", "…_name.of.a.head"]
    assert list(many.lines[0].get_xdata()) == list(range(9))
    assert many.get_xlabel() == "in the order of the model"


@pytest.mark.parametrize(
    "rows",
    [[], [a_layer("layers.0.q_proj", None, None)], [a_layer("$x_{", math.nan)], [{}], [{"layer": None, "scheme": ""}]],
    ids=["none", "all left out", "not finite", "empty row", "no name"],
)
def test_any_rows_give_all_three_files(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_layer_report(tmp_path, rows, title="a $title_{ 模 " * 30)
    assert {path.name for path in tmp_path.iterdir()} == {"layers.json", "layers.md", "layers.png"}
    data = (tmp_path / "layers.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300


def test_the_picture_is_drawn_without_pyplot_and_its_global_state(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forge.quant_report import write_layer_report\n"
        "write_layer_report(Path(sys.argv[1]), [{'layer': 'a', 'scheme': 'int8'}], title='t')\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "layers.png").exists()


def test_a_long_title_is_wrapped_and_cut_to_the_picture(tmp_path: Path, figures: list[Figure]) -> None:
    write_layer_report(tmp_path, [a_layer("layers.0.q_proj")], title="word " * 100)
    (title,) = [text for text in figures[0].texts if "word" in text.get_text()]
    assert title.get_text().endswith(" …")
    assert title.get_text().count("\n") == 1
    assert title.get_window_extent(figures[0].canvas.get_renderer()).width < figures[0].bbox.width


def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    write_layer_report(tmp_path, a_model(), title="first")
    first = (tmp_path / "layers.png").read_bytes()
    write_layer_report(tmp_path, [a_layer("layers.0.q_proj")], title="second")
    assert "quantized 1 of 1 linears" in read(tmp_path)
    assert (tmp_path / "layers.png").read_bytes() != first
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["layers.json", "layers.md", "layers.png"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ForgeError, match=rf"layer report cannot be written to {re.escape(str(tmp_path))}"):
        write_layer_report(tmp_path, a_model(1), title="t")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
