"""Rows that come and go in one process, by the policies of their tables: the twin of what a cluster does.

A cluster's scheduler and this ask the same `Lifetimes` with the same rows in the same iterations, so
that both train and hold the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.nn import KeyedJaggedTensor, TableCollection
from rowhaul.nn.local_rows import LocalRows, Pending, TableRows
from rowhaul.nn.packed_rows import row_dtype_of
from rowhaul.schedule import HotRows, IdBatch, Lifetimes, RowPolicy
from rowhaul.schedule.directory.distinct import distinct_rows
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.schedule.lifetimes import Status
from rowhaul.schedule.plan import RowCounts
from rowhaul.store import Lookup, TableGroup
from rowhaul.store.keyed import remove
from rowhaul.store.row_format import load_named

Ints = npt.NDArray[np.int64]

_ON_A_CARD = "rowhaul.device.host_indexed.tables:CardTables"  # loaded where there is one: it needs Triton


def table_of_feature(collection: TableCollection) -> dict[str, int]:
    """Return the number of the table that each feature of a collection reads."""
    configs = collection.table_configs()
    return {name: number for number, config in enumerate(configs) for name in config.feature_names}


class RowLifecycle(LocalRows):
    """A collection's rows in this process, of which policies admit some and drop others.

    Args:
        collection: which is to read its rows from here.
        policies: one for each table, in the collection's order.
        card: where records are, if not in host memory; rows are found on the CPU all the same.
    """

    def __init__(
        self,
        collection: TableCollection,
        policies: Sequence[RowPolicy],
        card: torch.device | None = None,
    ) -> None:
        row_dtype = row_dtype_of(collection.row_settings)
        super().__init__(collection.feature_groups, collection.optimizer, collection.seed, row_dtype)
        if card is not None:
            make, how = load_named(_ON_A_CARD), (collection.optimizer, collection.seed, card)
            self.device, self.tables = card, [make(group, *how) for group in self.groups]
        self._policies, self._exempt = policies, RowIndex()
        self._is_open = True  # whether training on a new key creates its row
        self.reset()
        self._table_of = table_of_feature(collection)
        self._places = [self.find_table(config.name) for config in collection.table_configs()]

    def reset(self) -> None:
        """Start counting anew; rows stay."""
        self.lifetimes, self.counts = Lifetimes(self._policies), RowCounts()

    def exempt(self, rows: HotRows | None) -> None:
        """Train and keep these rows whatever the policies say, as a cluster does with those it replicates."""
        if rows is not None:
            self._exempt.reserve(len(rows))
            self._exempt.add(rows.tables, rows.keys, np.zeros(len(rows), np.int64))

    def begin(self, iteration: int, ids: KeyedJaggedTensor) -> None:
        """Before the forward pass on a whole batch: create those of its rows that are admitted."""
        tables, keys, occurrences = self._named(ids)
        status = np.full(len(keys), Status.KNOWN, np.uint8)
        subject = np.flatnonzero(self._exempt.find(tables, keys) < 0)
        status[subject] = self.lifetimes.see(iteration, tables[subject], keys[subject], occurrences[subject])
        trained = status != Status.WAITING
        for group, positions, some in self._by_table(tables[trained], keys[trained]):
            group.make_fresh(positions, some)
        self.counts += RowCounts(int((status == Status.ADMITTED).sum()), int((~trained).sum()))
        self._is_open = False

    def look_up(self, number: int, ids: tuple[Ints, Ints, Ints], training: bool, on_unknown: str) -> Lookup:
        """Locate a group's rows; those that are not admitted read as they would start."""
        if training and not self._is_open:
            return TableRows.look_up(self, number, ids, training, on_unknown)
        return super().look_up(number, ids, training, on_unknown)

    def take_gradients(self, number: int, step: int = 0) -> Pending | None:
        """Remove a group's gradients, without those of rows that are not admitted."""
        taken = super().take_gradients(number, step)
        if taken is None:
            return None
        lookup, gradients = taken
        kept = lookup.locations >= 0
        if kept.all():
            return taken
        starts = np.concatenate([[0], np.cumsum(kept)])[lookup.starts]
        lookup = replace(lookup, keys=lookup.keys[kept], starts=starts, locations=lookup.locations[kept])
        return lookup, gradients[kept]

    def end(self, iteration: int, time: int = 0) -> None:
        """After the step: drop rows whose time is over; ``time`` is that of the batch's newest event."""
        self._is_open = True
        gone = self.lifetimes.forget(iteration, time)
        for group, positions, keys in self._by_table(gone.tables, gone.keys):
            self.note_changes(self.tables.index(group), iteration + 1, positions, keys)
            remove(group, positions, keys)
        self.counts += RowCounts(expired=gone.num_expired, over_limit=len(gone) - gone.num_expired)

    def know_rows(self, last: int) -> None:
        """Take all rows held, from a checkpoint, as admitted; seen in ``last`` unless known better."""
        for number, (group, position) in enumerate(self._places):
            for keys, _ in group.index.blocks(position):
                tables = np.full(len(keys), number, np.int32)
                subject = self._exempt.find(tables, keys) < 0
                self.lifetimes.know(last, tables[subject], keys[subject])

    def _named(self, ids: KeyedJaggedTensor) -> tuple[npt.NDArray[np.int32], Ints, npt.NDArray[np.int32]]:
        """The distinct rows of a batch by (table, key), and how many samples name each."""
        features, stride = ids.keys(), ids.stride()
        lengths = ids.lengths().cpu().numpy().reshape(len(features), stride)
        values = ids.values().detach().cpu().numpy()
        read = [place for place, name in enumerate(features) if name in self._table_of]
        if len(read) < len(features):
            ends = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
            parts = [values[ends[place] : ends[place + 1]] for place in read]
            values, lengths = np.concatenate([values[:0], *parts]), lengths[read]
        batch = IdBatch.from_features([self._table_of[features[place]] for place in read], values, lengths)
        _, _, tables, keys, occurrences = distinct_rows(batch.offsets, batch.tables, batch.keys)
        return tables, keys, occurrences

    def _by_table(self, tables: npt.NDArray[Any], keys: Ints) -> Iterator[tuple[TableGroup, Ints, Ints]]:
        """The rows of each table: its group, its position there once a row, and the keys."""
        for number in np.unique(tables).tolist():
            group, position = self._places[number]
            some = keys[tables == number]
            yield group, np.full(len(some), position), some
