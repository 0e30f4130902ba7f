"""Checkpoints of pruned rows on a cluster: the files that one process writes, and what it takes to go on.

Every home writes its rows, their chunks and utilities as one process does (`rowhaul.pruning.checkpoint`).
The scheduler's state has the map of chunks; beside it is what workers have seen since the last pruning, for
the same cluster to go on with the same bits.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, ShardWriter
from rowhaul.pruning import checkpoint as saved_pruning
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import Scheduler, Topology, homes_of
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.keyed import locate
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.training import DistributedTraining

_UTILITIES = "utilities"  # file of what was useful by the last pruning
_LEDGER = "ledger-"  # file of what a worker has seen since
_PRUNERS = "pruning"

Arrays = dict[str, npt.NDArray[Any]]


def write_rows(shard: ShardWriter, training: DistributedTraining, flushed: RowMemory, live: LiveRows) -> None:
    """Write the rows that this rank is home of, with their utilities."""
    home = training.runtime.mover.home
    assert home is not None
    layout = home.layout
    assert isinstance(layout, ChunkLayout)
    dim, num_chunks, rank = layout.rows[0].dim, layout.num_chunks, training.runtime.rank
    matrix = layout.column_matrix
    here = homes_of(live.tables * num_chunks, live.keys, training.settings.topology) == rank
    for table, spec in enumerate(layout.rows):
        some = np.flatnonzero(here & (live.tables == table))
        blocks = [_block(layout, home, flushed, live, table, some)] if len(some) else []
        columns = {"columns": matrix[table], "starts": layout.starts}
        shard.pruned_table(spec.name, blocks, columns, dim, layout.dtype)


def write_beside(shard: ShardWriter, label: str, training: DistributedTraining) -> None:
    """Write what this rank, and the scheduler if it is here, know beside rows."""
    assert training.pruning is not None
    arrays = training.pruning.utility_log.export() if training.pruning.utility_log is not None else {}
    if training.runtime.mover.cache is not None:
        shard.arrays(f"{_LEDGER}{label}", {**arrays, "squares": training.pruning.squares})


def write_scheduler(
    shard: ShardWriter, training: DistributedTraining, squares: npt.NDArray[np.float64]
) -> None:
    """Write what is known where it is decided; on the rank that writes the scheduler's state."""
    known = training.runtime.feed.at_rest(_known)
    assert known is not None
    assert isinstance(training.layout, ChunkLayout)
    shard.arrays(_PRUNERS, {**known, "0.columns": training.layout.column_matrix, "0.sums": squares})


def narrowed(reader: CheckpointReader, layout: TableLayout) -> TableLayout:
    """The tables as a checkpoint has them: with all columns, or those that it keeps."""
    if not isinstance(layout, ChunkLayout) or not layout.awaits_columns:
        return layout
    columns = reader.arrays(reader.facts[saved_pruning.FACT]["file"])["0.columns"]
    return layout.narrowed(columns) if columns.shape[1] < layout.rows[0].dim else layout


def facts(training: DistributedTraining) -> dict[str, Any]:
    """What the manifest says of pruning."""
    assert training.pruning is not None
    assert isinstance(training.layout, ChunkLayout)
    return {saved_pruning.FACT: saved_pruning.fact(training.layout.pruning, f"{_PRUNERS}.safetensors")}


def load_rows(
    reader: CheckpointReader,
    home: RowMemory,
    topology: Topology,
    rank: int,
    among: Container[str] | None = None,
) -> None:
    """Fill a store: with the rows of some files, or with all that it is home of."""
    layout = home.layout
    assert isinstance(layout, ChunkLayout)
    for table, spec in enumerate(layout.rows):
        for name in reader.tables[spec.name].files:
            if among is not None and name not in among:
                continue
            parts = reader.arrays(name)
            keys = parts["keys"]
            here = homes_of(np.full(len(keys), table * layout.num_chunks), keys, topology) == rank
            row_of_chunk, places = np.nonzero(parts["present"])
            for place in range(layout.num_chunks):
                number = table * layout.num_chunks + place
                chosen = np.flatnonzero((places == place) & here[row_of_chunk])
                records = parts["chunks"][chosen][:, : _width(layout, number)]
                sidecar.load(home, number, keys[row_of_chunk[chosen]], np.ascontiguousarray(records))


def load_utility_log(reader: CheckpointReader, training: DistributedTraining, mine: list[str]) -> None:
    """Go on with what a worker had seen; on the same cluster."""
    assert training.pruning is not None
    for name in mine:
        if name.startswith(_LEDGER):
            arrays = reader.arrays(name)
            training.pruning.squares[:] = arrays["squares"].reshape(training.pruning.squares.shape)
            if training.pruning.utility_log is not None:
                training.pruning.utility_log.restore(arrays)


def load_squares(reader: CheckpointReader, training: DistributedTraining) -> None:
    """Let worker 0 go on with what all had seen of columns; on another cluster."""
    assert training.pruning is not None
    layout = training.layout
    assert isinstance(layout, ChunkLayout)
    if training.runtime.rank == 0 and layout.awaits_columns:
        training.pruning.squares[:] = reader.arrays(reader.facts[saved_pruning.FACT]["file"])["0.sums"]


def restore_utilities(scheduler: Scheduler, reader: CheckpointReader) -> None:
    """Give a scheduler, restored already, the utilities that older versions keep in a file of their own."""
    assert isinstance(scheduler, ChunkScheduler)
    name = f"{_UTILITIES}.safetensors"
    if not (reader.path / name).is_file():
        return
    saved, entries = reader.arrays(name), scheduler.map.entries
    numbers = scheduler.map.rows().numbers
    numbers = np.sort(numbers[numbers < len(saved["utilities"])])
    entries.load_utilities(numbers, saved["utilities"][numbers], np.full(len(numbers), saved["at"][0]))


def bring(scheduler: Scheduler, reader: CheckpointReader, tables: list[str]) -> None:
    """Load all rows into the map of a new scheduler of another cluster."""
    assert isinstance(scheduler, ChunkScheduler)
    chunks, pruner = scheduler.map, reader.arrays(reader.facts[saved_pruning.FACT]["file"])
    for number, name in enumerate(tables):
        for parts in reader.pruned_rows(name):
            slots = np.where(parts["present"], np.int32(0), np.int32(-1))
            chunks.load(number, parts["keys"], slots, parts["utilities"], parts["touched"])
            row, place = np.nonzero(parts["present"])
            chunk_tables = (number * chunks.num_chunks + place).astype(np.int32)
            scheduler.mark_trained(chunk_tables, parts["keys"][row])
    numbers = pruner["0.numbers"]
    chunks.restore_facts(numbers[[0, 1, 3, 4, 6]].tolist(), pruner["0.registers"])


def _known(scheduler: Scheduler) -> Arrays:
    """What one process needs to continue, beside rows; see `PrunedTables.state`."""
    assert isinstance(scheduler, ChunkScheduler)
    num_rows, is_complete, *others = scheduler.map.facts
    pruned_at, num_turned_away, num_rows_pruned = others
    numbers = [num_rows, is_complete, scheduler.iteration, pruned_at, num_turned_away]
    numbers += [scheduler.ids.layout.awaits_columns, num_rows_pruned]
    registers = scheduler.map.counter.registers.copy()
    return {"0.registers": registers, "0.numbers": np.array(numbers, np.int64)}


def _width(layout: ChunkLayout, number: int) -> int:
    size = layout.specs[number].dim
    return size + layout.optimizer.state_width(size)


def _block(
    layout: ChunkLayout, home: RowMemory, flushed: RowMemory, live: LiveRows, table: int, some: Any
) -> Arrays:
    """Rows of a table as one process writes them; chunks that were never trained are as they begin."""
    assert live.present is not None
    assert live.utilities is not None
    assert live.touched is not None
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
    return {
        "keys": keys,
        "present": present,
        "chunks": chunks,
        "utilities": live.utilities[some],
        "touched": live.touched[some],
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
