"""Several checkpoints into one, streamed: tables and rows of all of them, of a row in several the latest.

First the keys alone are read, a part of the hash space at a time, to decide which checkpoint's copy of a row
stays: one bit a row. Then the rows are copied in one pass. Memory holds those bits, the keys of one part and
a few files, however large the checkpoints are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint.compatible import check_compatible, joined_key_kinds
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.shard import Block
from rowhaul.checkpoint.writer import CheckpointWriter
from rowhaul.errors import CheckpointError
from rowhaul.pruning.row_files import FACT, kept_rows

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
    dropped: int = 0  # rows that held nothing, and that there was no room for


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    path: Path
    tables: tuple[MergedTable, ...]
    dense_from: Path | None  # whose dense weights, optimizer and counters it has
    chunks_dropped: int = 0  # of pruned rows: the least useful ones, that there was no room for


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
    if FACT in sources[0].facts:
        raise CheckpointError(f"{sources[0].path} is pruned; merge it with rowhaul.train.merging.merge")
    count = Counter.of_rows(sources, progress)
    counts: dict[str, list[int]] = {}
    with CheckpointWriter(to) as writer:
        write_dense(writer, sources)
        for table in tables:
            merging = TableMerge(sources, table.name, count, keys_in_memory)
            writer.table(table.name, merging.blocks(), table.dim, table.state_width, table.dtype)
            counts[table.name] = merging.rows_from
    return merged_result(sources, CheckpointReader(to), counts)


def main_source(sources: Sequence[CheckpointReader]) -> CheckpointReader:
    """The one whose facts, and dense weights if any has them, a merged checkpoint gets."""
    return next((one for one in reversed(sources) if one.groups), sources[-1])


def write_dense(writer: CheckpointWriter, sources: Sequence[CheckpointReader]) -> None:
    """Write all but the rows, and what only the cluster that saved could use."""
    main = main_source(sources)
    writer.facts = {name: fact for name, fact in main.facts.items() if name != "cluster"}
    if kinds := joined_key_kinds(sources):
        writer.facts["key_kinds"] = kinds
    for group in main.groups:
        writer.tensors(group, main.tensors(group))


class Counter:
    """Counts up and tells."""

    @classmethod
    def of_rows(cls, sources: Sequence[CheckpointReader], progress: Progress) -> Counter:
        """One for all rows, each counted twice."""
        return cls(2 * sum(one.num_rows for reader in sources for one in reader.tables.values()), progress)

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        self._progress(self._done, self._total)


class TableMerge:
    """The rows of one table: which stay, then the rows themselves."""

    def __init__(
        self, sources: Sequence[CheckpointReader], table: str, count: Counter, keys_in_memory: int
    ) -> None:
        self.table, self._count = table, count
        self._holders = [(number, one) for number, one in enumerate(sources) if table in one.tables]
        self.rows_from = [0] * len(sources)
        num_rows = sum(one.tables[table].num_rows for _, one in self._holders)
        self._part_bits = (num_rows // keys_in_memory).bit_length()
        # One bit a row, by checkpoint and file; set where another, later, checkpoint has the row.
        self._replaced: dict[tuple[int, int], Bits] = {}

    def compare(self) -> None:
        """Find out which rows stay."""
        for part in range(1 << self._part_bits):
            self._compare(part)

    def blocks(self) -> Iterator[Block]:
        """The rows that stay."""
        self.compare()
        for number, reader in self._holders:
            for file, (keys, records) in enumerate(reader.rows(self.table)):
                stays = self.stays(number, file, len(keys))
                self.rows_from[number] += int(stays.sum())
                yield keys[stays], records[stays]
                self._count.add(len(keys))

    def pruned_blocks(self) -> Iterator[tuple[int, int, dict[str, npt.NDArray[Any]]]]:
        """Whose rows were read, how many, and those that stay, as pruned ones; `compare` first."""
        for number, reader in self._holders:
            for file, parts in enumerate(reader.pruned_rows(self.table)):
                num_read = len(parts["keys"])
                yield number, num_read, kept_rows(parts, self.stays(number, file, num_read))

    @property
    def num_rows(self) -> int:
        """Rows that stay; `compare` first."""
        given = sum(one.tables[self.table].num_rows for _, one in self._holders)
        return given - sum(int(np.unpackbits(bits).sum()) for bits in self._replaced.values())

    def stays(self, number: int, file: int, num_rows: int) -> npt.NDArray[np.bool_]:
        """Which rows of a checkpoint's file no later one has."""
        replaced = self._replaced.get((number, file))
        if replaced is None:
            return np.ones(num_rows, np.bool_)
        stays: npt.NDArray[np.bool_] = np.unpackbits(replaced, count=num_rows) == 0
        return stays

    def _compare(self, part: int) -> None:
        """Find the rows of one part of the hash space that a later checkpoint has, too."""
        seen = np.empty(0, np.int64)  # sorted, of later checkpoints
        for number, reader in reversed(self._holders):
            held: list[Int64s] = [np.empty(0, np.int64)]
            for file, keys in enumerate(reader.keys(self.table)):
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
                    f"{reader.path}: table {self.table!r} holds the key {int(distinct[times > 1][0])} more "
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


def merged_result(
    sources: Sequence[CheckpointReader],
    made: CheckpointReader,
    counts: Mapping[str, Sequence[int]],
    dropped: Mapping[str, int] | None = None,
) -> Merged:
    """What became of the tables, given how many rows came from which, and how many there was no room for."""
    main, lost = main_source(sources), dropped or {}
    tables = []
    for table in made.tables.values():
        before = [entry for reader in sources if (entry := reader.tables.get(table.name)) is not None]
        tables.append(
            MergedTable(
                name=table.name,
                rows=table.num_rows,
                rows_from=tuple(counts[table.name]),
                replaced=sum(entry.num_rows for entry in before) - table.num_rows - lost.get(table.name, 0),
                files=len(table.files),
                files_before=sum(len(entry.files) for entry in before),
                dropped=lost.get(table.name, 0),
            )
        )
    return Merged(made.path, tuple(tables), main.path if main.groups else None)
