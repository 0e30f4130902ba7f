"""Several checkpoints into one, streamed: tables and rows of all of them, of a row in several the latest.

First the keys alone are read, a part of the hash space at a time, to decide which checkpoint's copy of a row
stays: one bit a row. Then the rows are copied in one pass. Memory holds those bits, the keys of one part and
a few files, however large the checkpoints are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint.compatible import check_compatible, joined_key_kinds
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.shard import Block
from rowhaul.checkpoint.writer import CheckpointWriter
from rowhaul.errors import CheckpointError

Int64s = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]

KEYS_IN_MEMORY = 1 << 22  # compared at a time
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


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    path: Path
    tables: tuple[MergedTable, ...]
    dense_from: Path | None  # whose dense weights, optimizer and counters it has


def merge(
    sources: Sequence[CheckpointReader],
    to: str | Path,
    progress: Progress = lambda done, total: None,
    keys_in_memory: int = KEYS_IN_MEMORY,
) -> Merged:
    """Write a checkpoint of all tables and rows of ``sources``; what is in several comes from the last.

    Dense weights, their optimizer, the random state and the facts come whole from the last one that has
    dense weights. What only the saving cluster could use is left out, so the result is as if one process
    had saved it, and any number of ranks can load it. One checkpoint alone is copied into fewer files.
    ``progress`` counts every row twice: when its key is compared, and when it is copied.

    Raises:
        CheckpointError: the checkpoints do not go together, or one is damaged; nothing is written.
    """
    tables = check_compatible(sources)
    with_dense = [reader for reader in sources if reader.groups]
    main = with_dense[-1] if with_dense else sources[-1]
    count = _Counter(2 * sum(one.num_rows for reader in sources for one in reader.tables.values()), progress)
    counts: dict[str, list[int]] = {}
    with CheckpointWriter(to) as writer:
        writer.facts = {name: fact for name, fact in main.facts.items() if name != "cluster"}
        if kinds := joined_key_kinds(sources):
            writer.facts["key_kinds"] = kinds
        for group in main.groups:
            writer.tensors(group, main.tensors(group))
        for table in tables:
            merging = _TableMerge(sources, table.name, count, keys_in_memory)
            writer.table(table.name, merging.blocks(), table.dim, table.state_width, table.dtype)
            counts[table.name] = merging.rows_from
    return _result(sources, CheckpointReader(to), counts, main.path if with_dense else None)


class _Counter:
    """Counts up and tells."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


class _TableMerge:
    """The rows of one table: which stay, then the rows themselves."""

    def __init__(
        self, sources: Sequence[CheckpointReader], table: str, count: _Counter, keys_in_memory: int
    ) -> None:
        self._table, self._count = table, count
        self._holders = [(number, one) for number, one in enumerate(sources) if table in one.tables]
        self.rows_from = [0] * len(sources)
        num_rows = sum(one.tables[table].num_rows for _, one in self._holders)
        self._part_bits = (num_rows // keys_in_memory).bit_length()
        # One bit a row, by checkpoint and file; set where another, later, checkpoint has the row.
        self._replaced: dict[tuple[int, int], Bits] = {}

    def blocks(self) -> Iterator[Block]:
        """The rows that stay."""
        for part in range(1 << self._part_bits):
            self._compare(part)
        for number, reader in self._holders:
            for file, (keys, records) in enumerate(reader.rows(self._table)):
                replaced = self._replaced.get((number, file))
                num_read = len(keys)
                if replaced is not None:
                    stays = np.flatnonzero(np.unpackbits(replaced, count=num_read) == 0)
                    keys, records = keys[stays], records[stays]
                self.rows_from[number] += len(keys)
                yield keys, records
                self._count.add(num_read)

    def _compare(self, part: int) -> None:
        """Find the rows of one part of the hash space that a later checkpoint has, too."""
        seen = np.empty(0, np.int64)  # sorted, of later checkpoints
        for number, reader in reversed(self._holders):
            held: list[Int64s] = [np.empty(0, np.int64)]
            for file, keys in enumerate(reader.keys(self._table)):
                places = np.flatnonzero(_part_of(keys, self._part_bits) == part)
                held.append(keys[places])
                taken = places[np.isin(held[-1], seen)]
                if len(taken):
                    self._mark(number, file, taken, len(keys))
                if part == 0:
                    self._count.add(len(keys))
            distinct, times = np.unique(np.concatenate(held), return_counts=True)
            if (times > 1).any():
                raise CheckpointError(
                    f"{reader.path}: table {self._table!r} holds the key {int(distinct[times > 1][0])} more "
                    "than once, so the checkpoint is damaged; use another one"
                )
            seen = np.union1d(seen, distinct)

    def _mark(self, number: int, file: int, places: Int64s, num_keys: int) -> None:
        before = self._replaced.get((number, file))
        bits = np.zeros(num_keys, np.uint8) if before is None else np.unpackbits(before, count=num_keys)
        bits[places] = 1
        self._replaced[number, file] = np.packbits(bits)


def _part_of(keys: Int64s, bits: int) -> npt.NDArray[np.uint64]:
    """The first bits of a hash of each key."""
    if not bits:
        return np.zeros(len(keys), np.uint64)
    parts: npt.NDArray[np.uint64] = (keys.view(np.uint64) * _MIX) >> np.uint64(64 - bits)
    return parts


def _result(
    sources: Sequence[CheckpointReader],
    made: CheckpointReader,
    counts: dict[str, list[int]],
    dense_from: Path | None,
) -> Merged:
    tables = []
    for table in made.tables.values():
        before = [entry for reader in sources if (entry := reader.tables.get(table.name)) is not None]
        tables.append(
            MergedTable(
                name=table.name,
                rows=table.num_rows,
                rows_from=tuple(counts[table.name]),
                replaced=sum(entry.num_rows for entry in before) - table.num_rows,
                files=len(table.files),
                files_before=sum(len(entry.files) for entry in before),
            )
        )
    return Merged(made.path, tuple(tables), dense_from)
