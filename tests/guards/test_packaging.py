"""What `pip install` puts on another machine is what lies in the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SHIPPED = {".py", ".yaml", ".typed"}
PACKAGES = {"forge": "forge", "actors": "forge/actors", "apps": "forge/apps", "configs": "forge/configs"}


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def wheel(root: Path, files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a build folder, and takes old files from one it finds."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in files:
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", out, copy)
    return next(out.glob("forge_rl-*.whl"))


def test_the_wheel_holds_exactly_the_files_of_the_tree(wheel: Path, root: Path, files: list[Path]) -> None:
    relative = [p.relative_to(root) for p in files if p.suffix in SHIPPED]
    expected = {str(Path(PACKAGES[p.parts[0]], *p.parts[1:])) for p in relative if p.parts[0] in PACKAGES}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected, "list every sub-package under [tool.setuptools] packages"


def test_the_installed_wheel_works_outside_the_checkout(
    wheel: Path, tmp_path: Path, python: Callable[..., str]
) -> None:
    pip("install", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    code = """
import forge, forge.actors, forge.apps.__main__
print(forge.load_config("grpo", ["model=tiny"]).model.name)
print(forge.__file__)
"""
    name, file = python(code, PYTHONPATH=str(tmp_path)).splitlines()
    assert name == "tiny"
    assert Path(file).is_relative_to(tmp_path)


def test_the_version_is_stated_once(root: Path) -> None:
    import forge

    assert forge.__version__ == tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def locked(root: Path, stack: str) -> list[tuple[str, str]]:
    """Name and version of each line of a lock that holds for this machine."""
    lines = (root / "requirements" / f"{stack}.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return [(r.name, str(r.specifier)[2:]) for r in requirements if r.marker is None or r.marker.evaluate()]


@pytest.mark.parametrize("stack", ["cpu", "cuda"])
def test_the_lock_meets_the_ranges_of_pyproject(stack: str, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = dict(locked(root, stack))
    wrong = []
    for requirement in map(Requirement, project["dependencies"] + extras[stack] + extras["dev"]):
        got = versions.get(canonicalize_name(requirement.name))
        if got is None or got not in requirement.specifier:
            wrong.append(f"{requirement} but requirements/{stack}.txt has {got}: run `make lock`")
    assert not wrong, "\n".join(wrong)


def test_this_environment_is_the_locked_one(root: Path) -> None:
    """Otherwise the tests say nothing about what others install."""
    installed = {canonicalize_name(d.name): d.version for d in distributions()}
    lock = "cpu" if installed["torch"].endswith("+cpu") else "cuda"
    wrong = [f"{name}: {installed.get(name)}, locked {v}" for name, v in locked(root, lock) if installed.get(name) != v]
    assert not wrong, "\n".join(wrong)
