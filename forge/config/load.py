"""Compose, check and print configurations.

The dataclasses of `schema` say which keys exist; the YAML tree in configs/ only picks values. Everything that can be
checked without torch is checked here, all problems are reported at once, and nothing later sees a DictConfig.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

from forge.config.schema import GrpoConfig
from forge.errors import ConfigError
from forge.files import check_regular, path_problem

SCHEMAS: dict[str, type[GrpoConfig]] = {"grpo": GrpoConfig}
"""The schema of each app that Hydra configures."""
_PATHS = ("model.path", "data.path", "resume", "out", "name")
"""Keys whose values become paths."""


def load_config(app: str, overrides: Sequence[str] = (), *, file: str | Path | None = None) -> GrpoConfig:
    """Compose, check and return the configuration of an app.

    Order, the later wins: schema defaults, configs/APP.yaml, group choices (`model=tiny`, `experiment=demo`),
    `file`, other overrides. `model=PATH` and `data=PATH` take a folder or file of your own.

    Args:
        app: "grpo".
        overrides: Hydra's `key=value`, as on the command line.
        file: a YAML file of keys, nested or dotted.

    Raises:
        ConfigError: every problem found, one line each; nothing has been loaded by then.
    """
    if app not in SCHEMAS:
        raise ConfigError(f"no app {app!r} takes a configuration: {', '.join(SCHEMAS)} do")
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    problems: list[str] = []
    groups, values = _split(_read_overrides(overrides, problems) + _read_file(file, problems), problems)
    if problems:
        raise ConfigError(problems)

    ConfigStore.instance().store(name=f"{app}_schema", node=SCHEMAS[app])
    GlobalHydra.instance().clear()
    with initialize_config_module("forge.configs", version_base="1.3"):
        config = compose(app, overrides=groups)
    for source, key, value in values:
        _assign(config, SCHEMAS[app], source, key, value, problems)
    loaded: GrpoConfig = OmegaConf.to_object(config)  # type: ignore[assignment]
    problems.extend(_nonfinite(loaded))
    paths = dict(zip(_PATHS, attrgetter(*_PATHS)(loaded), strict=True))
    impossible = [
        f"{k}={v[:40]!r} {problem}" for k, v in paths.items() if v is not None and (problem := path_problem(v))
    ]
    if impossible:  # nothing may look at them
        raise ConfigError(problems + impossible)
    problems.extend(loaded.problems())
    if problems:
        raise ConfigError(problems)
    return loaded


def to_yaml(config: GrpoConfig) -> str:
    """The resolved configuration as YAML that `load_config(file=…)` reads back."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return OmegaConf.to_yaml({_public(str(key)): value for key, value in plain.items()})


def flatten(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf key of a schema with its type, in order, as users write it ("async.max_age")."""
    hints = get_type_hints(schema)
    for f in fields(schema):
        key = prefix + _public(f.name)
        if is_dataclass(hints[f.name]):
            yield from flatten(hints[f.name], key + ".")
        else:
            yield key, hints[f.name]


_Override = tuple[str, str, Any]  # where it was written, key as the user wrote it, value


def _public(key: str) -> str:
    return "async" if key == "async_" else key


def _internal(key: str) -> str:
    return "async_" + key[len("async") :] if key == "async" or key.startswith("async.") else key


def _read_overrides(overrides: Sequence[str], problems: list[str]) -> list[_Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    read: list[_Override] = []
    for text in overrides:
        if text[:1] in "+~":
            problems.append(f"{text}: every key exists already, so + and ~ have no meaning here: write key=value")
            continue
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(f"{text}: not of the form key=value (quote values that hold spaces, commas or brackets)")
            continue
        except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
            problems.append(f"{text[:60]}…: a value of {len(text)} characters cannot be read: write a shorter one")
            continue
        if override.is_sweep_override():
            problems.append(f"{text}: one run takes one value; start several runs for several values")
            continue
        # Hydra's grammar reads 08 and on as text; YAML 1.1 reads `on` as true. The schema decides, see _assign.
        read.append((text, override.key_or_group, override.value()))
    return read


def _read_file(file: str | Path | None, problems: list[str]) -> list[_Override]:
    if file is None:
        return []
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        # OmegaConf's reader takes 1e-6 for a number; YAML 1.1 takes it for text
        check_regular(Path(file))
        content = OmegaConf.to_container(OmegaConf.create(Path(file).read_text(encoding="utf-8-sig")))
    except OSError as error:
        problems.append(f"config file {file}: {error.strerror or error}")
        return []
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        problems.append(f"config file {file} is not YAML: {' '.join(str(error).split())}")
        return []
    except RecursionError:
        problems.append(f"config file {file} cannot be read: nested too deeply, or an anchor that holds itself")
        return []
    if not isinstance(content, Mapping):
        problems.append(f"config file {file} must hold keys and values, found {type(content).__name__}")
        return []
    return list(_leaves(content, str(file), ""))


def _leaves(content: Mapping[Any, Any], file: str, prefix: str) -> Iterator[_Override]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path != "data.task_args":
            yield from _leaves(value, file, path + ".")
        else:
            yield f"{file}: {path}", path, value


def _split(overrides: list[_Override], problems: list[str]) -> tuple[list[str], list[_Override]]:
    """Part group choices, which Hydra composes, from values, which `_assign` checks one by one."""
    options = _group_options()
    groups: list[str] = []
    values: list[_Override] = []
    for source, key, value in sorted(overrides, key=lambda o: not o[0].endswith(f": {o[1]}")):
        if key not in options:
            values.append((source, key, value))
        elif value in options[key]:
            groups.append(f"{key}={value}")
        elif key in ("model", "data") and isinstance(value, str) and _is_path(value):
            groups.append(f"{key}=local")
            values.append((source, f"{key}.path", value))
            if key == "model":
                values.append((source, "model.name", Path(value).name))
        else:
            near = _nearest(str(value), options[key])
            own = ", or the path of a folder of your own" if key in ("model", "data") else ""
            problems.append(f"{source}: {key} must be one of {', '.join(options[key])}{own}; got {value!r}{near}")
    return groups, values


def _is_path(value: str) -> bool:
    return bool(set(value) & set("/.")) or path_problem(value) is not None or Path(value).exists()


def _group_options() -> dict[str, list[str]]:
    from importlib.resources import files

    root = files("forge.configs")
    return {
        group.name: sorted(p.name.removesuffix(".yaml") for p in group.iterdir() if p.name.endswith(".yaml"))
        for group in root.iterdir()
        if group.is_dir() and not group.name.startswith("_")
    }


def _assign(config: Any, schema: type, source: str, key: str, value: Any, problems: list[str]) -> None:
    """Set one value, or say in one line why it cannot be."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = dict(flatten(schema))
    if key not in known and not key.startswith("data.task_args."):
        if any(k.startswith(key + ".") for k in known):
            problems.append(f"{source}: {key} is a section; set one of its keys, for example "
                            f"{next(k for k in known if k.startswith(key + '.'))}")  # fmt: skip
        else:
            problems.append(f"{source}: no key {key!r}{_nearest(key, list(known))}")
        return
    kind = known.get(key, dict[str, Any])
    expected = _describe(kind)
    value = getattr(value, "text", value) if not isinstance(value, str) else value  # Hydra's QuotedString
    if key in known and not _fits(kind, value):
        hint = " (write null for no value)" if value in ("None", "none") and "null" in expected else ""
        problems.append(f"{source}: {key} must be {expected}, got {value!r}{hint}")
        return
    if value == "???":
        problems.append(f"{source}: {key} must be {expected}; ??? has no meaning here")
        return
    value = _escaped(value)
    try:
        OmegaConf.update(config, _internal(key), value, merge=False, force_add=key not in known)
    except OmegaConfBaseException as error:
        problems.append(f"{source}: {key} must be {expected}, got {value!r} ({str(error).splitlines()[0]})")


def _escaped(value: Any) -> Any:
    """Text is text, however deep it lies: nothing in it is looked up."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {k: _escaped(v) for k, v in value.items()}
    return [_escaped(v) for v in value] if isinstance(value, list) else value


def _parts(kind: Any) -> tuple[Any, bool]:
    """The type itself, and whether null is allowed beside it."""
    args = get_args(kind)
    if type(None) in args:
        return next(a for a in args if a is not type(None)), True
    return kind, False


def _fits(kind: Any, value: Any) -> bool:
    kind, optional = _parts(kind)
    if value is None:
        return optional
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    if kind is int:
        return isinstance(value, int)
    if kind is str:
        return isinstance(value, str | int | float) and not (optional and value in ("None", "none"))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [e.value for e in kind]
    return kind is not bool and isinstance(value, Mapping)


def _describe(kind: Any) -> str:
    kind, optional = _parts(kind)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if isinstance(kind, type) and issubclass(kind, Enum):
        text = "one of " + ", ".join(e.value for e in kind)
    else:
        text = names.get(kind, "keys and values, for example {min_terms: 2}")
    return text + (" or null" if optional else "")


def _nearest(word: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if not near:  # a right name at a wrong level, as in trainer.temperature
        last = word.rsplit(".", 1)[-1]
        tails = {o.rsplit(".", 1)[-1]: o for o in options}
        near = [tails[t] for t in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    return f"; did you mean {near[0]}?" if near else ""


def _nonfinite(part: Any, prefix: str = "") -> Iterator[str]:
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            yield from _nonfinite(value, f"{prefix}{_public(f.name)}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{_public(f.name)} must be a finite number, got {value}"
