"""Imports point one way, and each vendor is known to one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LAYERS = [  # lowest first: a module imports from its own layer and from lower ones
    ("basics", "types errors files formats jsonl redact digest"),
    ("config", "config"),
    (
        "algorithms",
        "sandbox rows data model_folder hf_folder reward advantage buffer batch loss rounding quant metrics",
    ),
    (
        "reports",
        "bench parity plan runfolder charts report report_data report_figures report_calibration quant_report "
        "progress tracker",
    ),
    (
        "loop and adapters",
        "fetch inputs segments weights engine_vllm engine_vllm_quant engine_titan engine_titan_model "
        "engine_titan_files engine_titan_calibrator mesh service checkpoint chaos recalibration loop testing",
    ),
    ("actors", "actors"),
    ("launch", "actors.launch"),
    ("benchmarks", "benchmarks"),
    ("apps", "apps"),
]
VENDORS = {  # who may import it; a sub-module or a sibling with a longer name (engine_titan_model) counts too
    "vllm": ["engine_vllm", "actors.peers"],
    "torchtitan": ["engine_titan"],
    "torchstore": ["weights", "actors.peers"],
    "torchao": ["quant", "engine_vllm"],
    "monarch": ["mesh"],
}


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def layer(module: str) -> int | None:
    """Index of a module's layer, by the longest name in the table that it is or lies in."""
    matches = [
        (len(name), index)
        for index, (_, names) in enumerate(LAYERS)
        for name in names.split()
        if f"{module}.".startswith(f"forge.{name}.")
    ]
    return max(matches)[1] if matches else None


def test_every_module_has_a_layer(modules: dict[str, Path]) -> None:
    missing = [m for m in modules if m not in ("forge", "forge.configs") and layer(m) is None]
    assert not missing, f"add to LAYERS: {', '.join(missing)}"


def test_imports_point_down(modules: dict[str, Path]) -> None:
    wrong = []
    for module, path in modules.items():
        own = layer(module)
        for line, name in imports(path, module) if own is not None else ():
            other = layer(name)
            if other is not None and own is not None and other > own:
                wrong.append(f"{path.name}:{line}: {module} ({LAYERS[own][0]}) imports {name} ({LAYERS[other][0]})")
    assert not wrong, "\n".join(["these imports point up:", *wrong])


def test_each_vendor_is_imported_by_its_adapter_alone(modules: dict[str, Path]) -> None:
    wrong = []
    for module, path in modules.items():
        for line, name in imports(path, module):
            vendor = name.split(".")[0]
            allowed = VENDORS.get(vendor)
            if allowed and not any(f"{module}.".startswith((f"forge.{a}.", f"forge.{a}_")) for a in allowed):
                wrong.append(f"{path.name}:{line}: {module} imports {vendor}, which only {', '.join(allowed)} may")
    assert not wrong, "\n".join(wrong)


def test_apps_define_no_classes(modules: dict[str, Path]) -> None:
    """A class of a `python -m apps.x` module pickles as `__main__` and no worker finds it."""
    wrong = [
        f"{path.name}:{node.lineno}: class {node.name}"
        for module, path in modules.items()
        if module.startswith("forge.apps")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not wrong, "\n".join(wrong)
