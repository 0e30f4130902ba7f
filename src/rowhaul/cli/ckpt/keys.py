"""Keys as a person types them, and the stored keys that they may stand for.

Integer and hexadecimal ids are their own key, text ids are hashed; the integer 7 and the text "7" are
different keys. Which of them a table was trained on is usually known; if not, integer and text are looked up.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rowhaul._id_kinds import HEX, INTEGER, TEXT
from rowhaul.data.keys import hash_string
from rowhaul.errors import ConfigError

_LEAST, _MOST = -(2**63), 2**64 - 1  # ids may be unsigned


class Reading(NamedTuple):
    """One way to read a typed key."""

    typed: str
    kind: str  # see `rowhaul._id_kinds`
    key: int

    def __str__(self) -> str:
        return f"the integer {int(self.typed)}" if self.kind == INTEGER else f"the {self.kind} {self.typed!r}"


def readings(typed: str) -> list[Reading]:
    """All ways to read a key: as an integer or a hexadecimal number if it is one, and as text."""
    if typed.startswith("--"):
        raise ConfigError(f"no such option: {typed} (see `rowhaul ckpt cat --help`)")
    found = []
    try:
        number = int(typed)
    except ValueError:
        pass
    else:
        if _LEAST <= number <= _MOST:
            found.append(Reading(typed, INTEGER, _as_key(number)))
    if 0 < len(typed) <= 16 and set(typed) <= set(string.hexdigits):
        found.append(Reading(typed, HEX, _as_key(int(typed, 16))))
    return [*found, Reading(typed, TEXT, hash_string(typed))]


def _as_key(number: int) -> int:
    """The stored key of a number: the signed one with the same 64 bits."""
    return number - (1 << 64) if number >> 63 > 0 else number


def meant(typed: str, kinds: Sequence[str], raw: bool) -> list[Reading]:
    """The readings that fit a table of these kinds of ids; no kinds: unknown."""
    if raw:
        return [reading for reading in readings(typed) if reading.kind == INTEGER]
    return [reading for reading in readings(typed) if reading.kind in (kinds or (INTEGER, TEXT))]


def check_raw(typed: Iterable[str]) -> None:
    """Refuse what cannot be a stored key."""
    for one in typed:
        if not meant(one, (), raw=True):
            raise ConfigError(
                f"{one!r} is not a stored key: --raw takes 64-bit integers; leave out --raw for ids as they "
                "are in the data"
            )
