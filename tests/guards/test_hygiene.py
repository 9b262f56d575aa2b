"""Rules of CONTRIBUTING.md that a text search can hold."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LINES = 600
TEXT = {".py", ".yaml", ".toml", ".md", ".txt", ".sh", ".ipynb", ".cfg", ".html", ""}
# Spelled in pieces, so that this file passes its own test.
PRIVATE_PATHS = re.compile(r"(?<![\w./-])/" + r"(?:work|root|home/\w+|opt/(?:wheels|pypi[\w-]*))(?=[/\s\"'`:]|$)")


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.suffix in TEXT else []


def test_files_stay_short_enough_to_read(files: list[Path]) -> None:
    long = [f"{p}: {len(lines(p))} lines" for p in files if p.suffix == ".py" and len(lines(p)) > MAX_LINES]
    assert not long, "\n".join([f"split what is over {MAX_LINES} lines into a sub-package:", *long])


def test_every_todo_names_an_issue(files: list[Path]) -> None:
    todo = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")
    found = [f"{p}:{n}: {line.strip()}" for p in files for n, line in enumerate(lines(p), 1) if todo.search(line)]
    assert not found, "\n".join(["write TO" + "DO(#123), or do it:", *found])


def test_no_file_names_a_path_of_one_persons_machine(files: list[Path]) -> None:
    found = [
        f"{p}:{n}: {line.strip()}" for p in files for n, line in enumerate(lines(p), 1) if PRIVATE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_package_index_but_the_public_pytorch_one(files: list[Path]) -> None:
    index = re.compile(r"(--(extra-)?index-url|--find-links|PIP_INDEX_URL|PIP_FIND_LINKS)[= ]+[\"']?(?!\$|\"?\$)[a-z/]")
    found = [f"{p}:{n}: {line.strip()}" for p in files for n, line in enumerate(lines(p), 1) if index.search(line)]
    assert not found, "\n".join(found)


def test_every_relative_link_of_a_page_leads_somewhere(files: list[Path]) -> None:
    link = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
    pages = [p for p in files if p.suffix == ".md"]
    broken = [f"{p}: {m}" for p in pages for m in link.findall(p.read_text()) if not (p.parent / m).exists()]
    assert not broken, "\n".join(broken)


def test_no_wait_depends_on_the_time_of_day(modules: dict[str, Path]) -> None:
    """A clock that is set while a run goes on moves no timeout: time of day only stamps records."""
    stamps = {"forge.tracker", "forge.runfolder", "forge.actors.launch"}
    of_day = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.now\(")
    assert {m for m, path in modules.items() if of_day.search(path.read_text())} <= stamps
