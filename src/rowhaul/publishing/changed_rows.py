"""The rows of one process that changed since a publication, copied while training pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.store.location import ABSENT
from rowhaul.store.served_rows import RecordBlock, ServedRows, equal_records
from rowhaul.store.whole_rows import WholeRows

Int64s = npt.NDArray[np.int64]
_SLICE_ROWS = 1 << 14  # turned into what is served at a time


@dataclass(frozen=True)
class TableChange:
    """What changed in a table: records as memory holds them, and keys that have none any more."""

    keys: Int64s
    stored: npt.NDArray[Any]
    deleted: Int64s


Changes = dict[str, TableChange]
"""By table; tables without changes are left out."""


def changed_rows(source: Any, changed: Iterable[tuple[str, Int64s]]) -> Changes:
    """Copy rows of a source (`LocalRows`), given by table and key."""
    found: Changes = {}
    for table, keys in changed:
        tables, position = source.find_table(table)
        places = tables.index.find_each(np.full(len(keys), position), keys)
        there = places != ABSENT
        found[table] = TableChange(keys[there], tables.arena.read(places[there]), keys[~there])
    return found


def served(
    format: WholeRows, changes: Changes, tables: Mapping[str, tuple[int, str]], pace: Callable[[], None]
) -> dict[str, ServedRows]:
    """Return changes as a file to serve from takes them; ``tables`` has dim and type of all tables."""
    made = {}
    for table, (dim, dtype) in tables.items():
        size, _ = format.wire_bytes(dim, 0, dtype)
        nothing = np.empty(0, np.int64)
        change = changes.get(table, TableChange(nothing, np.empty((0, 0)), nothing))
        made[table] = ServedRows(
            dim,
            format.served_type(dtype),
            len(change.keys),
            size,
            partial(_key_blocks, change),
            partial(_record_blocks, format, change, dim, pace),
            deleted=change.deleted,
        )
    return made


def _key_blocks(change: TableChange) -> Iterator[Int64s]:
    yield change.keys


def _record_blocks(
    format: WholeRows, change: TableChange, dim: int, pace: Callable[[], None]
) -> Iterator[RecordBlock]:
    for first in range(0, len(change.keys), _SLICE_ROWS):
        pace()
        some = slice(first, first + _SLICE_ROWS)
        block = format.encode(change.keys[some], change.stored[some], dim)
        yield equal_records(change.keys[some], format.served_values(block, dim))
