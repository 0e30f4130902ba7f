"""Settings as a person writes them: files and dotted names, checked against the sections they are for."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml

from rowhaul._yaml import load_yaml
from rowhaul.errors import ConfigError
from rowhaul.nn.exactness import refuse_clipping, refuse_scaler
from rowhaul.pruning.config import CHUNK_RULES
from rowhaul.schedule.lifetimes.policy import DEFAULT

_POWER_OF_TEN = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML reads 1e-3 as text


def read_settings(path: str | Path) -> dict[str, Any]:
    """The contents of a YAML or TOML file as nested dictionaries."""
    path = Path(path)
    text = _text_of(path)
    try:
        given = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML or TOML: {error}") from None
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{path}: expected settings by name, got {type(given).__name__}")
    return given or {}


def _text_of(path: Path) -> str:
    """Read a file of settings; data named in its place, by a pattern without quotes, is known as such."""
    try:
        content = path.read_bytes()
        if b"\0" not in content[:1024]:
            return content.decode("utf-8")
        what = "not text in UTF-8"
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError:
        what = "not text in UTF-8"
    except IsADirectoryError:
        what = "a folder"
    raise ConfigError(
        f"{path} is {what}; a file of settings in YAML or TOML is needed here. Data is named by --data, each "
        "file by its own, or as a pattern in quotes: --data 'logs/*.parquet'"
    )


def migrated(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move settings of earlier versions to where they belong today."""
    given = _with_tail(given)
    cluster = given.get("cluster") if isinstance(given, Mapping) else None
    if not isinstance(cluster, Mapping) or "admit_after" not in cluster:
        return given
    moved: dict[str, Any] = {**given, "cluster": dict(cluster)}
    sightings = moved["cluster"].pop("admit_after")
    if sightings != 1:
        tables = moved["tables"] = dict(given.get("tables") or {})
        tables[DEFAULT] = {"admit_after": sightings, **(tables.get(DEFAULT) or {})}
    return moved


def _with_tail(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say that what is pruned reads as zeros where there are rules for chunks.

    Configurations of runs saved before there was a tail have all of them.
    """
    prune = given.get("prune") if isinstance(given, Mapping) else None
    if not isinstance(prune, Mapping) or "tail" in prune or not any(name in prune for name in CHUNK_RULES):
        return given
    return {**given, "prune": {**prune, "tail": "zeros"}}


def override(given: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name such as ``model.embedding_dim`` in nested dictionaries."""
    *outer, last = name.split(".")
    for part in outer:
        given = given.setdefault(part, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{part}: expected settings by name, got {given!r}; {name} cannot be set in it")
    given[last] = value


Section = TypeVar("Section")


def updated(section: Section, given: Mapping[str, Any], where: str = "") -> Section:
    """A section with the settings given; the others keep their values."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where[:-1]}: expected settings by name, got {given!r}")
    types = get_type_hints(type(section))
    known = [one.name for one in fields(cast(Any, section))]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            _refuse_inexact(str(name))
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"unknown setting {where}{name}; {hint}")
        if is_dataclass(types[name]):
            values[name] = updated(getattr(section, name), value, f"{where}{name}.")
        else:
            values[name] = _converted(types[name], value, where + name)
    return cast(Section, replace(cast(Any, section), **values))


def _refuse_inexact(name: str) -> None:
    """Explain why a setting known from other libraries does not exist here."""
    if "clip" in name:
        refuse_clipping(name)
    if "scaler" in name or name in ("amp", "mixed_precision"):
        refuse_scaler(name)


def _converted(kind: Any, value: Any, name: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # cache: 2000 means the text "2000"
    expected = {dict[str, Any]: dict, list[str]: list}.get(kind, kind)
    if kind == list[str] and isinstance(value, str):
        return [one.strip() for one in value.split(",") if one.strip()]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        if kind is float and isinstance(value, str):  # such as 1e-3
            with suppress(ValueError):
                return float(value)
        known = getattr(expected, "__name__", str(expected))  # a union has no name
        raise ConfigError(f"{name}: expected {known}, got {value!r}")
    return _with_numbers(value) if expected is dict else value


def _with_numbers(value: Any) -> Any:
    """The same with numbers such as 1e-8, however deep: nothing says which options are numbers."""
    if isinstance(value, dict):
        return {name: _with_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    is_number = isinstance(value, str) and _POWER_OF_TEN.fullmatch(value)
    return float(value) if is_number else value
