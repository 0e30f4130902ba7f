"""Settings made in Python have the types that their dataclass says, as those read from files have."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import PurePath
from types import UnionType
from typing import Any, get_origin, get_type_hints

import numpy as np

from rowhaul.errors import ConfigError


def check_fields(settings: Any) -> None:
    """Refuse settings of another type, before anything computes with them: for ``__post_init__``.

    Numbers of NumPy become Python's, whole floats integers, paths and numbers text, tuples lists, as files
    may have them: settings that a run resumes with are compared with what its file gives back. Settings of
    several types (a number or ``auto``) have checks of their own, which say what is meant.
    """
    owner: Any = type(settings)
    for name, kind in _kinds(owner).items():
        given = getattr(settings, name)
        held = _converted(kind, given)
        if isinstance(held, list | tuple | dict):
            held = _plain(held, f"{owner.__name__}: {name}")
        if not _is_of(kind, held):
            shown = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigError(f"{owner.__name__}: {name} must be of type {shown}, got {given!r}")
        if held is not given:
            object.__setattr__(settings, name, held)  # they are frozen


@cache
def _kinds(owner: Any) -> dict[str, Any]:
    types = get_type_hints(owner)
    return {one.name: types[one.name] for one in fields(owner)}


def _converted(kind: Any, given: Any) -> Any:
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, bool):
        return given
    if kind is int and isinstance(given, float) and given.is_integer():
        return int(given)
    if kind is str and isinstance(given, int | float | PurePath):
        return str(given)
    return given


def _plain(given: Any, where: str) -> Any:
    """The same, however deep, as a file gives it back."""
    if isinstance(given, dict):
        return {key: _plain(one, f"{where}: {key}") for key, one in given.items()}
    if isinstance(given, np.generic | np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return [_plain(one, where) for one in given]
    if isinstance(given, PurePath):
        return str(given)
    if given is None or isinstance(given, bool | int | float | str):
        return given
    raise ConfigError(
        f"{where} is {given!r}, which no configuration file can hold; give numbers, texts, lists or "
        "dictionaries"
    )


def _is_of(kind: Any, held: Any) -> bool:
    if isinstance(kind, UnionType):
        return True
    if isinstance(held, bool):
        return kind is bool
    if kind is float:
        return isinstance(held, int | float)
    plain = {list: list | tuple, dict: dict}.get(get_origin(kind), kind)  # a text is no list of texts
    return isinstance(held, plain)
