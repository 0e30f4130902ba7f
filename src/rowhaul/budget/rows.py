"""`BudgetedRows`: the row source of a collection whose rows have a budget, in this process.

Tables of one row size have one map, but features are spread over groups that threads work on side by side.
What concerns all tables, counting and handing rows over, happens between these, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from rowhaul.budget.maps import SlotMaps, record_bytes
from rowhaul.budget.report import BudgetReport, note_of, report_on
from rowhaul.budget.settings import BudgetSettings
from rowhaul.budget.slots import HandOver
from rowhaul.budget.tables import FoundIds, SlotTables
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn.early import EarlyLookups
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import Pending, RoundParts, names_of, summed, table_of_row
from rowhaul.nn.named_rows import TablesByName
from rowhaul.nn.pooled import PooledRead, is_worth_threads, pooled_read
from rowhaul.nn.row_source import Arrays, Floats, Int64s, RowGradients, RowNote
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import Lookup, TableGroup

Located = tuple[FoundIds, slice | Int64s, Int64s]
"""The ids of a group with their rows, which ids of the batch they are, and the offsets of their bags."""

RoundGroupParts = Callable[[list[Pending], int], list[Pending]]
"""Rounds the gradients of a group's parts in a step."""

_MAPS = "budget"  # what names of a map's arrays begin with


class SlotGroup:
    """A group of features over tables within a budget; ``first_table`` is the number of its first there."""

    def __init__(self, features: FeatureGroup, tables: SlotTables, first_table: int) -> None:
        self.features, self.tables = features, tables
        self._feature_tables = features.feature_tables + first_table
        self.pending: list[Pending] = []

    def locate(self, features: KeyedJaggedTensor) -> Located:
        """Find the rows that a batch reads; in any thread."""
        (values, starts, _), entries, offsets = self.features.ids_of(features)
        return self.tables.find(values, starts, self._feature_tables), entries, offsets

    def read(self, located: Located) -> PooledRead:
        """Locate the distinct rows of a batch."""
        ids, entries, offsets = located
        rows, keep = self.tables.rows_of(ids), partial(self._keep, ids.version)
        return pooled_read(self.tables, self.features, rows, entries, offsets, keep)

    def _keep(self, version: int, lookup: Lookup, gradients: Floats) -> None:
        if version != self.tables.version:
            raise ConfigError(
                "rows changed hands, were cleared or loaded between forward and backward; run forward again"
            )
        self.pending.append((lookup, gradients))

    def step(self, lr: float, number: int, round_parts: RoundGroupParts | None) -> None:
        """Step the rows that have gradients, which may be rounded before parts are summed."""
        if self.pending:
            pending, self.pending = self.pending, []
            if round_parts is not None:
                pending = round_parts(pending, number)
            rows, gradients = pending[0]
            if len(pending) > 1:
                rows, gradients = summed(pending, len(self.tables.tables))
            self.tables.update(rows.locations, gradients, lr, number, names_of(rows))


class BudgetedRows(TablesByName):
    """Rows of a whole collection within a budget, in this process.

    There are no unknown ids: one without a row of its own reads a shared row, in training and after it.

    Args:
        features: the groups of features.
        optimizer: of rows.
        seed: of first values, and of what decides which rows ids read.
        settings: of the budget.
    """

    def __init__(
        self,
        features: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        settings: BudgetSettings,
    ) -> None:
        self.settings = settings
        dtype = str(features[0].dtype).removeprefix("torch.")
        specs = [spec for group in features for spec in group.specs]
        size_of = partial(record_bytes, optimizer=optimizer, dtype=dtype, row_dtype=settings.row_dtype)
        self.maps = SlotMaps(specs, seed, settings, size_of)
        how = optimizer, dtype, seed
        self.tables: list[SlotTables] = [
            SlotTables([specs[table] for table in some.tolist()], *how, one, settings.row_dtype)
            for some, one in self.maps
        ]
        self.groups: list[SlotGroup] = []
        for tables in self.tables:
            first_table = 0
            for group in features:
                if group.dim == tables.dim:
                    self.groups.append(SlotGroup(group, tables, first_table))
                    first_table += len(group.specs)
        self.round_parts: RoundParts | None = None  # how gradients of several passes reach their sum
        self.on_hand_over: Callable[[SlotTables, HandOver], None] = _not_told  # no lambda: it is pickled
        self._early = EarlyLookups[list[Located]]()
        self._is_announced = False  # whether the batch at hand is counted already
        self._changed_at = self._noted_at = 0  # the step of the latest stop, and of the latest noted

    @property
    def group_tables(self) -> list[TableGroup]:
        """The tables that each group of features reads."""
        return [group.tables for group in self.groups]

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Find the rows of a batch that is read some time later, in any thread."""
        self._early[features] = [group.locate(features) for group in self.groups]

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Begin a batch that is then read in parts, before the next step."""
        self._begin_batch(self._located(features))
        self._is_announced = True

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[PooledRead]:
        """Find the rows of a batch; in training, give empty slots to new ids, and count who reads them."""
        located = self._located(features)
        if training and not self._is_announced:
            located = self._begin_batch(located)
        pairs = zip(self.groups, located, strict=True)
        return run_all([partial(group.read, one) for group, one in pairs], self._is_large(features))

    def _located(self, features: KeyedJaggedTensor) -> list[Located]:
        found = self._early.pop(features, None)
        if found is None:
            return run_all(
                [partial(group.locate, features) for group in self.groups], self._is_large(features)
            )
        pairs = zip(self.groups, found, strict=True)
        return [(group.tables.refresh(ids), entries, offsets) for group, (ids, entries, offsets) in pairs]

    def _is_large(self, features: KeyedJaggedTensor) -> bool:
        widths = [group.features.dim * len(group.features.features) for group in self.groups]
        return is_worth_threads(features.stride() * sum(widths))

    def _begin_batch(self, located: list[Located]) -> list[Located]:
        located = list(located)
        for tables in self.tables:
            mine = [place for place, group in enumerate(self.groups) if group.tables is tables]
            begun = tables.begin_batch([located[place][0] for place in mine])
            for place, ids in zip(mine, begun, strict=True):
                located[place] = (ids, *located[place][1:])
        return located

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients; then, at a stop, hand rows over."""
        num_values = sum(gradients.size for group in self.groups for _, gradients in group.pending)
        rounding = [
            None if self.round_parts is None else partial(self.round_parts, place)
            for place in range(len(self.groups))
        ]
        steps = [
            partial(group.step, lr, number, how) for group, how in zip(self.groups, rounding, strict=True)
        ]
        run_all(steps, is_worth_threads(num_values))
        self._is_announced = False
        if self.settings.is_stop(number):
            for tables in self.tables:
                self.on_hand_over(tables, tables.change(number))
            self._changed_at = number

    def gradients(self) -> list[RowGradients]:
        """Return the gradients that await a step, pass by pass; keys are names of rows."""
        return [
            RowGradients(rows.keys, gradients, partial(table_of_row, group.tables.tables, rows))
            for group in self.groups
            for rows, gradients in group.pending
        ]

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""
        for group in self.groups:
            group.pending.clear()

    def num_rows(self, table: str) -> int:
        """Count the rows of a table: slots that its ids have, and shared rows."""
        tables, position = self.find_table(table)
        return len(tables.names(position))

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (names, records): slots, and ``-1 - j`` for shared row j."""
        tables, _ = self.find_table(table)
        return ((names, tables.readable(stored)) for names, stored in self.stored_rows(table))

    def stored_rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield the same as they are stored: packed rows as bytes."""
        tables, position = self.find_table(table)
        blocks: Iterator[tuple[Int64s, Floats]] = tables.blocks(position)
        return blocks

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Refuse: rows within a budget come with the map that finds them."""
        raise ConfigError(
            f"the rows of table {table!r} have a budget, and a map says whose they are: they come from a "
            "checkpoint or a state_dict"
        )

    def clear(self) -> None:
        """Drop every row and every gradient."""
        self.drop_gradients()
        self._is_announced = False
        for tables in self.tables:
            tables.clear()

    def state_names(self) -> list[str]:
        """Name the arrays of `state`."""
        rows = [f"{name}.{part}" for name in self.table_names() for part in ("keys", "records")]
        return [*(f"{_MAPS}.{name}" for name in self.maps.state()), *rows]

    def state(self) -> Arrays:
        """Return the maps, and the names and records of every table's rows."""
        # PyTorch has few operations for unsigned numbers of more than 8 bits, and older ones none.
        arrays: Arrays = {f"{_MAPS}.{name}": _signed(one) for name, one in self.maps.state().items()}
        for table in self.table_names():
            blocks = list(self.stored_rows(table))
            arrays[f"{table}.keys"] = np.concatenate([keys for keys, _ in blocks])
            arrays[f"{table}.records"] = np.concatenate([records for _, records in blocks])
        return arrays

    def load_state(self, arrays: Arrays) -> None:
        """Replace everything by what `state` returned."""
        known = {name: arrays[f"{_MAPS}.{name}"].view(one.dtype) for name, one in self.maps.state().items()}
        blocks = {name: (arrays[f"{name}.keys"], arrays[f"{name}.records"]) for name in self.table_names()}
        for name, (keys, records) in blocks.items():
            self._check_records(name, keys, records)
        self.restore(known)
        for name, (keys, records) in blocks.items():
            tables, position = self.find_table(name)
            tables.load_stored(position, keys, records)

    def restore(self, maps: Arrays) -> None:
        """Drop every row and continue with the state of the maps, once their rows are loaded, too."""
        self.drop_gradients()
        self._is_announced = False
        self.maps.load_state(maps)
        for tables in self.tables:
            tables.begin()

    def notes(self) -> list[RowNote]:
        """Report the latest stop, once."""
        if self._changed_at == self._noted_at:
            return []
        self._noted_at = self._changed_at
        return [note_of(self.report())]

    def report(self) -> BudgetReport:
        """Describe who has rows."""
        return report_on(self.tables)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all records, used or not, and of the maps."""
        return sum(tables.allocated_bytes for tables in self.tables)

    def _check_records(self, table: str, keys: Int64s, records: Floats) -> None:
        tables, _ = self.find_table(table)
        needed = (len(keys), tables.arena.width), tables.arena.dtype
        if keys.dtype != np.int64 or (records.shape, records.dtype) != needed:
            raise CheckpointError(
                f"table {table!r}: {len(keys)} rows with records of {records.dtype} {records.shape}; this "
                f"model needs {needed[1]} {needed[0]} (dim {tables.dim}, {tables.optimizer.name}, rows in "
                f"{tables.row_dtype})"
            )


def _not_told(tables: SlotTables, over: HandOver) -> None:
    """Tell nobody that rows have changed hands."""


def _signed(array: Floats) -> Floats:
    return array.view(array.dtype.str.replace("u", "i")) if array.dtype.itemsize > 1 else array
