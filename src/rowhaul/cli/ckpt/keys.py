"""Keys as a person types them, and the stored keys that they may stand for.

Integer ids are their own key, text ids are hashed; the integer 7 and the text "7" are different keys. Which
of the two a table was trained on is usually known; if it is not, both are looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rowhaul.data.keys import hash_string
from rowhaul.errors import ConfigError

INTEGER, TEXT = "integer", "text"
_LEAST, _MOST = -(2**63), 2**63 - 1


class Reading(NamedTuple):
    """One way to read a typed key."""

    typed: str
    kind: str  # "integer" or "text"
    key: int

    def __str__(self) -> str:
        return f"the integer {self.key}" if self.kind == INTEGER else f"the text {self.typed!r}"


def readings(typed: str) -> list[Reading]:
    """All ways to read a key: as an integer if it is one, and as text."""
    if typed.startswith("--"):
        raise ConfigError(f"no such option: {typed} (see `rowhaul ckpt cat --help`)")
    found = []
    try:
        number = int(typed)
    except ValueError:
        pass
    else:
        if _LEAST <= number <= _MOST:
            found.append(Reading(typed, INTEGER, number))
    return [*found, Reading(typed, TEXT, hash_string(typed))]


def meant(typed: str, kinds: Sequence[str], raw: bool) -> list[Reading]:
    """The readings that fit a table of these kinds of ids; no kinds: unknown."""
    if raw:
        return [reading for reading in readings(typed) if reading.kind == INTEGER]
    return [reading for reading in readings(typed) if not kinds or reading.kind in kinds]


def check_raw(typed: Iterable[str]) -> None:
    """Refuse what cannot be a stored key."""
    for one in typed:
        if not meant(one, (), raw=True):
            raise ConfigError(
                f"{one!r} is not a stored key: --raw takes 64-bit integers; leave out --raw for ids as they "
                "are in the data"
            )
