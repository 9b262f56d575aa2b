"""Writes the generated pages: docs/config.md from the configuration schema, docs/api.md from what `forge` exports."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import forge
from forge.config import SCHEMAS

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Written by `make docs`; edit the docstrings instead. -->"


def field_texts(schema: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (body,) = ast.parse(inspect.cleandoc(inspect.getsource(schema))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def type_text(hint: Any) -> str:
    """A type as users know it: enums by their values, None as null."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " \\| ".join(member.value for member in hint)
    if hint is NoneType:
        return "null"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    if hasattr(hint, "__origin__"):
        return str(hint).replace("typing.", "")
    return " \\| ".join(map(type_text, get_args(hint))) or str(hint)


def default_text(field: Field[Any]) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if isinstance(value, Enum):
        return str(value.value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def section(schema: type, prefix: str) -> Iterator[str]:
    """A table of a schema's own keys, then a section for each of its groups."""
    hints, texts = get_type_hints(schema), field_texts(schema)
    leaves = [f for f in fields(schema) if not is_dataclass(hints[f.name])]
    yield from (f"## {prefix.rstrip('.') or 'top level'}", "", inspect.cleandoc(schema.__doc__ or ""), "")
    if leaves:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for f in leaves:
        cell = texts.get(f.name, "").replace("|", "\\|")
        yield f"| `{prefix}{f.name.rstrip('_')}` | {type_text(hints[f.name])} | `{default_text(f)}` | {cell} |"
    yield ""
    for f in fields(schema):
        if is_dataclass(hints[f.name]):
            yield from section(hints[f.name], f"{prefix}{f.name.rstrip('_')}.")


def config_page() -> str:
    lines = [
        "# Configuration",
        "",
        NOTE,
        "",
        "Defaults are the schema's; `forge grpo --show key=value …` prints what a command resolves to.",
    ]
    for app, schema in SCHEMAS.items():
        lines += ["", f"# `forge {app}`", "", *section(schema, "")]
    return "\n".join(lines).rstrip() + "\n"


def api_page() -> str:
    lines = ["# What `from forge import …` offers", "", NOTE, "", "| name | lives in | what it is |", "|---|---|---|"]
    for name in sorted(forge.__all__, key=str.lower):
        thing = getattr(forge, name)
        lines.append(f"| `{name}` | `{forge._HOME[name]}` | {inspect.cleandoc(thing.__doc__ or '').splitlines()[0]} |")
    return "\n".join(lines) + "\n"


PAGES = {"config.md": config_page, "api.md": api_page}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write())
