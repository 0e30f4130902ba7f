"""Which rows are where: found or made at their owner, deleted, moved to other ranks.

A row begins at the rank that owns its key in the index. When it migrates, the owner notes its new location;
the rank that stores it has it in its own index like any other row.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.columns import Columns, merged, send
from rowhaul.database.distributed.routing import locate_everywhere, owners_of
from rowhaul.database.requests import Request
from rowhaul.database.rows import Rows, starts_of
from rowhaul.store.index import KeyIndex
from rowhaul.store.location import pack, rank_of

Int64s = npt.NDArray[np.int64]


class Moved:
    """Where the rows are that this rank knows of and another one stores."""

    def __init__(self, rows: Rows) -> None:
        self._places = rows.places
        self._indices = [KeyIndex(len(group.tables)) for group in rows.groups]

    def copy(self) -> Moved:
        """As it is now."""
        return copy.deepcopy(self)

    def find(self, table: str, keys: Int64s) -> Int64s:
        """Locations of keys, -1 for those that have not moved."""
        index = self._indices[self._places[table].group]
        if not index.num_keys.any():
            return np.full(len(keys), -1)
        locations, _ = index.find(keys, self._starts(table, len(keys)))
        return locations

    def find_all(self, group: int, keys: Int64s, starts: Int64s) -> Int64s | None:
        """The same for keys of several tables of a group; None if no row has moved."""
        index = self._indices[group]
        return index.find(keys, starts)[0] if index.num_keys.any() else None

    def set(self, table: str, keys: Int64s, locations: Int64s) -> None:
        """Note new locations."""
        self.forget(table, keys)
        index = self._indices[self._places[table].group]
        index.find_or_insert(keys, self._starts(table, len(keys)), lambda absent: locations[absent], _nothing)

    def forget(self, table: str, keys: Int64s) -> None:
        """Keys that are deleted, or back at home."""
        self._indices[self._places[table].group].discard(keys, self._starts(table, len(keys)))

    def _starts(self, table: str, count: int) -> Int64s:
        place = self._places[table]
        return starts_of(self._indices[place.group].num_tables, place.position, count)


def _nothing(records: Int64s) -> None:
    pass


def find_or_make(rows: Rows, moved: Moved, rank: int, group: int, keys: Int64s, starts: Int64s) -> Int64s:
    """Locations of keys that this rank owns, distinct and table by table; rows that are new are made here."""
    locations = moved.find_all(group, keys, starts)
    if locations is None:
        return at_rank(rank, rows.find_or_make(group, keys, starts))
    home = locations < 0
    num_home = np.concatenate([[0], np.cumsum(home)])
    made = rows.find_or_make(group, np.ascontiguousarray(keys[home]), num_home[starts])
    locations[home] = at_rank(rank, made)
    return locations


def at_rank(rank: int, records: Int64s) -> Int64s:
    """The locations of records of one rank."""
    return pack(np.full_like(records, rank), records)


def delete(calls: Calls, rows: Rows, moved: Moved, request: Request, subject: int) -> int:
    """Delete the rows of keys that any rank names, wherever they are; how many there were."""
    num_deleted = 0
    elsewhere: list[Columns] = [{} for _ in range(calls.num_ranks)]
    for table, keys in _keys_at_owners(calls, rows, request, "delete", subject).items():
        locations = moved.find(table, keys)
        num_deleted += rows.delete(table, keys[locations < 0])
        for rank in range(calls.num_ranks):
            elsewhere[rank][table] = (keys[(locations >= 0) & (rank_of(locations) == rank)],)
        moved.forget(table, keys[locations >= 0])
    for table, (keys,) in merged(send(calls, rows, elsewhere, ["key"], "delete", subject)).items():
        num_deleted += rows.delete(table, keys)
    return _total(calls, num_deleted, "delete", subject)


def migrate(calls: Calls, rows: Rows, moved: Moved, request: Request, target: int) -> int:
    """Store rows that any rank names on one rank from now on; how many moved. Unknown keys are left out.

    A row is deleted where it was only when it is known to be where it goes.
    """
    orders: list[Columns] = [{} for _ in range(calls.num_ranks)]
    for table, keys in _keys_at_owners(calls, rows, request, "migrate", target).items():
        locations = moved.find(table, keys)
        storing = np.where(locations >= 0, rank_of(locations), calls.rank)
        storing[(locations < 0) & (rows.find(table, keys) < 0)] = target  # not there: nothing to do
        for rank in range(calls.num_ranks):
            orders[rank][table] = (keys[(storing == rank) & (rank != target)],)
    leaving = merged(send(calls, rows, orders, ["key"], "migrate", target))
    cargo: list[Columns] = [{} for _ in range(calls.num_ranks)]
    for table, (keys,) in leaving.items():
        records = rows.read_records(rows.places[table].group, rows.find(table, keys))
        cargo[target][table] = (keys, records)
    arrived = merged(send(calls, rows, cargo, ["key", "record"], "migrate", target))
    placed = _put(calls, rows, arrived, target)
    for table, (keys, locations) in merged(
        send(calls, rows, placed, ["key", "key"], "migrate", target)
    ).items():
        if target == calls.rank:
            moved.forget(table, keys)  # they are at home
        else:
            moved.set(table, keys, locations)
    num_moved = sum(rows.delete(table, keys) for table, (keys,) in leaving.items())
    return _total(calls, num_moved, "migrate", target)


def _put(calls: Calls, rows: Rows, arrived: Columns, target: int) -> list[Columns]:
    """Add rows that came from elsewhere; what to tell the owners of their keys. All of them, or none."""
    told: list[Columns] = [{} for _ in range(calls.num_ranks)]
    error: BaseException | None = None
    try:
        for table, (keys, records) in arrived.items():
            locations = at_rank(calls.rank, rows.put(table, keys, records))
            owners = owners_of(keys, calls.num_ranks)
            for rank in range(calls.num_ranks):
                told[rank][table] = (keys[owners == rank], locations[owners == rank])
    except MemoryError as failed:
        for table in arrived.keys() & told[0].keys():
            rows.delete(table, arrived[table][0])
        error = failed
    calls.agree("migrate", target, error)
    return told


def _keys_at_owners(calls: Calls, rows: Rows, request: Request, what: str, subject: int) -> dict[str, Int64s]:
    """The keys that any rank names and this rank owns, each once."""
    names = [spec.name for spec in rows.settings.tables]
    given = {part.table: np.unique(part.keys) for part in request.parts}
    named: dict[str, list[Int64s]] = {name: [] for name in names}

    def note(table: str, keys: Int64s) -> Int64s:
        named[table].append(keys)
        return np.zeros(len(keys), np.int64)

    keys = [given.get(name, np.empty(0, np.int64)) for name in names]
    locate_everywhere(calls, names, keys, note, what, subject)
    return {name: np.unique(np.concatenate(some)) for name, some in named.items()}


def _total(calls: Calls, count: int, what: str, subject: int) -> int:
    return int(calls.tell(what, subject, np.full((calls.num_ranks, 1), count))[:, 0].sum())
