"""Values that JSON or Python gave for a column, as an array; and which one is wrong, where that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rowhaul.data.columns import is_list

REFUSED = (pa.ArrowException, OverflowError, TypeError, ValueError)  # what is raised for wrong values


def as_array(values: Any) -> pa.Array:
    """Return values as an array, without mappings.

    Of those Arrow makes a column for each name that is in any of them, with a value for all: a request of
    some kilobytes would take gigabytes.
    """
    if not isinstance(values, list):
        return pa.array(values)
    found = kind = pa.infer_type(values)
    while is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        raise TypeError("mappings")
    return pa.array(values, found)


def first_wrong(values: Sequence[Any], is_number: bool) -> tuple[int, str]:
    """Find the first value that is wrong by itself, or one that Arrow cannot take after those before it."""
    never = (bool, str, list, dict) if is_number else (bool, dict)
    needed = "a number" if is_number else "an id"
    for place, value in enumerate(values):
        if isinstance(value, never):
            return place, f"{needed} is needed, got {kind_of(value)}"
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            return place, f"{needed} is needed, got a list with a mapping"
    taken, place = 0, len(values) - 1  # Arrow takes what is before the first, but not up to the second
    while taken < place:
        middle = (taken + place + 1) // 2
        try:
            as_array(values[:middle])
            taken = middle
        except REFUSED:
            place = middle - 1
    try:
        as_array(values[: place + 1])
    except OverflowError:
        return place, f"{values[place]!r} does not fit into 64 bits"
    except REFUSED:
        before = "" if place == 0 else " where the values before it are of another type"
        return place, f"got {kind_of(values[place])}{before}"
    return 0, "the values are not of one type"


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    names = {dict: "a mapping", list: "a list", str: "a string", type(None): "null", bool: "true or false"}
    names |= {int: "an integer", float: "a number"}
    return names.get(type(value), type(value).__name__)
