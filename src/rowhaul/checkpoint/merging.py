"""Several checkpoints into one, streamed: all tables and rows, the latest of a row that several have.

First the keys alone are read, a part of the hash space at a time, to decide which checkpoint's copy of a row
stays: one bit a row. Then the rows are copied in one pass. Memory holds those bits, the keys of one part and
a few files, however large the checkpoints are. The format of the rows merges
what it keeps beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rowhaul._id_kinds import kind_facts
from rowhaul.checkpoint.compatible import check_compatible, joined_key_kinds
from rowhaul.checkpoint.location import Place
from rowhaul.checkpoint.progress import Counter, Progress
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.writer import CheckpointWriter
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import row_format
from rowhaul.store.row_parts import Arrays, Merging

Int64s = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

KEYS_IN_MEMORY = 1 << 24  # compared at a time
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MergedTable:
    """What became of one table."""

    name: str
    rows: int
    rows_from: tuple[int, ...]  # by checkpoint, in the order given
    replaced: int  # rows of earlier checkpoints that a later one has, too
    files: int
    files_before: int
    dropped: int  # rows without room in the merged checkpoint


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    path: Place
    tables: tuple[MergedTable, ...]
    dense_from: Place | None  # whose dense weights, optimizer and counters it has
    num_dropped: int  # parts of rows without room, see the rows' format
    left_out: str  # what had no room, in words; empty: everything had


def merge(
    sources: Sequence[CheckpointReader],
    to: str | Place,
    progress: Progress = lambda done, total: None,
    keys_in_memory: int = KEYS_IN_MEMORY,
) -> Merged:
    """Write a checkpoint of all tables and rows of ``sources``; what is in several comes from the last.

    Dense weights, their optimizer, the random state and the facts come from the last one that has dense
    weights. What only the saving cluster could use is left out, so any number of ranks can load the result.
    One checkpoint alone is copied into fewer files. ``progress`` counts every row twice: when its key is
    compared, and when it is copied.

    Raises:
        CheckpointError: the checkpoints do not go together, or one is damaged; nothing is written.
    """
    tables = check_compatible(sources)
    total = 2 * sum(one.num_rows for reader in sources for one in reader.tables.values())
    count = Counter(total, progress)
    merges = {table.name: TableMerge(sources, table.name, count, keys_in_memory) for table in tables}
    format = row_format(tables[0].format if tables else "whole")
    merging = format.merging(sources, merges)
    main = main_source(sources)
    with CheckpointWriter(to) as writer:
        writer.facts = {name: fact for name, fact in main.facts.items() if name != "cluster"}
        if kinds := joined_key_kinds(sources):
            writer.facts |= kind_facts(kinds)
        for group in main.groups:
            writer.tensors(group, main.tensors(group))
        for name, arrays in merging.files().items():
            writer.arrays(name, arrays)
        for table in tables:
            blocks = merges[table.name].blocks(merging)
            writer.blocks(table.name, blocks, table.dim, table.state_width, table.dtype, table.format)
    made = CheckpointReader(to)
    found = tuple(one.result(made) for one in merges.values())
    left_out = merging.left_out(sum(one.dropped for one in found))
    return Merged(made.path, found, main.path if main.groups else None, merging.num_dropped, left_out)


def main_source(sources: Sequence[CheckpointReader]) -> CheckpointReader:
    """Return the one whose facts, and dense weights if any has them, a merged checkpoint gets."""
    return next((one for one in reversed(sources) if one.groups), sources[-1])


class TableMerge:
    """The rows of one table: which stay, then the rows themselves."""

    def __init__(
        self, sources: Sequence[CheckpointReader], table: str, count: Counter, keys_in_memory: int
    ) -> None:
        self.table, self._count = table, count
        self._holders = [(number, one) for number, one in enumerate(sources) if table in one.tables]
        self.rows_from = [0] * len(sources)
        self._num_given = sum(one.tables[table].num_rows for _, one in self._holders)
        self._part_bits = (self._num_given // keys_in_memory).bit_length()
        self._num_files = sum(len(one.tables[table].files) for _, one in self._holders)

    @cached_property
    def _replaced(self) -> dict[tuple[int, int], Bits]:
        """One bit a row, by checkpoint and file: set where a later checkpoint has the row, too."""
        replaced: dict[tuple[int, int], Bits] = {}
        for part in range(1 << self._part_bits):
            self._compare(part, replaced)
        return replaced

    def kept(self) -> Iterator[tuple[int, int, Arrays]]:
        """Yield whose rows were read, how many, and those that no later checkpoint has."""
        for number, reader in self._holders:
            format = reader.format(self.table)
            for file, block in enumerate(reader.blocks(self.table)):
                num_read, replaced = len(block["keys"]), self._replaced.get((number, file))
                if replaced is not None:
                    block = format.select(block, np.unpackbits(replaced, count=num_read) == 0)
                yield number, num_read, block

    def blocks(self, merging: Merging) -> Iterator[Arrays]:
        """Yield the rows of the merged table."""
        for number, num_read, block in self.kept():
            block = merging.take(self.table, number, block)
            self.rows_from[number] += len(block["keys"])
            yield block
            self._count.add(num_read)

    def result(self, made: CheckpointReader) -> MergedTable:
        """Say what became of the table, once it is written."""
        table = made.tables[self.table]
        dropped = self.num_rows - table.num_rows
        return MergedTable(
            name=self.table,
            rows=table.num_rows,
            rows_from=tuple(self.rows_from),
            replaced=self._num_given - self.num_rows,
            files=len(table.files),
            files_before=self._num_files,
            dropped=dropped,
        )

    @property
    def num_rows(self) -> int:
        """Rows that some checkpoint has."""
        return self._num_given - sum(int(np.unpackbits(bits).sum()) for bits in self._replaced.values())

    def _compare(self, part: int, replaced: dict[tuple[int, int], Bits]) -> None:
        """Find the rows of one part of the hash space that a later checkpoint has, too."""
        seen = np.empty(0, np.int64)  # sorted, of later checkpoints
        for number, reader in reversed(self._holders):
            held: list[Int64s] = [np.empty(0, np.int64)]
            for file, keys in enumerate(reader.keys(self.table)):
                places = np.flatnonzero(_part_of(keys, self._part_bits) == part)
                held.append(keys[places])
                taken = places[_is_in(held[-1], seen)]
                if len(taken):
                    before = replaced.get((number, file), np.zeros(-(-len(keys) // 8), np.uint8))
                    bits = np.unpackbits(before, count=len(keys))
                    bits[taken] = 1
                    replaced[number, file] = np.packbits(bits)
                if part == 0:
                    self._count.add(len(keys))
            distinct, times = np.unique(np.concatenate(held), return_counts=True)
            if (times > 1).any():
                raise CheckpointError(
                    f"{reader.path}: table {self.table!r} holds the key {int(distinct[times > 1][0])} more "
                    "than once, so the checkpoint is damaged; use another one"
                )
            seen = np.union1d(seen, distinct)


def _is_in(keys: Int64s, seen: Int64s) -> npt.NDArray[np.bool_]:
    """Find keys among sorted ones, in time that hardly depends on how many those are."""
    if not len(seen):
        return np.zeros(len(keys), np.bool_)
    found: npt.NDArray[np.bool_] = seen[np.minimum(np.searchsorted(seen, keys), len(seen) - 1)] == keys
    return found


def _part_of(keys: Int64s, bits: int) -> npt.NDArray[np.uint64]:
    """The first bits of a hash of each key."""
    if not bits:
        return np.zeros(len(keys), np.uint64)
    parts: npt.NDArray[np.uint64] = (keys.view(np.uint64) * _MIX) >> np.uint64(64 - bits)
    return parts
