"""The rows of a cluster that changed since a publication, copied between two segments.

The rank with the latest record of a row copies it, as in a checkpoint: a worker the rows that it trained
last, a home the others. Only gradients of split rows travel.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.publishing.changed_rows import Changes, TableChange
from rowhaul.runtime.row_memory import MissingRowError, RowMemory
from rowhaul.schedule import Plan, homes_of
from rowhaul.store.keyed import locate
from rowhaul.train.distributed.training import DistributedTraining

Int64s = npt.NDArray[np.int64]
_NO_KEYS = np.empty(0, np.int64)


def take_changed_rows(training: DistributedTraining, since: int) -> Changes:
    """Copy the rows that changed after a step and that this rank writes; a collective call.

    All ranks together have each row once, and call `DistributedTraining.track_changes` before.
    """
    mover, specs = training.runtime.mover, training.layout.specs
    assert mover.changes is not None
    places = _Places(training)
    flushed = training.flushed(records_stay=True, each=places.note)
    at_home, in_cache = mover.changes.seal(training.iteration), mover.changes.seal_cache()
    found: defaultdict[str, list[TableChange]] = defaultdict(list)
    if at_home is not None and mover.home is not None and flushed is not None:
        for table, keys in at_home.since(since):
            mine = np.setdiff1d(keys, places.elsewhere(table), assume_unique=True)
            found[specs[table].name].append(_of_home(mover.home, flushed, table, mine))
    if in_cache is not None and mover.cache is not None:
        for table, keys in in_cache.since(since):
            mine = np.intersect1d(keys, places.kept(table), assume_unique=True)
            found[specs[table].name].append(_of_cache(mover.cache, table, mine))
    return {name: _joined(parts) for name, parts in found.items()}


class _Places:
    """Which rows of a flush stay on workers: those that this one keeps, and those that it is home of."""

    def __init__(self, training: DistributedTraining) -> None:
        self._topology, self._mover = training.settings.topology, training.runtime.mover
        self._is_bounded = training.settings.sync_mode.name == "bounded"
        self._kept: defaultdict[int, list[Int64s]] = defaultdict(list)
        self._elsewhere: defaultdict[int, list[Int64s]] = defaultdict(list)

    def note(self, plan: Plan) -> None:
        """Note the rows of one slice."""
        mover, stays = self._mover, plan.trainers != 0
        here = homes_of(plan.tables, plan.keys, self._topology) == mover.rank
        if mover.home is not None:
            _note(self._elsewhere, plan, stays & here)
            if self._is_bounded and mover.changes is not None:
                mover.changes.note_waiting(plan.tables[here & ~stays], plan.keys[here & ~stays])
        if mover.cache is not None:
            _note(self._kept, plan, (plan.trainers & (np.uint64(1) << np.uint64(mover.rank))) != 0)

    def kept(self, table: int) -> Int64s:
        """Rows of a table of which this worker has the latest record."""
        return np.concatenate([*self._kept[table], _NO_KEYS])

    def elsewhere(self, table: int) -> Int64s:
        """Rows that this rank is home of, of which a worker has the latest record."""
        return np.concatenate([*self._elsewhere[table], _NO_KEYS])


def _note(rows: defaultdict[int, list[Int64s]], plan: Plan, chosen: npt.NDArray[np.bool_]) -> None:
    tables, keys = plan.tables[chosen], plan.keys[chosen]
    for table in np.unique(tables).tolist():
        rows[table].append(keys[tables == table])


def _of_home(home: RowMemory, flushed: RowMemory, table: int, keys: Int64s) -> TableChange:
    """Read rows from their home, or as they are flushed; those that are nowhere are deleted."""
    at, records = _read(home, table, keys)
    newer, flushed_records = _read(flushed, table, keys)
    found = np.zeros((len(keys), records.shape[1]), records.dtype)
    found[at], found[newer] = records, flushed_records
    there = np.zeros(len(keys), np.bool_)
    there[at] = there[newer] = True
    return TableChange(keys[there], found[there], keys[~there])


def _of_cache(cache: RowMemory, table: int, keys: Int64s) -> TableChange:
    at, records = _read(cache, table, keys)
    if len(at) != len(keys):
        raise MissingRowError(
            f"{len(keys) - len(at):,} rows are not in the cache of the worker that has trained them last; "
            "please report this"
        )
    return TableChange(keys, records, _NO_KEYS)


def _read(memory: RowMemory, table: int, keys: Int64s) -> tuple[Int64s, npt.NDArray[Any]]:
    """Return which of these rows are there, and their records."""
    number, position = memory.place_of(table)
    locations = locate(memory.groups[number], np.full(len(keys), position), keys)
    at = np.flatnonzero(locations >= 0)
    return at, memory.groups[number].arena.read(locations[at])


def _joined(parts: list[TableChange]) -> TableChange:
    columns = zip(*((one.keys, one.stored, one.deleted) for one in parts), strict=True)
    return TableChange(*map(np.concatenate, columns))
