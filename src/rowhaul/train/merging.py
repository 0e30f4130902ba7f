"""Checkpoints put together, pruned or not: `rowhaul.checkpoint.merging`, and what it takes to share a pool.

Pruned rows of several checkpoints may be more than one pool has room for. What is known of how useful they
are decides, as in training: the least useful chunks are left out, and then rows that hold nothing. Beside
what merging takes, memory holds a utility for every chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, TableEntry
from rowhaul.checkpoint import merging as whole
from rowhaul.checkpoint.compatible import check_compatible, stored_columns
from rowhaul.checkpoint.merging import KEYS_IN_MEMORY, Counter, Merged, Progress, TableMerge
from rowhaul.errors import CheckpointError
from rowhaul.optim import row_optimizer
from rowhaul.pruning.cut import part_sizes
from rowhaul.pruning.deciding.decision import Room
from rowhaul.pruning.deciding.distinct_counter import DistinctCounter
from rowhaul.pruning.deciding.room import room_for
from rowhaul.pruning.deciding.utilities import decay_powers, decayed
from rowhaul.pruning.row_files import FACT, kept_rows
from rowhaul.pruning.settings import PruneSettings

Arrays = dict[str, npt.NDArray[Any]]


def merge(
    sources: Sequence[CheckpointReader],
    to: str | Path,
    progress: Progress = lambda done, total: None,
    keys_in_memory: int = KEYS_IN_MEMORY,
) -> Merged:
    """Write a checkpoint of all tables and rows of ``sources``; what is in several comes from the last.

    Pruned checkpoints must have the same tables, chunks and columns, and what does not fit is dropped; see
    `rowhaul.checkpoint.merging.merge` for everything else.
    """
    if not sources or sources[0].facts.get(FACT) is None:
        return whole.merge(sources, to, progress, keys_in_memory)
    tables = check_compatible(sources)
    count = Counter.of_rows(sources, progress)
    merges = {table.name: TableMerge(sources, table.name, count, keys_in_memory) for table in tables}
    cuts = {table.name: stored_columns(sources, table.name) for table in tables}
    for one in merges.values():
        one.compare()
    main = whole.main_source(sources)
    dims = list(dict.fromkeys(table.dim for table in main.tables.values()))
    pools = [
        _Pool(number, sources, [table for table in tables if table.dim == dim], merges, cuts)
        for number, dim in enumerate(dims)
    ]
    dropped: dict[str, int] = {}
    with CheckpointWriter(to) as writer:
        whole.write_dense(writer, sources)
        file = writer.facts[FACT]["file"]
        known = {name: array for pool in pools for name, array in pool.known().items()}
        writer.arrays(file.removesuffix(".safetensors"), known)
        for table in tables:
            pool = pools[dims.index(table.dim)]
            blocks = pool.blocks(merges[table.name], count)
            writer.pruned_table(table.name, blocks, cuts[table.name], table.dim, table.dtype)
            dropped[table.name] = merges[table.name].num_rows - sum(merges[table.name].rows_from)
    counts = {name: one.rows_from for name, one in merges.items()}
    made = whole.merged_result(sources, CheckpointReader(to), counts, dropped)
    return replace(made, chunks_dropped=sum(max(pool.num_over, 0) for pool in pools))


@dataclass
class _Rest:
    """Which chunks go, of all in the order that they are read."""

    threshold: float  # those below it
    num_equal: int  # and so many of those at it, the first ones


class _Pool:
    """Tables that share a pool: what is known of them together, and what there is room for."""

    def __init__(
        self,
        number: int,
        sources: Sequence[CheckpointReader],
        tables: Sequence[TableEntry],
        merges: dict[str, TableMerge],
        cuts: dict[str, Arrays],
    ) -> None:
        self._number, self._sources = number, sources
        self._main = whole.main_source(sources)
        self._merges = [merges[table.name] for table in tables]
        parts = [self._part(reader) for reader in sources]
        self._check_columns(parts)
        main = parts[list(sources).index(self._main)]
        self._registers = np.maximum.reduce([part["registers"] for part in parts])
        self._numbers, self._columns, self._sums = main["numbers"].copy(), main["columns"], main["sums"]
        num_entries = sum(one.num_rows for one in self._merges)
        self._count_rows(parts, num_entries)
        self.num_over, self._drops_empty = 0, False
        self._rest = _Rest(-np.inf, 0)
        settings = self._main.facts[FACT].get("settings")
        known = {one.name for one in fields(PruneSettings)}
        self._settings = None
        if settings is not None:
            self._settings = PruneSettings(**{name: settings[name] for name in settings if name in known})
        self._powers = decay_powers(self._settings.decay_of_step if self._settings else 1.0)
        if self._settings is not None:
            self._fit(self._room(self._settings, tables), num_entries)

    def known(self) -> Arrays:
        """What a pruner of the merged rows knows beside them."""
        parts = {"registers": self._registers, "numbers": self._numbers}
        parts |= {"columns": self._columns, "sums": self._sums}
        return {f"{self._number}.{name}": array for name, array in parts.items()}

    def blocks(self, merging: TableMerge, count: Counter) -> Iterator[Arrays]:
        """The rows of a table that stay, with the chunks that there is room for."""
        for number, num_read, parts in merging.pruned_blocks():
            if self.num_over > 0:
                parts = self._without_rest(number, parts)
            if self._drops_empty:
                parts = kept_rows(parts, parts["present"].sum(axis=1) > 0)
            # As long ago as it was then, seen from the step that the merged one is of.
            later = int(self._main.facts["step"]) - int(self._sources[number].facts["step"])
            parts["touched"] = (parts["touched"].astype(np.int64) + later).astype(np.int32)
            merging.rows_from[number] += len(parts["keys"])
            yield parts
            count.add(num_read)

    def _part(self, reader: CheckpointReader) -> Arrays:
        prefix = f"{self._number}."
        arrays = reader.arrays(reader.facts[FACT]["file"])
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    def _check_columns(self, parts: Sequence[Arrays]) -> None:
        for reader, part in zip(self._sources, parts, strict=True):
            if not np.array_equal(part["columns"], parts[0]["columns"]):
                raise CheckpointError(
                    f"{reader.path} keeps other columns of its rows than {self._sources[0].path}: prune.dims "
                    "chooses them in each run by itself, after its cold start; merge checkpoints of one run"
                )

    def _count_rows(self, parts: Sequence[Arrays], num_entries: int) -> None:
        """How many different rows all of them have seen; rows that were forgotten count as well."""
        is_complete = all(bool(part["numbers"][1]) for part in parts)
        seen = num_entries
        if not is_complete:
            counter = DistinctCounter()
            counter.registers[:] = self._registers
            seen = max(seen, counter.estimate(), *(int(part["numbers"][0]) for part in parts))
        self._numbers[:2] = seen, is_complete

    def _room(self, settings: PruneSettings, tables: Sequence[TableEntry]) -> Room:
        rule = row_optimizer(self._main.facts["row_optimizer"], lr=0.0)
        columns = sum(table.dim for table in self._main.tables.values())
        budget = settings.budget * sum(table.dim for table in tables) // columns
        sizes = part_sizes(self._columns.shape[1], tables[0].dim, settings, rule, tables[0].dtype)
        return room_for(settings, budget, sizes, int(self._numbers[0]))

    def _fit(self, room: Room, num_entries: int) -> None:
        """Find out what there is no room for."""
        utilities = [np.empty(0, np.float32)]
        for merging in self._merges:
            for number, _, parts in merging.pruned_blocks():
                utilities.append(self._utilities(number, parts))
        held = np.concatenate(utilities)
        self.num_over = len(held) - room.num_chunks
        if self.num_over > 0:
            threshold = np.partition(held, self.num_over - 1)[self.num_over - 1]
            self._rest = _Rest(float(threshold), self.num_over - int((held < threshold).sum()))
        self._drops_empty = num_entries > room.num_entries
        if self._drops_empty:
            self._numbers[1] = 0

    def _utilities(self, number: int, parts: Arrays) -> npt.NDArray[np.float32]:
        """Of chunks that are there, as they were at their checkpoint's step."""
        steps = int(self._sources[number].facts["step"]) - parts["touched"].astype(np.int64)
        now = decayed(self._powers, np.maximum(steps, 0))[:, None] * parts["utilities"].astype(np.float64)
        return now[parts["present"]].astype(np.float32)

    def _without_rest(self, number: int, parts: Arrays) -> Arrays:
        utilities, rest = self._utilities(number, parts), self._rest
        goes = utilities < rest.threshold
        equal = np.flatnonzero(utilities == rest.threshold)[: rest.num_equal]
        goes[equal] = True
        rest.num_equal -= len(equal)
        present = parts["present"].copy()
        present[present] = ~goes
        return {**parts, "present": present, "chunks": parts["chunks"][~goes]}
