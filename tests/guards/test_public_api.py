"""The names that `from forge import …` offers: one list, all of it real, all of it documented."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import forge


def test_the_export_table_and_the_names_for_type_checkers_agree(modules: dict[str, Path]) -> None:
    guarded = [n for n in ast.parse(modules["forge"].read_text()).body if isinstance(n, ast.If)]
    imported = {a.name for n in ast.walk(guarded[0]) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(forge._HOME) == set(forge.__all__)


@pytest.mark.parametrize("name", forge.__all__)
def test_every_exported_name_resolves_and_says_what_it_is(name: str) -> None:
    assert getattr(forge, name).__doc__, f"forge.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lunch'; it exports .*launch"):
        forge.lunch  # noqa: B018


@pytest.mark.parametrize("page", ["config.md", "api.md"])
def test_generated_pages_are_up_to_date(page: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    written = root / "docs" / page
    assert written.exists(), f"docs/{page} is missing: run `make docs`"
    assert written.read_text() == importlib.import_module("docs").PAGES[page](), f"docs/{page} is old: run `make docs`"
