"""Tables of embedding rows: raw keys in, records out, created on first sight.

Tables whose records have the same layout form a group with one index and one arena, so a batch
over dozens of features is a handful of compiled passes instead of dozens of calls each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.errors import ConfigError, UnknownKeyError
from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.store.arena import RecordArena
from rowhaul.store.distinct import Lookup, distinct_keys
from rowhaul.store.index import Int64s, KeyIndex
from rowhaul.store.keyed import add_absent, find_or_add, locate_or_add, remove
from rowhaul.store.location import ABSENT
from rowhaul.store.packing import PLAIN, OneChunk, RowNames, packing_of
from rowhaul.store.packing_kernels import write_packed_initial
from rowhaul.store.records import write_initial

if TYPE_CHECKING:
    from rowhaul.store.snapshot import GroupSnapshot

_BLOCK_ROWS = 1 << 16  # rows copied at a time when a table is read whole
ON_UNKNOWN = ("init", "default", "error", "tail")  # of whole rows, the tail is their initial values


InitFn = Callable[[int, Int64s], npt.NDArray[Any]]
"""First values of rows, given the seed and their keys: keys x dim, each row of seed and key alone."""


@dataclass(frozen=True)
class TableSpec:
    """A table's name, row size and the range its rows start in, or what makes them."""

    name: str
    dim: int
    initial_low: float
    initial_high: float
    init_fn: InitFn | None = field(default=None, repr=False)  # ranks compare what is shown


def table_seeds(names: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """A seed for each table: by name, not position, so that adding a table does not change others' rows."""
    return np.array(
        [xxhash.xxh64_intdigest(name.encode(), seed=seed & (2**64 - 1)) for name in names], np.uint64
    )


class TableGroup:
    """Tables of equal row size under one row optimizer.

    A *stored* record is what the arena holds: the numbers themselves, or bytes where rows are packed into
    fewer bits (see `RowPacking`). Stored records are copied, sent and saved as they are.

    Lookups that insert nothing may run in several threads; anything else in one at a time.

    Args:
        tables: names, row size and initial ranges.
        optimizer: steps the rows.
        dtype: what values and state are computed in.
        seed: with a table's name and a key it determines initial values, and how packed values are rounded.
        row_dtype: what values are stored in: ``float32`` as they are computed, or packed.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        row_dtype: str = PLAIN,
    ) -> None:
        self.tables, self.optimizer, self.dtype = tuple(tables), optimizer, np.dtype(dtype)
        self.dim = tables[0].dim
        self.index = KeyIndex(len(tables))
        self.width = self.dim + optimizer.state_width(self.dim)  # numbers of a record
        self.packing = packing_of(row_dtype, self.dim, self.width - self.dim, dtype)
        self.row_dtype = row_dtype
        stored = (self.width, dtype) if self.packing is None else (self.packing.record_bytes, np.uint8)
        self.arena = RecordArena(*stored)
        self._seed = seed
        self._init_fns = {place: one.init_fn for place, one in enumerate(tables) if one.init_fn is not None}
        self._seeds = table_seeds([table.name for table in tables], seed)
        self._lows = np.array([table.initial_low for table in tables])
        self._steps = np.array([(table.initial_high - table.initial_low) / 2**24 for table in tables])

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by records and index."""
        return self.arena.allocated_bytes + self.index.allocated_bytes

    def lookup(
        self,
        values: Int64s,
        starts: Int64s,
        feature_tables: Int64s,
        *,
        insert: bool,
        on_unknown: str = "init",
    ) -> Lookup:
        """Locate the rows of a batch: feature ``f`` reads ``values[starts[f]:starts[f + 1]]``.

        They come from table ``feature_tables[f]``; features are ordered by table. Unknown keys are
        inserted as fresh rows, or else read as ``on_unknown`` says without being inserted.
        """
        keys, key_starts, inverse = self.distinct(values, starts, feature_tables)
        spare = np.empty((0, self.dim), dtype=self.dtype)
        if insert:
            return Lookup(keys, key_starts, inverse, self.find_or_make(keys, key_starts), spare)
        locations, num_absent = self.index.find(keys, key_starts)
        if num_absent:
            absent = np.flatnonzero(locations < 0)
            spare = self._unknown_rows(keys, key_starts, absent, on_unknown)
            locations[absent] = -1 - np.arange(len(absent))
        return Lookup(keys, key_starts, inverse, locations, spare)

    def distinct(
        self, values: Int64s, starts: Int64s, feature_tables: Int64s
    ) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
        """The distinct keys of a batch, given as to `lookup`, table by table; their starts; each id's key."""
        return distinct_keys(values, starts, feature_tables, len(self.tables))

    def make_fresh(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Locations of rows; missing ones are created with their initial values."""
        locations, added = locate_or_add(self, tables, keys)
        if len(added):
            added = added[np.argsort(tables[added], kind="stable")]
            new_keys = keys[added]
            starts = np.searchsorted(tables[added], np.arange(len(self.tables) + 1))
            every = np.arange(len(added))
            self._fill(locations[added], new_keys, starts, every, every)
        return locations

    def find_or_make(
        self, keys: Int64s, starts: Int64s, *, unwritten: npt.NDArray[np.bool_] | None = None
    ) -> Int64s:
        """The same for distinct rows given table by table; ``unwritten`` ones get no values."""
        locations, added = find_or_add(self, keys, starts)
        if len(added):
            new = added if unwritten is None else added[~unwritten[added]]
            self._fill(locations[new], keys, starts, new, added)
        return locations

    def make(self, keys: Int64s, starts: Int64s, *, unwritten: npt.NDArray[np.bool_]) -> Int64s:
        """The same for rows that were looked up before: none may exist."""
        locations = np.full(len(keys), ABSENT)
        add_absent(self, keys, starts, locations, len(keys))
        new = np.flatnonzero(~unwritten)
        self._fill(locations[new], keys, starts, new, np.arange(len(keys)))
        return locations

    def update(
        self,
        records: Int64s,
        gradients: npt.NDArray[Any],
        lr: float,
        number: int,
        rows: RowNames | None = None,
    ) -> None:
        """One optimizer step on the given records, which must differ; packed rows have to be named."""
        # Kernels take the gradients' type for that of the records, which they find by address.
        gradients = np.asarray(gradients, dtype=self.dtype)
        self.arena.before_change(records)
        if self.packing is None:
            self.optimizer.step(self.arena, records, gradients, lr, number)
            return
        assert rows is not None, "rows in few bits are rounded by table and key"
        self.packing.step(self.optimizer, self.arena, records, gradients, lr, number, rows, self._seeds)

    @property
    def gradient_shape(self) -> tuple[int, np.dtype[Any]]:
        """Elements of a gradient as it is sent, and their type."""
        return (
            (self.dim, self.dtype) if self.packing is None else (self.packing.value_bytes, np.dtype(np.uint8))
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a stored record's values."""
        return self.dim * self.dtype.itemsize if self.packing is None else self.packing.value_bytes

    def pack_gradients(
        self, gradients: npt.NDArray[Any], rows: RowNames, number: int, rank: int
    ) -> npt.NDArray[Any]:
        """Gradients of step ``number`` as a rank sends them: as many bytes as the values of a record."""
        if self.packing is None:
            return gradients
        return self.packing.pack_gradients(gradients, rows, number, self._seeds, rank)

    def unpack_gradients(self, sent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Invert `pack_gradients`, but for the rounding."""
        return sent if self.packing is None else self.packing.unpack_gradients(sent)

    def read(self, records: Int64s) -> npt.NDArray[Any]:
        """A copy of records as numbers: values before state."""
        return self.arena.read(records) if self.packing is None else self.packing.read(self.arena, records)

    def readable(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stored records as numbers."""
        return stored if self.packing is None else self.packing.readable(stored)

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, stored records), values before state in each record."""
        for keys, records in self.index.blocks(table):
            for first in range(0, len(keys), _BLOCK_ROWS):
                some = slice(first, first + _BLOCK_ROWS)
                yield keys[some], self.arena.read(records[some])

    def load(self, table: int, keys: Int64s, contents: npt.NDArray[Any]) -> None:
        """Set rows of a table, known or not, to records of numbers; ``keys`` must differ.

        Packed values are rounded as initial values are.
        """
        if self.packing is not None:
            rows = RowNames(np.full(len(keys), table), keys)
            contents = self.packing.pack(contents, rows, 0, self._seeds)
        self.load_stored(table, keys, contents)

    def load_stored(self, table: int, keys: Int64s, stored: npt.NDArray[Any]) -> None:
        """The same for stored records, as `blocks` yields them."""
        starts = np.where(np.arange(len(self.tables) + 1) > table, len(keys), 0)
        locations, _ = find_or_add(self, keys, starts)
        self.arena.write(locations, stored)

    def snapshot(self) -> GroupSnapshot:
        """Take a snapshot of all rows, to be read while training goes on."""
        from rowhaul.store.snapshot import GroupSnapshot  # which knows this module

        return GroupSnapshot(self)

    def clear(self) -> None:
        """Forget every row."""
        self.index = KeyIndex(len(self.tables))
        self.arena = self.arena.new()

    def _fill(self, records: Int64s, keys: Int64s, starts: Int64s, new: Int64s, added: Int64s) -> None:
        """Write first values of ``new`` keys; if that fails, as an `init_fn` may, forget all ``added``."""
        try:
            self._write_initial(self.arena, records, keys, starts, new)
        except BaseException:
            remove(self, np.searchsorted(starts, added, side="right") - 1, keys[added])
            raise

    def _write_initial(
        self, memory: RecordMemory, records: Int64s, keys: Int64s, starts: Int64s, which: Int64s
    ) -> None:
        made = memory.addresses, memory.shift, memory.width, records, keys, starts, which
        ranges = self._seeds, self._lows, self._steps, self.dim
        if self.packing is None:
            write_initial(*made, *ranges, np.array([self.optimizer.initial_state], dtype=self.dtype))
        else:
            write_packed_initial(*made, *ranges, np.float32(self.optimizer.initial_state), self.packing.like)
        tables = np.searchsorted(starts, which, side="right") - 1 if self._init_fns else which
        for place, init_fn in self._init_fns.items():
            some = np.flatnonzero(tables == place)
            if len(some):
                self._overwrite(memory, records[some], self._made_by(init_fn, place, keys[which[some]]))

    def _made_by(self, init_fn: InitFn, place: int, keys: Int64s) -> npt.NDArray[Any]:
        values = np.asarray(init_fn(self._seed, keys))
        if values.shape != (len(keys), self.dim) or not np.isfinite(values).all():
            raise ConfigError(
                f"table {self.tables[place].name!r}: init_fn must return finite values of shape "
                f"{(len(keys), self.dim)} for {len(keys)} keys, got {values.dtype} of shape {values.shape}"
            )
        return values.astype(self.dtype)

    def _overwrite(self, memory: Any, records: Int64s, values: npt.NDArray[Any]) -> None:
        """Replace the values of records, which are whole and not packed."""
        contents = memory.read(records)
        contents[:, : self.dim] = values
        memory.write(records, contents)

    def _unknown_rows(
        self, keys: Int64s, starts: Int64s, absent: Int64s, on_unknown: str
    ) -> npt.NDArray[Any]:
        if on_unknown == "error":
            table = self.tables[int(np.searchsorted(starts, absent[0], side="right")) - 1]
            raise UnknownKeyError(
                f"table {table.name!r}: key {int(keys[absent[0]])} was never trained "
                f"({len(absent)} such keys in this batch); train on it, or set on_unknown to "
                f"'init', 'default' or 'tail'"
            )
        if on_unknown == "default":
            return np.zeros((len(absent), self.dim), dtype=self.dtype)
        # Packed ones with their state, which is not read.
        width = self.dim if self.packing is None else self.packing.record_bytes
        stored = np.empty((len(absent), width), dtype=self.arena.dtype)
        self._write_initial(OneChunk(stored), np.arange(len(absent)), keys, starts, absent)
        return np.ascontiguousarray(self.readable(stored)[:, : self.dim])
