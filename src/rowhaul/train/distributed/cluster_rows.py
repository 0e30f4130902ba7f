"""The rows of a cluster's checkpoint: what one rank writes and loads of them.

The rank with the latest record of a row writes it: a worker the rows that it trained last, a home the others.
Only rows of which gradients wait are computed for the checkpoint, on copies at their homes.

This class is for formats whose records are rows: `WholeRows` and what derives from it. Others name a class of
their own as `RowFormat.cluster_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import progressed
from rowhaul.checkpoint import CheckpointReader
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.memory_snapshot import MemorySnapshot
from rowhaul.runtime.row_memory import MissingRowError, RowMemory
from rowhaul.schedule import Plan, Scheduler, homes_of
from rowhaul.schedule.arrays import Arrays as SchedulerState
from rowhaul.store.row_format import RowFormat, load_named
from rowhaul.store.row_parts import Arrays
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.deferred import DeferredWriter
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.training import DistributedTraining

SCHEDULE = "schedule"  # file of the scheduler's state
_OF_WORKER = re.compile(r"rows-\d+-w\d+-\d+\.")  # files of rows that a worker has written

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]


def cluster_rows(format: RowFormat, tables: Sequence[str]) -> ClusterRows:
    """Return what saves and loads tables in a format."""
    rows: ClusterRows = load_named(format.cluster_rows)(format, tables)
    return rows


class RankWriters:
    """Collects what one rank writes.

    Attributes:
        home: writes rows that the rank stores, and everything else.
        worker: writes rows of its cache; their files have another label.
        label: of the rank's other files.
        beside: whether training goes on before all is written.
    """

    def __init__(self, rank: int, *, beside: bool, copies_rows: bool) -> None:
        self.label, self.worker_label, self.beside = f"r{rank:04d}", f"w{rank:04d}", beside
        self.home = DeferredWriter(copies_rows=copies_rows)
        self.worker = DeferredWriter(copies_rows=copies_rows)


class ClusterRows:
    """Saves and loads the rows of tables, named in the order that plans number them, on one rank."""

    copies_rows = False  # whether rows are copied before training goes on

    def __init__(self, format: RowFormat, tables: Sequence[str]) -> None:
        self.format, self.tables = format, list(tables)
        self._snapshots: list[MemorySnapshot] = []

    def take(self, training: DistributedTraining, writers: RankWriters) -> Any:
        """Collect what this rank writes of rows; a collective call. Returns what `write_scheduler` needs."""
        mover = training.runtime.mover
        cache = self._snapshot(mover.cache)
        home = self._snapshot(mover.home)
        marks = _Marks(training, cache, home)
        flushed = training.flushed(records_stay=True, each=marks.note)
        pieces: list[Iterable[sidecar.Piece]] = []
        num_workers = training.settings.topology.num_workers
        if cache is not None and mover.cache is not None:
            self._write(writers.worker, training, lambda table: cache.blocks(table, marked=True))
            pieces.append(sidecar.records(sidecar.CACHE, cache, marked=False, num_tables=len(self.tables)))
            pieces.append(list(sidecar.waiting(sidecar.CACHE, mover.cache, num_workers)))
        if home is not None and mover.home is not None and flushed is not None:
            self._write(
                writers.home,
                training,
                lambda table: chain(home.blocks(table, marked=False), _blocks(flushed, table)),
            )
            pieces.append(sidecar.records(sidecar.HOME, home, marked=True, num_tables=len(self.tables)))
            pieces.append(list(sidecar.absent(mover.home, flushed)))
            pieces.append(list(sidecar.waiting(sidecar.HOME, mover.home, num_workers)))
        every = chain.from_iterable(pieces)
        writers.home.then(lambda writer, pace: sidecar.write(writer, writers.label, every, pace))
        return None

    def _snapshot(self, memory: RowMemory | None) -> MemorySnapshot | None:
        if memory is None:
            return None
        self._snapshots.append(MemorySnapshot(memory))
        return self._snapshots[-1]

    def _write(
        self, writer: DeferredWriter, training: DistributedTraining, blocks: Callable[[int], Iterable[Rows]]
    ) -> None:
        layout, format = training.layout, self.format
        assert isinstance(format, WholeRows)

        def encoded(table: int, dim: int) -> Iterator[Arrays]:
            return (format.encode(keys, records, dim) for keys, records in blocks(table))

        for number, spec in enumerate(layout.specs):
            width = layout.optimizer.state_width(spec.dim)
            writer.blocks(spec.name, encoded(number, spec.dim), spec.dim, width, layout.dtype, format.name)

    def is_crowded(self) -> bool:
        """Whether it should be written faster: training copies many rows."""
        return any(snapshot.is_crowded for snapshot in self._snapshots)

    def close(self) -> None:
        """Free what `take` has kept for the writers."""
        for snapshot in self._snapshots:
            snapshot.close()
        self._snapshots.clear()

    def write_scheduler(
        self, writer: DeferredWriter, training: DistributedTraining, gathered: Any, state: SchedulerState
    ) -> None:
        """Write what the scheduler knows beside its state, on the rank that writes that afterwards.

        What has files of its own may be removed from the state; see `scheduler_state`.
        """

    def facts(self, training: DistributedTraining) -> dict[str, Any]:
        """Return what the manifest says of the rows."""
        return {}

    def saved_layout(self, reader: CheckpointReader, layout: TableLayout) -> TableLayout:
        """Return the tables as a checkpoint has them."""
        return layout

    def load(self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None) -> None:
        """Load this rank's own files into its home and cache; None: the rows that it is home of now.

        Rows that all workers hold are loaded into every cache then.
        """
        mover, settings = training.runtime.mover, training.settings
        hot = settings.hot if mover.cache is not None and mine is None else None
        of_worker = {name for name in mine or () if _OF_WORKER.match(name)}
        stored = None if mine is None else mine - of_worker
        for number, name in enumerate(self.tables):
            if mover.cache is not None:
                for keys, records in self._stored(reader, name, of_worker):
                    progressed()
                    sidecar.load(mover.cache, number, keys, records)
            if mover.home is None and hot is None:
                continue
            for keys, records in self._stored(reader, name, stored):
                progressed()
                if mover.home is not None:
                    here = np.ones(len(keys), np.bool_)
                    if mine is None:
                        numbers = np.full(len(keys), number)
                        here = homes_of(numbers, keys, settings.topology) == training.runtime.rank
                    sidecar.load(mover.home, number, keys[here], records[here])
                if mover.cache is not None and hot is not None:
                    held = np.isin(keys, hot.keys[hot.tables == number])
                    sidecar.load(mover.cache, number, keys[held], records[held])

    def _stored(self, reader: CheckpointReader, table: str, among: Container[str] | None) -> Iterator[Rows]:
        """Yield rows of some files as (keys, records), as memory holds them."""
        assert isinstance(self.format, WholeRows)
        for block in reader.blocks(table, among):
            yield block["keys"], self.format.stored(block, reader.tables[table].dim)

    def scheduler_state(self, reader: CheckpointReader) -> SchedulerState:
        """Return the part of a scheduler's state that has files of its own."""
        return {}

    def restore_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Complete a scheduler that has been restored; on the same cluster."""

    def start_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Introduce a checkpoint's rows to a new scheduler, on another cluster."""
        for number, name in enumerate(self.tables):
            for keys in reader.keys(name):
                scheduler.mark_trained(np.full(len(keys), number, np.int32), keys)


class _Marks:
    """Marks in a cache the rows that this rank writes, and at home those that it does not write."""

    def __init__(
        self, training: DistributedTraining, cache: MemorySnapshot | None, home: MemorySnapshot | None
    ) -> None:
        self._topology, self._rank = training.settings.topology, training.runtime.rank
        self._cache, self._home = cache, home
        # Elsewhere a flushed row is what it will be.
        is_bounded = training.settings.sync_mode.name == "bounded"
        self._changes = training.runtime.mover.changes if is_bounded else None

    def note(self, plan: Plan) -> None:
        """Mark the rows of one slice."""
        if self._home is not None:
            here = homes_of(plan.tables, plan.keys, self._topology) == self._rank
            self._home.mark(plan.tables[here], plan.keys[here])
            if self._changes is not None:
                waiting = here & (plan.trainers == 0)
                self._changes.note_waiting(plan.tables[waiting], plan.keys[waiting])
        if self._cache is not None:
            mine = (plan.trainers & (np.uint64(1) << np.uint64(self._rank))) != 0
            held = self._cache.mark(plan.tables[mine], plan.keys[mine])
            if held != int(mine.sum()):
                raise MissingRowError(
                    f"{int(mine.sum()) - held:,} rows are not in the cache of worker {self._rank}, which has "
                    "trained them last; please report this"
                )


def _blocks(memory: RowMemory, table: int) -> Iterator[Rows]:
    number, position = memory.place_of(table)
    return memory.groups[number].blocks(position)
