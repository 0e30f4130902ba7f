"""Dispatchers' settings as text: `value:...:key=value`, read by the fields of their dataclasses.

A dispatcher declares its settings as fields, in the order in which values without a name fill them.
Fields of other types than the ones read here are not settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rowhaul.errors import ConfigError

_NUMBERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    Fraction: (Fraction, "a number"),
}


def from_text(kind: type, name: str, text: str) -> Any:
    """Make a ``kind`` (a dataclass) of the settings in ``text``, which follow its ``name`` and a colon."""
    known = _settings(kind)
    given: dict[str, Any] = {}
    for place, part in enumerate(text.split(":") if text else []):
        key, equals, value = part.rpartition("=")
        if equals:
            key = key.replace("-", "_")
        elif place < len(known):
            key = list(known)[place]
        if key not in known:
            raise ConfigError(f"{name} does not know what to do with {part!r}; {_accepts(name, known)}")
        if key in given:
            raise ConfigError(f"{name}:{text} sets {key} twice; {_accepts(name, known)}")
        given[key] = _read(known[key], value, f"{name}:{text} sets {key} to {value!r}")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{name}:{text}: {error}") from None


def to_text(dispatcher: Any) -> str:
    """The text of which `from_text` makes an equal one, but for what is no setting."""
    values = {key: getattr(dispatcher, key) for key in _settings(type(dispatcher))}
    given = [f"{key}={value}" for key, value in values.items() if value is not None]
    return ":".join([dispatcher.name, *given])


def _settings(kind: type) -> dict[str, tuple[Any, ...]]:
    """The settings of a dataclass and what each may be, without the None of those that may be left open."""
    hints = get_type_hints(kind)
    known = {}
    for field in fields(kind):
        hint = hints[field.name]
        is_union = get_origin(hint) in (Union, UnionType)
        options = tuple(one for one in (get_args(hint) if is_union else (hint,)) if one is not NoneType)
        if all(option in _NUMBERS or get_origin(option) is Literal for option in options):
            known[field.name] = options
    return known


def _read(options: tuple[Any, ...], text: str, sentence: str) -> Any:
    for option in options:
        if get_origin(option) is Literal:
            if text in get_args(option):
                return text
            continue
        read, _ = _NUMBERS[option]
        try:
            return read(text)
        except (ValueError, ZeroDivisionError):
            continue
    raise ConfigError(f"{sentence}; {_values(options)} is needed")


def _values(options: tuple[Any, ...]) -> str:
    names = [get_args(one) if get_origin(one) is Literal else (_NUMBERS[one][1],) for one in options]
    return " or ".join(name for of_option in names for name in of_option)


def _accepts(name: str, known: dict[str, tuple[Any, ...]]) -> str:
    if not known:
        return f"{name} takes no settings"
    return f"{name} takes " + ", ".join(f"{key} ({_values(options)})" for key, options in known.items())
