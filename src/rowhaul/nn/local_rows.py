"""`LocalRows`: whole rows in this process's memory, the plainest row source."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.key_counts import KeyCounts
from rowhaul.nn.named_rows import NamedRows, TablesByName
from rowhaul.nn.pooled import PooledRead, is_worth_threads, pooled_read
from rowhaul.nn.row_source import Floats, Int64s, RowGradients, RowNote, RowSource
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import Lookup, TableGroup, TableSpec
from rowhaul.store.changes import ChangedRows
from rowhaul.store.distinct import KnownLookup
from rowhaul.store.packing import PLAIN, RowNames
from rowhaul.store.row_format import load_named

_ON_A_CARD = "rowhaul.device.rows:rows_on"  # loaded where there is one: it needs Triton
Pending = tuple[Lookup, Floats]
"""Rows that a backward pass has gradients for, and these."""
RoundParts = Callable[[int, Sequence[Pending], int], list[Pending]]
"""Given a group's number, its passes and the step's number: see `rowhaul.verify.sent_gradients`."""


class TableRows(TablesByName):
    """Rows in table groups, one for each group of features, with the gradients that await their step.

    The common part of sources whose rows are records in this process: `LocalRows` creates and steps them,
    others bring them here by other means.
    """

    def __init__(self, groups: Sequence[FeatureGroup], tables: Sequence[TableGroup]) -> None:
        self.groups = list(groups)
        self.tables: list[TableGroup] = list(tables)
        self.pending: list[list[Pending]] = [[] for _ in self.groups]
        self.key_counts: KeyCounts | None = None  # where ids that are read without training are counted
        self.round_parts: RoundParts | None = None  # how gradients of several passes reach their sum

    @property
    def group_tables(self) -> list[TableGroup]:
        """The tables that each group of features reads."""
        return self.tables

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index."""
        return sum(tables.allocated_bytes for tables in self.tables)

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[PooledRead]:
        """Find the rows of a batch."""
        num_values = features.stride() * sum(group.dim * len(group.features) for group in self.groups)
        return run_all(
            [
                partial(self._read, number, features, training, on_unknown)
                for number in range(len(self.groups))
            ],
            is_worth_threads(num_values),
        )

    def _read(self, number: int, features: KeyedJaggedTensor, training: bool, on_unknown: str) -> PooledRead:
        group, arena = self.groups[number], self.tables[number].arena
        ids, entries, offsets = group.ids_of(features)
        lookup = self.look_up(number, ids, training, on_unknown)
        if self.key_counts is not None and not training:
            self.key_counts.add(group.features, ids[1], lookup)
        keep = partial(self._keep, number, arena)
        return pooled_read(self.tables[number], group, lookup, entries, offsets, keep)

    def look_up(
        self, number: int, ids: tuple[Int64s, Int64s, Int64s], training: bool, on_unknown: str
    ) -> Lookup:
        """Locate a group's rows, without creating any."""
        return self.tables[number].lookup(*ids, insert=False, on_unknown="init" if training else on_unknown)

    def _keep(self, number: int, arena: Any, lookup: Lookup, gradients: Floats) -> None:
        if arena is not self.tables[number].arena:
            raise ConfigError("rows were cleared or loaded between forward and backward; run forward again")
        self.pending[number].append((lookup, gradients))

    def take_gradients(self, number: int, step: int = 0) -> Pending | None:
        """Remove a group's gradients, summed over backward passes, with the rows they are for."""
        pending, self.pending[number] = self.pending[number], []
        if self.round_parts is not None and pending:
            pending = self.round_parts(number, pending, step)
        if len(pending) > 1:
            return summed(pending, len(self.tables[number].tables))
        return pending[0] if pending else None

    def gradients(self) -> list[RowGradients]:
        """Return the gradients that await a step, pass by pass."""
        return [
            RowGradients(lookup.keys, gradients, partial(table_of_row, tables.tables, lookup))
            for tables, pending in zip(self.tables, self.pending, strict=True)
            for lookup, gradients in pending
        ]

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""
        for pending in self.pending:
            pending.clear()

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Do nothing: looking whole rows up takes no longer when they are read."""

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Do nothing: rows are the same in whatever parts a batch is read."""

    def notes(self) -> list[RowNote]:
        """Return nothing: rows come and stay."""
        return []

    def report(self) -> None:
        """Return nothing: all rows are held, whole."""


class LocalRows(TableRows, NamedRows):
    """All rows of a collection, created on first sight and stepped here."""

    def __init__(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, row_dtype: str = PLAIN
    ) -> None:
        super().__init__(groups, [group.make_tables(optimizer, seed, row_dtype) for group in groups])
        self.changes: ChangedRows | None = None  # tables are numbered group by group

    device = torch.device("cpu")

    def moved_to(
        self,
        device: torch.device,
        groups: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        device_memory: int = 0,
    ) -> RowSource:
        """Return the same rows on a card; packed rows stay, and so do all without Triton."""
        if device.type != "cuda" or self.tables[0].packing is not None:
            return self
        if find_spec("triton") is None:
            warnings.warn(
                "rows stay in host memory, which is slower: Triton is not installed; "
                "pip install 'rowhaul[gpu]'",
                stacklevel=2,
            )
            return self
        made = load_named(_ON_A_CARD)(device, groups, optimizer, seed, device_memory)
        there: RowSource = self.copied_into(made)
        return there

    def track_changes(self) -> ChangedRows:
        """Note from now on which rows change."""
        if self.changes is None:
            self.changes = ChangedRows(len(self.table_names()))
        return self.changes

    def note_changes(self, group: int, step: int, positions: Int64s, keys: Int64s) -> None:
        """Note rows of a group that a step changes, if that is wanted."""
        if self.changes is not None:
            first = sum(len(tables.tables) for tables in self.tables[:group])
            self.changes.note(step, first + positions, keys)

    def look_up(
        self, number: int, ids: tuple[Int64s, Int64s, Int64s], training: bool, on_unknown: str
    ) -> Lookup:
        """Locate a group's rows, creating new ones in training."""
        return self.tables[number].lookup(*ids, insert=training, on_unknown=on_unknown)

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients."""
        shapes = [gradients.shape for pending in self.pending for _, gradients in pending]
        in_threads = self.device.type == "cpu" and is_worth_threads(sum(rows * dim for rows, dim in shapes))
        run_all([partial(self._step, group, lr, number) for group in range(len(self.groups))], in_threads)

    def _step(self, group: int, lr: float, number: int) -> None:
        taken = self.take_gradients(group, number)
        if taken is not None:
            lookup, tables = taken[0], self.tables[group]
            rows = names_of(lookup) if tables.packing is not None else None
            if self.changes is not None:
                self.note_changes(group, number, tables_of_keys(lookup), lookup.keys)
            tables.update(lookup.locations, taken[1], lr, number, rows)

    def num_rows(self, table: str) -> int:
        """Count the rows of a table."""
        tables, position = self.find_table(table)
        return int(tables.index.num_keys[position])

    def clear(self) -> None:
        """Drop every row and every gradient."""
        self.drop_gradients()
        for tables in self.tables:
            tables.clear()


def table_of_row(tables: Sequence[TableSpec], lookup: Lookup, place: int) -> str:
    """Name the table of a distinct row."""
    return tables[int(tables_of_keys(lookup)[place])].name


def tables_of_keys(lookup: Lookup) -> Int64s:
    """The position of each distinct key's table."""
    if isinstance(lookup, KnownLookup):
        return lookup.tables
    return np.repeat(np.arange(len(lookup.starts) - 1), np.diff(lookup.starts))


def names_of(lookup: Lookup) -> RowNames:
    """Return the table and key of each distinct row."""
    return RowNames(tables_of_keys(lookup), lookup.keys)


def summed(parts: Sequence[Pending], num_tables: int) -> Pending:
    """Sum the gradients of several passes: each row once, parts added in order."""
    rows, places = _rows_of_parts(parts, num_tables)
    first: Any = parts[0][1]
    if isinstance(first, torch.Tensor):  # on a card
        sums: Any = first.new_zeros((len(rows.keys), first.shape[1]))
        for where, (_, part) in zip(places, parts, strict=True):
            there = torch.from_numpy(where).to(first.device)
            sums[there] = sums[there] + part
        return rows, sums
    gradients = np.zeros((len(rows.keys), first.shape[1]), dtype=first.dtype)
    np.add.at(gradients, np.concatenate(places), np.concatenate([part for _, part in parts]))
    return rows, gradients


def _rows_of_parts(parts: Sequence[Pending], num_tables: int) -> tuple[Lookup, list[Int64s]]:
    """The distinct rows of several passes, and which of them the rows of each pass are."""
    table_of_key = [tables_of_keys(lookup) for lookup, _ in parts]
    rows = np.stack([np.concatenate(table_of_key), np.concatenate([lookup.keys for lookup, _ in parts])])
    distinct, first, where = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    starts = np.searchsorted(distinct[0], np.arange(num_tables + 1))
    locations = np.concatenate([lookup.locations for lookup, _ in parts])[first]
    nothing = np.empty(0, dtype=np.int32)
    found = Lookup(np.ascontiguousarray(distinct[1]), starts, nothing, locations, parts[0][0].spare)
    ends = np.cumsum([len(lookup.keys) for lookup, _ in parts])[:-1]
    return found, np.split(where.reshape(-1), ends)
