"""Rows in chunks of several checkpoints in one pool.

They may be more than one pool has room for. Their utilities decide, as in training: the least useful chunks
are left out, and then rows that hold nothing. Beside what merging takes, memory holds a utility for every
chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint.merging import main_source
from rowhaul.errors import CheckpointError
from rowhaul.optim import row_optimizer
from rowhaul.pruning.checkpoint import FACT
from rowhaul.pruning.deciding.decision import Room
from rowhaul.pruning.deciding.entries import decay_powers, decayed
from rowhaul.pruning.deciding.hashing import DistinctCounter
from rowhaul.pruning.deciding.room import part_sizes, room_for
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.row_format import RowFormat
from rowhaul.store.row_parts import Arrays, Merging


class ChunkMerging(Merging):
    """What stays of the chunks of several checkpoints.

    Args:
        format: of the rows.
        sources: the checkpoints' readers.
        tables: `TableMerge` by table.
    """

    def __init__(self, format: RowFormat, sources: Sequence[Any], tables: Mapping[str, Any]) -> None:
        main = main_source(sources)
        dims = list(dict.fromkeys(table.dim for table in main.tables.values()))
        self._file = main.facts[FACT]["file"].removesuffix(".safetensors")
        self._pools = [
            _Pool(format, number, sources, main, {n: tables[n] for n in tables if main.tables[n].dim == dim})
            for number, dim in enumerate(dims)
        ]
        self._pool_of = {name: self._pools[dims.index(main.tables[name].dim)] for name in tables}

    @property
    def num_dropped(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Chunks without room."""
        return sum(max(pool.num_over, 0) for pool in self._pools)

    def take(self, table: str, source: int, block: Arrays) -> Arrays:
        """Return the rows with the chunks that have room."""
        return self._pool_of[table].take(source, block)

    def files(self) -> dict[str, Arrays]:
        """Return what pruners of the merged rows know."""
        return {self._file: {name: one for pool in self._pools for name, one in pool.known().items()}}

    def left_out(self, num_rows: int) -> str:
        """Say which chunks and rows had no room."""
        counts = {"chunk of lowest utility": self.num_dropped, "row without any chunk": num_rows}
        what = [
            f"{count:,} {name if count == 1 else name.replace(' ', 's ', 1)}"
            for name, count in counts.items()
            if count
        ]
        return f"The prune settings left no room for {' and '.join(what)}." if what else ""


class _Pool:
    """Tables of one row size: what is known of them together, and what there is room for."""

    def __init__(
        self, format: RowFormat, number: int, sources: Sequence[Any], main: Any, tables: Mapping[str, Any]
    ) -> None:
        self._format, self._number, self._sources, self._main = format, number, sources, main
        self._tables = tables
        parts = [self._part(reader) for reader in sources]
        for reader, part in zip(sources, parts, strict=True):
            if not np.array_equal(part["columns"], parts[0]["columns"]):
                raise CheckpointError(
                    f"{reader.path} keeps other columns of its rows than {sources[0].path}: prune.dims "
                    "chooses them in each run by itself, after its cold start; merge checkpoints of one run"
                )
        self._known = dict(parts[list(sources).index(main)])
        self._known["registers"] = np.maximum.reduce([part["registers"] for part in parts])
        num_entries = sum(one.num_rows for one in tables.values())
        self._known["numbers"] = self._counted(parts, num_entries)
        self.num_over, self._drops_empty = 0, False
        self._threshold, self._num_equal = -np.inf, 0  # chunks below it go, and some of those at it
        settings = main.facts[FACT].get("settings")
        if settings is None:  # of a checkpoint that does not say what it may hold
            self._powers = decay_powers(1.0)
            return
        names = {one.name for one in fields(PruneSettings)}
        known = PruneSettings(**{name: settings[name] for name in settings if name in names})
        self._powers = decay_powers(known.decay_of_step)
        self._fit(self._room(known), num_entries)

    def known(self) -> dict[str, npt.NDArray[Any]]:
        """Return what a pruner of the merged rows knows beside them."""
        return {f"{self._number}.{name}": array for name, array in self._known.items()}

    def take(self, source: int, block: Arrays) -> Arrays:
        """Return what stays of a checkpoint's rows."""
        if self.num_over > 0:
            block = self._without_least_useful(source, block)
        if self._drops_empty:
            block = self._format.select(block, block["present"].sum(axis=1) > 0)
        # As long ago as it was then, seen from the step that the merged one is of.
        later = int(self._main.facts["step"]) - int(self._sources[source].facts["step"])
        return {**block, "touched": (block["touched"].astype(np.int64) + later).astype(np.int32)}

    def _part(self, reader: Any) -> Arrays:
        prefix = f"{self._number}."
        arrays = reader.arrays(reader.facts[FACT]["file"])
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    def _counted(self, parts: Sequence[Arrays], num_entries: int) -> npt.NDArray[Any]:
        """Count the different rows that all have seen; rows that were forgotten count as well."""
        is_complete = all(bool(part["numbers"][1]) for part in parts)
        seen = num_entries
        if not is_complete:
            counter = DistinctCounter()
            counter.registers[:] = self._known["registers"]
            seen = max(seen, counter.estimate(), *(int(part["numbers"][0]) for part in parts))
        numbers = self._known["numbers"].copy()
        numbers[:2] = seen, is_complete
        return numbers

    def _room(self, settings: PruneSettings) -> Room:
        tables = [self._main.tables[name] for name in self._tables]
        every = sum(table.dim for table in self._main.tables.values())
        budget = settings.budget * sum(table.dim for table in tables) // every
        rule = row_optimizer(self._main.facts["row_optimizer"], lr=0.0)
        columns = self._known["columns"].shape[1]
        sizes = part_sizes(columns, tables[0].dim, settings, rule, tables[0].dtype)
        return room_for(settings, budget, sizes, int(self._known["numbers"][0]))

    def _fit(self, room: Room, num_entries: int) -> None:
        """Find out what there is no room for."""
        utilities = [np.empty(0, np.float32)]
        for table in self._tables.values():
            utilities += [self._utilities(source, block) for source, _, block in table.kept()]
        held = np.concatenate(utilities)
        self.num_over = len(held) - room.num_chunks
        if self.num_over > 0:
            self._threshold = np.partition(held, self.num_over - 1)[self.num_over - 1]
            self._num_equal = self.num_over - int((held < self._threshold).sum())
        self._drops_empty = num_entries > room.num_entries
        if self._drops_empty:
            self._known["numbers"][1] = 0

    def _utilities(self, source: int, block: Arrays) -> npt.NDArray[np.float32]:
        """Return the utilities of stored chunks as they were at their checkpoint's step."""
        steps = int(self._sources[source].facts["step"]) - block["touched"].astype(np.int64)
        now = decayed(self._powers, np.maximum(steps, 0))[:, None] * block["utilities"].astype(np.float64)
        return now[block["present"]].astype(np.float32)

    def _without_least_useful(self, source: int, block: Arrays) -> Arrays:
        utilities = self._utilities(source, block)
        goes = utilities < self._threshold
        equal = np.flatnonzero(utilities == self._threshold)[: self._num_equal]
        goes[equal] = True
        self._num_equal -= len(equal)
        present = block["present"].copy()
        present[present] = ~goes
        return {**block, "present": present, "chunks": block["chunks"][~goes]}
