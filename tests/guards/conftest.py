from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDERS = {"forge": "forge", "actors": "forge.actors", "apps": "forge.apps", "configs": "forge.configs"}
"""Folders of the checkout and the packages they install as."""
IGNORED = {"build", "dist", "runs", "outputs", "__pycache__"}
"""Folders that git ignores too; so are hidden ones, .ci excepted."""


def is_source(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    hidden = any(p.startswith(".") and p != ".ci" for p in parts[:-1])
    return path.is_file() and not hidden and not any(p in IGNORED or p.endswith(".egg-info") for p in parts)


@pytest.fixture(scope="session")
def root() -> Path:
    """Top of the checkout."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def files(root: Path) -> list[Path]:
    """Every file of the repository."""
    tops = [p for p in sorted(root.iterdir()) if p.name == ".ci" or not p.name.startswith(".") or p.is_file()]
    below = (p for top in tops if top.name not in IGNORED for p in ([top] if top.is_file() else sorted(top.rglob("*"))))
    return [p for p in below if is_source(p, root)]


@pytest.fixture(scope="session")
def modules(root: Path, files: list[Path]) -> dict[str, Path]:
    """Import name to file, of all that ships."""
    found = {}
    for path in files:
        top, *rest = path.relative_to(root).with_suffix("").parts
        if path.suffix == ".py" and top in FOLDERS and rest:
            found[".".join([FOLDERS[top], *rest]).removesuffix(".__init__")] = path
    return found


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """Run code in a fresh interpreter in / and return what it prints. Its environment is new too: this process has
    imported Forge already."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}

    def run(code: str, **env: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd="/", env=clean | env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
