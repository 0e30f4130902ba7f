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
from rowhaul.pruning.cluster.utility_log import decayed
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool import PruneSettings
from rowhaul.pruning.pool.lookups import decay_powers
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import Scheduler, homes_of
from rowhaul.schedule.arrays import Saved
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.keyed import locate
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.cluster_rows import SCHEDULE, ClusterRows
from rowhaul.train.distributed.training import DistributedTraining

_UTILITIES = "utilities"  # file of what was useful by the last pruning
_LEDGER = "ledger-"  # file of what a worker has seen since

Arrays = dict[str, npt.NDArray[Any]]


class ChunkedClusterRows(ClusterRows):
    """Saves and loads rows in chunks."""

    def gather(self, training: DistributedTraining) -> tuple[LiveRows, npt.NDArray[np.float64]]:
        """Collect all rows with utilities as of now, and what is known of columns; a collective call."""
        pruning = _pruning(training)
        return pruning.saved_rows(training.runtime), pruning.squares(training.runtime)

    def write(
        self,
        shard: ShardWriter,
        label: str,
        training: DistributedTraining,
        flushed: RowMemory | None,
        gathered: Any,
    ) -> None:
        """Write the rows that this rank is home of, and what its worker has seen since the last pruning."""
        if (log := _pruning(training).utility_log) is not None:
            shard.arrays(f"{_LEDGER}{label}", log.export())
        home, live = training.runtime.mover.home, gathered[0]
        if home is None or flushed is None:
            return
        layout = _chunks(home.layout)
        numbers = live.tables * layout.num_chunks
        here = homes_of(numbers, live.keys, training.settings.topology) == training.runtime.rank
        for table, spec in enumerate(layout.rows):
            some = np.flatnonzero(here & (live.tables == table))
            block = _block(layout, home, flushed, live, table, some, training.iteration)
            blocks = [block] if len(some) else []
            shard.blocks(spec.name, blocks, spec.dim, 0, layout.dtype, self.format.name)

    def write_scheduler(self, shard: ShardWriter, training: DistributedTraining, gathered: Any) -> None:
        """Write what the map of chunks knows."""
        known = training.runtime.feed.at_rest(_known)
        assert known is not None
        pruner, utilities = known
        matrix = _chunks(training.layout).column_matrix
        shard.arrays(saved_pruning.FILE, {**pruner, "0.columns": matrix, "0.sums": gathered[1]})
        shard.arrays(_UTILITIES, utilities)

    def facts(self, training: DistributedTraining) -> dict[str, Any]:
        """Return what the manifest says of pruning."""
        file = f"{saved_pruning.FILE}.safetensors"
        return {saved_pruning.FACT: saved_pruning.fact(_chunks(training.layout).pruning, file)}

    def saved_layout(self, reader: CheckpointReader, layout: TableLayout) -> TableLayout:
        """Return the tables with the columns that a checkpoint keeps."""
        chunks = _chunks(layout)
        columns = _pruner(reader)["0.columns"]
        if not chunks.awaits_columns or columns.shape[1] == chunks.rows[0].dim:
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
                for place in range(layout.num_chunks):
                    number = table * layout.num_chunks + place
                    chosen = np.flatnonzero((places == place) & here[row_of_chunk])
                    records = block["chunks"][chosen][:, : _width(layout, number)]
                    sidecar.load(home, number, keys[row_of_chunk[chosen]], np.ascontiguousarray(records))

    def _load_log(
        self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None
    ) -> None:
        """Load a worker's own log; on another cluster worker 0 takes over what all had seen of columns."""
        log = _pruning(training).utility_log
        if log is None:
            return
        for name in mine or ():
            if name.startswith(_LEDGER):
                log.restore(reader.arrays(name))
        if mine is None and training.runtime.rank == 0 and _chunks(training.layout).awaits_columns:
            log.squares[:] = _pruner(reader)["0.sums"]

    def restore_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Load the utilities of the last pruning."""
        assert isinstance(scheduler, ChunkScheduler)
        saved = reader.arrays(f"{_UTILITIES}.safetensors")
        scheduler.chunks.set_utilities(saved["utilities"], int(saved["at"][0]))

    def start_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Introduce all chunks to a new scheduler."""
        assert isinstance(scheduler, ChunkScheduler)
        chunks, now = scheduler.chunks, int(reader.facts["step"])
        rows = _all_rows(reader, self.tables, chunks.settings, now)
        assert rows.present is not None
        assert rows.utilities is not None
        if reader.facts.get("cluster") is None:  # one process saved
            pruner = _pruner(reader)
            chunks.take_over(rows, pruner["0.registers"], pruner["0.numbers"], now)
        else:
            chunks.restore(Saved(reader.arrays(f"{SCHEDULE}.safetensors")).part("chunks"))
            known = chunks.rows()
            utilities = np.zeros((int(known.numbers.max(initial=-1)) + 1, chunks.num_chunks), np.float32)
            utilities[known.numbers] = rows.utilities  # both are by (table, key), and of the same rows
            chunks.set_utilities(utilities, now)
        row, place = np.nonzero(rows.present)
        chunk_tables = rows.tables[row] * chunks.num_chunks + place
        scheduler.mark_trained(chunk_tables.astype(np.int32), rows.keys[row])


def _chunks(layout: TableLayout) -> ChunkLayout:
    assert isinstance(layout, ChunkLayout)
    return layout


def _pruning(training: DistributedTraining) -> ClusterPruning:
    assert isinstance(training.upkeep, ClusterPruning)
    return training.upkeep


def _pruner(reader: CheckpointReader) -> Arrays:
    return reader.arrays(reader.facts[saved_pruning.FACT]["file"])


def _known(scheduler: Scheduler) -> tuple[Arrays, Arrays]:
    assert isinstance(scheduler, ChunkScheduler)
    chunks = scheduler.chunks
    utilities, at = chunks.utilities()
    pruner = {f"0.{name}": array for name, array in chunks.pruner_state().items()}
    pruner["0.numbers"][2] = scheduler.iteration
    return pruner, {"utilities": utilities, "at": np.array([at])}


def _width(layout: ChunkLayout, number: int) -> int:
    size = layout.specs[number].dim
    return size + layout.optimizer.state_width(size)


def _block(
    layout: ChunkLayout, home: RowMemory, flushed: RowMemory, live: LiveRows, table: int, some: Any, step: int
) -> Arrays:
    """Rows of a table as one process writes them; chunks that were never trained are as they begin."""
    assert live.present is not None
    assert live.utilities is not None
    keys, present = live.keys[some], live.present[some]
    row_of_chunk, places = np.nonzero(present)
    width = max(_width(layout, place) for place in range(layout.num_chunks))
    chunks = np.zeros((len(places), width), layout.dtype)
    fresh = RowMemory(layout)
    for place in range(layout.num_chunks):
        number = table * layout.num_chunks + place
        chosen = np.flatnonzero(places == place)
        chunks[chosen, : _width(layout, number)] = _records(
            (flushed, home, fresh), number, keys[row_of_chunk[chosen]]
        )
    touched = np.full(len(keys), step, np.int32)
    return {
        "keys": keys,
        "present": present,
        "chunks": chunks,
        "utilities": live.utilities[some],
        "touched": touched,
        "columns": layout.column_matrix[table],
        "starts": layout.starts,
    }


def _records(memories: tuple[RowMemory, ...], table: int, keys: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Records of a table from the first memory that has each; the last one makes those that none has."""
    number, position = memories[0].place_of(table)
    positions = np.full(len(keys), position)
    missing = np.arange(len(keys))
    records = np.empty((len(keys), memories[0].groups[number].arena.width), memories[0].layout.dtype)
    for memory in memories:
        group, wanted = memory.groups[number], (positions[missing], keys[missing])
        found = group.make_fresh(*wanted) if memory is memories[-1] else locate(group, *wanted)
        there = found >= 0
        records[missing[there]] = group.arena.read(found[there])
        missing = missing[~there]
    return records


def _all_rows(reader: CheckpointReader, tables: list[str], settings: PruneSettings, now: int) -> LiveRows:
    """All rows of a checkpoint, by (table, key), with utilities as they are after ``now``."""
    num_chunks, powers = settings.chunks, decay_powers(settings.decay)
    numbers, keys = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    present, utilities = [np.empty((0, num_chunks), np.bool_)], [np.empty((0, num_chunks), np.float32)]
    for number, name in enumerate(tables):
        for parts in reader.blocks(name):
            numbers.append(np.full(len(parts["keys"]), number, np.int32))
            keys.append(parts["keys"])
            present.append(parts["present"])
            kept = decayed(powers, now - parts["touched"].astype(np.int64))[:, None]
            utilities.append((kept * parts["utilities"].astype(np.float64)).astype(np.float32))
    table, key = np.concatenate(numbers), np.concatenate(keys)
    order = np.lexsort((key, table))
    return LiveRows(
        table[order],
        key[order],
        order.astype(np.int32),
        np.zeros(len(order), np.int32),
        np.concatenate(present)[order],
        np.concatenate(utilities)[order],
    )
