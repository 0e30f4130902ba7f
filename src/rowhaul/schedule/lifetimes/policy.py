"""The policies of tables: when a row is admitted, when it is forgotten. Checked when made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from rowhaul._quantities import parse_period
from rowhaul.errors import ConfigError

DEFAULT = "default"  # in place of a table's name: what holds for all that say nothing else
EVICT = ("lru", "lfu")
_MOST_SECONDS = 100 * 366 * 86_400
MOST = 2**31 - 1  # iterations, sightings and rows of a table are counted in 32 bits


@dataclass(frozen=True)
class RowPolicy:
    """When rows of a table are admitted and forgotten. By default every row is trained and kept.

    Args:
        admit_after: the sightings with which a row is admitted; a sample that names it is one, however often
            it does. Until then it reads its initial value, and its gradient is dropped.
        ttl: after how many iterations that do not name it a row is forgotten; so are the sightings of one
            that is not admitted. A time such as ``30d`` is event time: a row is forgotten when events are so
            much newer than the last batch that named it, or wall time on a stream without event times.
        max_rows: how many rows the table may hold after an iteration.
        evict: which rows are forgotten where there are more: ``lru``, those named longest ago, or ``lfu``,
            those that the fewest samples have named since they came. Ties go by last use, then by key.

    Example:
        >>> RowPolicy(admit_after=2, ttl=10_000, max_rows=1_000_000, evict="lfu").forgets
        True
    """

    admit_after: int = 1
    ttl: int | str | None = None
    max_rows: int | None = None
    evict: str = "lru"

    def __post_init__(self) -> None:
        if isinstance(self.ttl, str) and self.ttl.strip().isdecimal():
            object.__setattr__(self, "ttl", int(self.ttl))
        units = {"admit_after": "sightings", "ttl": "iterations", "max_rows": "rows"}
        if isinstance(self.ttl, str):
            del units["ttl"]
            if not 1 <= self.ttl_seconds <= _MOST_SECONDS:
                raise ConfigError(f"ttl must be from 1s to 100 years of event time, got {self.ttl!r}")
        for name, unit in units.items():
            given = getattr(self, name)
            if given is None and name != "admit_after":
                continue
            if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST:
                without = "" if name == "admit_after" else "; leave it out for none"
                raise ConfigError(
                    f"{name} must be a whole number of {unit} from 1 to {MOST:,}{without}; got {given!r}"
                )
        if self.evict not in EVICT:
            raise ConfigError(f"evict must be {' or '.join(EVICT)}; got {self.evict!r}")

    @property
    def ttl_iterations(self) -> int:
        """``ttl`` where it is a number of iterations, else 0."""
        return self.ttl if isinstance(self.ttl, int) else 0

    @property
    def ttl_seconds(self) -> int:
        """``ttl`` where it is event time, else 0."""
        return int(parse_period(self.ttl, "ttl")) if isinstance(self.ttl, str) else 0

    @property
    def forgets(self) -> bool:
        """Whether rows of the table are ever forgotten."""
        return self.ttl is not None or self.max_rows is not None

    @property
    def keeps_all(self) -> bool:
        """Whether the table needs no policy: every row is trained from the beginning and kept."""
        return self.admit_after == 1 and not self.forgets

    def text(self) -> str:
        """A short text, equal for equal policies."""
        parts = [f"admit_after {self.admit_after}"] if self.admit_after > 1 else []
        parts += [f"ttl {self.ttl}"] if self.ttl is not None else []
        parts += [f"{self.evict} {self.max_rows}"] if self.max_rows is not None else []
        return ", ".join(parts) or "keep all"


KEEP_ALL = RowPolicy()


class Status(IntEnum):
    """A row of a batch under the policy of its table."""

    WAITING = 0  # not admitted yet: reads its initial value, its gradient is dropped
    ADMITTED = 1  # admitted with this iteration, from which on it is trained: it begins afresh
    KNOWN = 2  # admitted before, and not forgotten since


def policies_by_table(given: Mapping[str, Any], tables: Sequence[str]) -> tuple[RowPolicy, ...]:
    """The policy of each table, from settings by table name; what ``default`` says holds where a table's own
    settings say nothing.

    Example:
        >>> policies_by_table({"default": {"admit_after": 2}, "user": {"ttl": 9}}, ["user", "item"])
        (RowPolicy(admit_after=2, ttl=9, max_rows=None, evict='lru'), RowPolicy(admit_after=2, ttl=None, \
max_rows=None, evict='lru'))
    """
    check_policies(given)
    unknown = [name for name in given if name != DEFAULT and name not in tables]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*tables, DEFAULT], n=1)
        hint = f"did you mean {near[0]}?" if near else f"the tables are {', '.join(tables)}"
        raise ConfigError(f"tables.{unknown[0]}: there is no such table; {hint}")
    default = given.get(DEFAULT, {})
    return tuple(RowPolicy(**{**default, **given.get(name, {})}) for name in tables)


def check_policies(given: Mapping[str, Any]) -> None:
    """Refuse settings that can be no policy, whatever the tables are; says of which table they are."""
    known = [one.name for one in fields(RowPolicy)]
    for table, settings in given.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"tables.{table}: expected settings by name, got {settings!r}")
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"unknown setting tables.{table}.{name}; {hint}")
        try:
            RowPolicy(**settings)
        except ConfigError as error:
            raise ConfigError(f"tables.{table}: {error}") from None
