"""`HomeRows`: rows that stay at home, as the model of one rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import TableRows
from rowhaul.nn.pooled import PooledRead, pooled_read
from rowhaul.runtime.at_home.exchange import RowsRead
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.layout import TableLayout, Upkeep
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.worker_rows import CachedRows, TakenGradients
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.sync import SyncMode
from rowhaul.store import Lookup
from rowhaul.store.distinct import KnownLookup, match_keys

Ints = npt.NDArray[np.int64]


def make_rows(
    mode: SyncMode,
    layout: TableLayout,
    groups: Sequence[FeatureGroup],
    cache: RowMemory,
    rates: Rates,
    upkeep: Upkeep,
) -> CachedRows:
    """Make the row source of a worker."""
    if mode.plans_rows:
        return layout.cached_rows(groups, cache, rates, upkeep, bounded=mode.name == "bounded")
    return HomeRows(groups, cache, rates)


class HomeRows(CachedRows):
    """The row source of a worker whose rows stay at home: what it trains has been found and copied before.

    Args:
        groups: the features.
        cache: empty tables of these groups.
        rates: the rows' learning rate by iteration.
    """

    def __init__(self, groups: Sequence[FeatureGroup], cache: RowMemory, rates: Rates) -> None:
        super().__init__(groups, cache, rates)
        self._read_now: dict[int, RowsRead] = {}  # by group: rows of the batch that is read next

    def expect(self, plan: Plan, rows: Sequence[BatchRows]) -> None:
        """Prepare for a batch, whose rows have been found."""
        self._read_now = {part.number: part for part in rows if isinstance(part, RowsRead)}

    def take(self, iteration: int, rows: Sequence[BatchRows]) -> TakenGradients:
        """Take the gradients of backward; from then on the rows of the batch are out of date."""
        taken = super().take(iteration, rows)
        self._read_now.clear()
        return taken

    def _read(self, number: int, features: KeyedJaggedTensor, training: bool, on_unknown: str) -> PooledRead:
        rows, group = self._read_now.get(number), self.groups[number]
        keep = partial(self._keep, number, self.tables[number].arena)
        if rows is None:
            raise ConfigError(
                "with sync: at-home a worker has the rows of its batch from when it gets it until step(); "
                "read them in between, and use evaluate() for other samples"
            )
        if features is rows.features:
            found, known = rows.found, rows.rows
            lookup: Lookup = KnownLookup(
                known.keys, known.starts, found.inverse, known.locations, rows.copies, known.tables
            )
            return pooled_read(rows.home, group, lookup, found.entries, found.offsets, keep)
        ids, entries, offsets = group.ids_of(features)
        lookup = match_keys(rows.rows, *ids, rows.copies) or self._some_of(rows, ids)
        return pooled_read(rows.home, group, lookup, entries, offsets, keep)

    def _some_of(self, rows: RowsRead, ids: tuple[Ints, Ints, Ints]) -> Lookup:
        """Locate other ids than those of the batch: rows that are not among it read their initial values."""
        fresh = TableRows.look_up(self, rows.number, ids, True, "init")  # nothing is in these tables
        known, locations = rows.rows, fresh.locations - len(rows.copies)  # behind the copies
        for table in range(len(known.starts) - 1):
            here, there = fresh.starts[table], known.starts[table]
            _, named, at = np.intersect1d(
                fresh.keys[here : fresh.starts[table + 1]],
                known.keys[there : known.starts[table + 1]],
                assume_unique=True,
                return_indices=True,
            )
            locations[here + named] = known.locations[there + at]
        copies = np.concatenate([rows.copies, fresh.spare])
        return Lookup(fresh.keys, fresh.starts, fresh.inverse, locations, copies)
