"""What quantization did to each linear layer of a model, as numbers, as a table and as a picture.

rows, one a layer ── write_layer_report ──┬── layers.json   all of it
                                          ├── layers.md     a table, worst layer first
                                          └── layers.png    relative error by layer, one panel a projection
"""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from forge.errors import ForgeError
from forge.formats import number
from forge.jsonl import strict, to_json, write_atomic
from forge.report_data import is_finite

KINDS = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections with a panel of their own, as in `model.layers.3.self_attn.q_proj`; all others share one."""
OTHER = "other"
MOST_NAMES = 6
"""Layers of the panel of others that are named below the axis; more are numbered."""
LETTERS_AN_INCH = 8
"""Characters of the title that fit on an inch of the picture."""
WEIGHT, OUTPUT = "weight_relative_error", "output_relative_error"
SERIES = (
    (WEIGHT, "weights", "#0b66c3", "o"),
    (OUTPUT, "outputs", "#c8570b", "s"),
)
"""Errors that are drawn: field, name, colour, marker."""
LEFT_OUT = "#6b7280"


def write_layer_report(folder: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Writes layers.json, layers.md and layers.png into `folder`, which is made if it is not there.

    Args:
        rows: one a linear layer, in the order of the model: layer, shape [out, in], scheme (None: left unquantized),
            weight_mean_abs_error, weight_relative_error (||w - q|| / ||w||), and where they were measured
            output_relative_error, range_over_std and saturated_share.
        title: what was quantized and how, the heading of the table and of the picture.

    Raises:
        ForgeError: the files cannot be written.
    """
    folder = Path(folder)
    clean: list[dict[str, Any]] = strict(rows if isinstance(rows, list) else list(rows))[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"title": title, "quantized": len(_quantized(clean)), "linears": len(clean), "layers": clean}
        write_atomic(folder / "layers.json", to_json(content, indent=1) + "\n")
        write_atomic(folder / "layers.md", _markdown(clean, title))
        _write_bytes(folder / "layers.png", _picture(clean, title))
    except OSError as error:
        reason = error.strerror or error
        raise ForgeError(f"the layer report cannot be written to {folder} ({reason}); free space there") from error


def _write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file so that a reader finds the old one or all of the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _quantized(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("scheme") is not None]


# The table -------------------------------------------------------------------------------------------------------

COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("weights, relative", WEIGHT, number),
    ("outputs, relative", OUTPUT, number),
    ("weights, mean abs.", "weight_mean_abs_error", number),
    ("range / std", "range_over_std", number),
    ("saturated", "saturated_share", lambda share: f"{100 * share:.2g} %"),
)
"""Heading, field and form of the numbers of a layer."""


def _markdown(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    quantized = _quantized(rows)
    left_out = [row for row in rows if row.get("scheme") is None]
    lines = [f"# {_plain(title)}", "", f"## quantized {len(quantized)} of {len(rows)} linears", ""]
    if quantized:
        lines += [
            "Worst first, by the relative error of the weights, ‖w − q‖ / ‖w‖; that of the outputs is measured on "
            "the same inputs. – was not measured or is not finite.",
            "",
            f"| layer | shape | scheme | {' | '.join(heading for heading, _, _ in COLUMNS)} |",
            f"|---|---|---|{'---:|' * len(COLUMNS)}",
            *map(_line, sorted(quantized, key=_badness, reverse=True)),
            "",
        ]
    if left_out:
        lines += [f"## left unquantized: {len(left_out)}", ""]
        lines += [f"- {_code(row.get('layer'))} {_shape(row)}".rstrip() for row in left_out]
        lines.append("")
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    values = [row.get(field) for _, field, _ in COLUMNS]
    numbers = [form(v) if is_finite(v) else "–" for v, (_, _, form) in zip(values, COLUMNS, strict=True)]
    return f"| {' | '.join([_code(row.get('layer')), _shape(row), _plain(row['scheme']), *numbers])} |"


def _badness(row: Mapping[str, Any]) -> float:
    """The key of the table's order; an error that is not a number is worse than any that is."""
    error = row.get(WEIGHT)
    return float(error) if is_finite(error) else math.inf


def _shape(row: Mapping[str, Any]) -> str:
    shape = row.get("shape")
    return " × ".join(_plain(size) for size in shape) if isinstance(shape, list) else ""


def _plain(value: Any) -> str:
    """Text that a Markdown cell shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(str(value).split()))


def _code(value: Any) -> str:
    """A name in code style; a back quote would end it, and a bar the cell."""
    return f"`{' '.join(str(value).split()).replace('`', chr(39)).replace('|', '/')}`"


# The picture -----------------------------------------------------------------------------------------------------


def _picture(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """The picture as PNG."""
    panels = _panels(rows)
    across = min(4, max(1, len(panels)))
    down = max(1, math.ceil(len(panels) / across))
    width = max(7.0, 4.0 * across)
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.08)
    figure = Figure(figsize=(width, 1.7 + 3.0 * down), dpi=110, layout=layout)
    FigureCanvasAgg(figure)
    heading = textwrap.wrap(title, int(LETTERS_AN_INCH * width), max_lines=2, placeholder=" …")
    # A title may hold "$", and is no formula.
    figure.suptitle("\n".join(heading), fontsize=13, fontweight="bold", parse_math=False)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    places = [axes for line in grid for axes in line]
    shown: dict[str, Any] = {}
    for axes, (kind, members) in zip(places, panels.items(), strict=False):
        shown |= _panel(axes, kind, members)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    _share_axis(places[0], rows)
    for line in grid:
        line[0].set_ylabel("relative error")
    caption = f"quantized {len(_quantized(rows))} of {len(rows)} linears; relative error ‖x − q‖ / ‖x‖, lower is better"
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncols=max(1, len(shown)),
        title=caption,
        fontsize=9.5,
        title_fontsize=9.5,
        frameon=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")  # a title in letters the font lacks is drawn as boxes
        data = io.BytesIO()
        figure.savefig(data, format="png")
    return data.getvalue()


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """(number of the layer, row) by kind of projection; the others are numbered in the order of the model."""
    panels: dict[str, list[tuple[int, Mapping[str, Any]]]] = {kind: [] for kind in (*KINDS, OTHER)}
    for row in rows:
        name = str(row.get("layer"))
        kind, at = re.search(r"(?:^|\.)([a-z]+)_proj$", name), re.search(r"(?:^|\.)(\d{1,6})\.", name)
        if kind and at and kind[1] in KINDS:
            panels[kind[1]].append((int(at[1]), row))
        else:
            panels[OTHER].append((len(panels[OTHER]), row))
    return {kind: members for kind, members in panels.items() if members}


def _panel(axes: Any, kind: str, members: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Draws a panel and returns what its key must explain."""
    shown: dict[str, Any] = {}
    names = [str(row.get("layer")) for _, row in members]
    named = kind == OTHER and len(names) <= MOST_NAMES
    kept = [(x, row) for x, row in members if row.get("scheme") is not None]
    out = [x for x, row in members if row.get("scheme") is None]
    axes.set_yscale("log")
    for field, name, colour, marker in SERIES:
        points = [(x, row[field]) for x, row in kept if is_finite(row.get(field)) and row[field] > 0]
        if points:
            xs = [x for x, _ in points]
            # Experts share the number of their layer; a line through them would only go up and down.
            line = "-" if len(set(xs)) == len(xs) else ""
            (shown[name],) = axes.plot(
                xs, [y for _, y in points], line + marker, color=colour, markersize=4, linewidth=1.2, label=name
            )
    on_axis = axes.get_xaxis_transform()  # x is a layer, y a share of the height: these have no place on a log axis
    half = 0.15 if named else 0.4
    for x in out:
        shown["left unquantized"] = axes.axvspan(x - half, x + half, color=LEFT_OUT, alpha=0.22, linewidth=0)
    exact = [x for x, row in kept if row.get(WEIGHT) == 0]
    if exact:
        (shown["no error"],) = axes.plot(exact, [0.04] * len(exact), "v", color="#14804f", transform=on_axis)
    unknown = [x for x, row in kept if not is_finite(row.get(WEIGHT))]
    if unknown:
        (shown["error unknown"],) = axes.plot(unknown, [0.96] * len(unknown), "x", color="#b3261e", transform=on_axis)
    if named:
        axes.set_xticks(range(len(names)), [_end(name, 16) for name in names], fontsize=8, parse_math=False)
    else:
        axes.set_xlabel("layer" if kind != OTHER else "in the order of the model")
        axes.xaxis.get_major_locator().set_params(integer=True)
    last = max(x for x, _ in members)
    axes.set_xlim(-0.7, last + 0.7)
    axes.set_title(f"{kind}_proj" if kind != OTHER else "other linears", fontsize=11)
    axes.grid(which="major", color="#e1e4ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return shown


def _share_axis(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Numbers of the error axis that all panels share, written out, and a range for when nothing can be drawn."""
    errors = [row[field] for row in _quantized(rows) for field, *_ in SERIES if is_finite(row.get(field))]
    drawn = [error for error in errors if error > 0]
    low, high = (min(drawn), max(drawn)) if drawn else (0.01, 0.1)
    axes.set_ylim(low / 1.6, high * 1.6)
    few = high / low < 100  # then powers of ten alone would be one or two numbers
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
