"""Rows in chunks in a cluster's checkpoint: the files that one rank writes, and what it takes to resume.

Every home writes its rows, their chunks and utilities as one process does (`rowhaul.pruning.checkpoint`). The
scheduler's state has the map of chunks; beside it is what workers have seen since the last pruning, for the
same cluster to continue with the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, ShardWriter
from rowhaul.pruning import checkpoint as saved_pruning
from rowhaul.pruning.cluster.pruning import ClusterPruning
from rowhaul.pruning.layout import ChunkLayout, fresh_records
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import Scheduler, homes_of
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.keyed import locate
from rowhaul.train.deferred import DeferredWriter, Pace
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.cluster_rows import ClusterRows, RankWriters
from rowhaul.train.distributed.training import DistributedTraining

_UTILITIES = "utilities"  # file of what was useful by the last pruning
_LEDGER = "ledger-"  # file of what a worker has seen since

Arrays = dict[str, npt.NDArray[Any]]


class ChunkedClusterRows(ClusterRows):
    """Saves and loads rows in chunks."""

    copies_rows = True

    def take(
        self, training: DistributedTraining, writers: RankWriters
    ) -> tuple[LiveRows, npt.NDArray[np.float64]]:
        """Collect what this rank writes; a collective call.

        Returns all rows with utilities as of now, and what is known of columns. Rows are copied at once if
        training goes on: their chunks are not where one snapshot could find them.
        """
        pruning, mover = _pruning(training), training.runtime.mover
        flushed = training.flushed()
        gathered = pruning.saved_rows(training.runtime), pruning.summed_squares(training.runtime)

        def write(writer: ShardWriter | DeferredWriter, pace: Pace) -> None:
            self._write_rows(writer, writers.label, training, flushed, gathered[0])
            num_workers = training.settings.topology.num_workers
            pieces = sidecar.pieces(mover.cache, mover.home, flushed, num_workers)
            sidecar.write(writer, writers.label, pieces, pace)

        if writers.beside:
            write(writers.home, lambda: None)
        else:
            writers.home.then(write)
        return gathered

    def _write_rows(
        self,
        shard: ShardWriter | DeferredWriter,
        label: str,
        training: DistributedTraining,
        flushed: RowMemory | None,
        live: LiveRows,
    ) -> None:
        """Write the rows that this rank is home of, and what its worker has seen since the last pruning."""
        pruning = _pruning(training)
        if training.runtime.mover.cache is not None:
            logged = pruning.utility_log.export() if pruning.utility_log is not None else {}
            shard.arrays(f"{_LEDGER}{label}", {**logged, "squares": pruning.squares})
        home = training.runtime.mover.home
        if home is None or flushed is None:
            return
        layout = _chunks(home.layout)
        numbers = live.tables * layout.num_chunks
        here = homes_of(numbers, live.keys, training.settings.topology) == training.runtime.rank
        for table, spec in enumerate(layout.rows):
            some = np.flatnonzero(here & (live.tables == table))
            blocks = [_block(layout, home, flushed, live, table, some)] if len(some) else []
            shard.blocks(spec.name, blocks, spec.dim, 0, layout.dtype, self.format.name)

    def write_scheduler(
        self, writer: DeferredWriter, training: DistributedTraining, gathered: Any, state: Arrays
    ) -> None:
        """Write what the map of chunks knows."""
        known = training.runtime.feed.at_rest(_known)
        assert known is not None
        known |= {"columns": _chunks(training.layout).column_matrix, "sums": gathered[1]}
        writer.arrays(saved_pruning.FILE, {f"0.{name}": array for name, array in known.items()})

    def facts(self, training: DistributedTraining) -> dict[str, Any]:
        """Return what the manifest says of pruning."""
        file = f"{saved_pruning.FILE}.safetensors"
        return {saved_pruning.FACT: saved_pruning.fact(_chunks(training.layout).pruning, file)}

    def saved_layout(self, reader: CheckpointReader, layout: TableLayout) -> TableLayout:
        """Return the tables with the columns that a checkpoint keeps, whatever the settings say now."""
        chunks, pruner = _chunks(layout), _pruner(reader)
        columns, still_awaits = pruner["0.columns"], bool(pruner["0.numbers"][5])
        keeps_all = columns.shape[1] == chunks.rows[0].dim
        if still_awaits or (keeps_all and not chunks.awaits_columns):
            return layout
        return chunks.narrowed(columns)

    def load(self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None) -> None:
        """Load rows into this rank's home, and what its worker has seen."""
        self._load_log(reader, training, mine)
        home, topology, rank = training.runtime.mover.home, training.settings.topology, training.runtime.rank
        if home is None:
            return
        layout = _chunks(home.layout)
        for table, name in enumerate(self.tables):
            for block in reader.blocks(name, mine):
                keys = block["keys"]
                here = homes_of(np.full(len(keys), table * layout.num_chunks), keys, topology) == rank
                row_of_chunk, places = np.nonzero(block["present"])
                for place, width in enumerate(layout.cut.widths):
                    number = table * layout.num_chunks + place
                    chosen = np.flatnonzero((places == place) & here[row_of_chunk])
                    records = block["chunks"][chosen][:, :width]
                    sidecar.load(home, number, keys[row_of_chunk[chosen]], np.ascontiguousarray(records))

    def _load_log(
        self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None
    ) -> None:
        """Load a worker's own log; on another cluster worker 0 takes over what all had seen of columns."""
        pruning = _pruning(training)
        for name in mine or ():
            if name.startswith(_LEDGER):
                arrays = reader.arrays(name)
                if pruning.squares.size:  # not where columns were to be chosen, and all are kept now
                    pruning.squares[:] = arrays["squares"].reshape(pruning.squares.shape)
                if pruning.utility_log is not None:
                    pruning.utility_log.restore(arrays)
        if mine is None and training.runtime.rank == 0 and _chunks(training.layout).awaits_columns:
            pruning.squares[:] = _pruner(reader)["0.sums"]

    def restore_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Load utilities that older versions keep in a file of their own."""
        assert isinstance(scheduler, ChunkScheduler)
        name = f"{_UTILITIES}.safetensors"
        if name not in reader.file_bytes:
            return
        saved, entries = reader.arrays(name), scheduler.map.entries
        numbers = scheduler.map.rows().numbers
        numbers = np.sort(numbers[numbers < len(saved["utilities"])])
        entries.load_utilities(numbers, saved["utilities"][numbers], np.full(len(numbers), saved["at"][0]))

    def start_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Introduce all chunks to a new scheduler."""
        assert isinstance(scheduler, ChunkScheduler)
        chunks, pruner = scheduler.map, _pruner(reader)
        for number, name in enumerate(self.tables):
            for block in reader.blocks(name):
                slots = np.where(block["present"], np.int32(0), np.int32(-1))
                chunks.load(number, block["keys"], slots, block["utilities"], block["touched"])
                row, place = np.nonzero(block["present"])
                chunk_tables = (number * chunks.num_chunks + place).astype(np.int32)
                scheduler.mark_trained(chunk_tables, block["keys"][row])
        chunks.restore(pruner["0.numbers"], pruner["0.registers"])


def _chunks(layout: TableLayout) -> ChunkLayout:
    assert isinstance(layout, ChunkLayout)
    return layout


def _pruning(training: DistributedTraining) -> ClusterPruning:
    assert isinstance(training.upkeep, ClusterPruning)
    return training.upkeep


def _pruner(reader: CheckpointReader) -> Arrays:
    return reader.arrays(reader.facts[saved_pruning.FACT]["file"])


def _known(scheduler: Scheduler) -> Arrays:
    """What one process needs to continue, beside rows; see `PrunedTables.state`."""
    assert isinstance(scheduler, ChunkScheduler)
    return scheduler.map.known(scheduler.iteration, scheduler.ids.layout.awaits_columns)


def _block(
    layout: ChunkLayout, home: RowMemory, flushed: RowMemory, live: LiveRows, table: int, some: Any
) -> Arrays:
    """Rows of a table as one process writes them; chunks that were never trained are as they begin."""
    assert live.present is not None
    assert live.utilities is not None
    assert live.touched is not None
    keys, present = live.keys[some], live.present[some]
    row_of_chunk, places = np.nonzero(present)
    chunks = np.zeros((len(places), layout.cut.width), layout.dtype)
    fresh = RowMemory(layout)
    for place, width in enumerate(layout.cut.widths):
        number = table * layout.num_chunks + place
        chosen = np.flatnonzero(places == place)
        chunks[chosen, :width] = _records((flushed, home), fresh, number, keys[row_of_chunk[chosen]])
    return {
        "keys": keys,
        "present": present,
        "chunks": chunks,
        "utilities": live.utilities[some],
        "touched": live.touched[some],
        "columns": layout.column_matrix[table],
        "starts": layout.cut.starts,
    }


def _records(
    memories: tuple[RowMemory, ...], fresh: RowMemory, table: int, keys: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Read records of a table from the first memory that has each; make those that none has."""
    number, position = fresh.place_of(table)
    records = np.empty((len(keys), fresh.groups[number].arena.width), fresh.layout.dtype)
    missing = np.arange(len(keys))
    for memory in memories:
        group = memory.groups[number]
        found = locate(group, np.full(len(missing), position), keys[missing])
        there = found >= 0
        records[missing[there]] = group.arena.read(found[there])
        missing = missing[~there]
    records[missing] = fresh_records(fresh, table, keys[missing])
    return records
