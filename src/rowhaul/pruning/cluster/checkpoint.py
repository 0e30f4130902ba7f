"""Checkpoints of pruned rows on a cluster: the files that one process writes, and what it takes to go on.

Every home writes its rows, their chunks and utilities as one process does (`rowhaul.pruning.checkpoint`).
The scheduler's state has the map of chunks; beside it is what workers have seen since the last pruning, for
the same cluster to go on with the same bits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, ShardWriter
from rowhaul.pruning import checkpoint as saved_pruning
from rowhaul.pruning.cluster.utility_log import decayed
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool import PruneSettings
from rowhaul.pruning.pool.lookups import decay_powers
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import Scheduler, Topology, homes_of
from rowhaul.schedule.arrays import Saved
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.keyed import locate
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.training import DistributedTraining

_UTILITIES = "utilities"  # file of what was useful by the last pruning
_LEDGER = "ledger-"  # file of what a worker has seen since
_PRUNERS = "pruning"

Arrays = dict[str, npt.NDArray[Any]]


def write_rows(
    shard: ShardWriter, training: DistributedTraining, flushed: RowMemory, live: LiveRows, step: int
) -> None:
    """Write the rows that this rank is home of, with the utilities that they have after ``step``."""
    home = training.runtime.mover.home
    assert home is not None
    layout = home.layout
    assert isinstance(layout, ChunkLayout)
    dim, num_chunks, rank = layout.rows[0].dim, layout.num_chunks, training.runtime.rank
    matrix = layout.column_matrix
    here = homes_of(live.tables * num_chunks, live.keys, training.settings.topology) == rank
    for table, spec in enumerate(layout.rows):
        some = np.flatnonzero(here & (live.tables == table))
        blocks = [_block(layout, home, flushed, live, table, some, step)] if len(some) else []
        columns = {"columns": matrix[table], "starts": layout.starts}
        shard.pruned_table(spec.name, blocks, columns, dim, layout.dtype)


def write_beside(shard: ShardWriter, label: str, training: DistributedTraining) -> None:
    """Write what this rank, and the scheduler if it is here, know beside rows."""
    assert training.pruning is not None
    if training.pruning.utility_log is not None:
        shard.arrays(f"{_LEDGER}{label}", training.pruning.utility_log.export())


def write_scheduler(
    shard: ShardWriter, training: DistributedTraining, squares: npt.NDArray[np.float64]
) -> None:
    """Write what is known where it is decided; on the rank that writes the scheduler's state."""
    known = training.runtime.feed.at_rest(_known)
    assert known is not None
    pruner, utilities = known
    assert isinstance(training.layout, ChunkLayout)
    shard.arrays(_PRUNERS, {**pruner, "0.columns": training.layout.column_matrix, "0.sums": squares})
    shard.arrays(_UTILITIES, utilities)


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
        if name.startswith(_LEDGER) and training.pruning.utility_log is not None:
            training.pruning.utility_log.restore(reader.arrays(name))


def load_squares(reader: CheckpointReader, training: DistributedTraining) -> None:
    """Let worker 0 go on with what all had seen of columns; on another cluster."""
    assert training.pruning is not None
    utility_log, layout = training.pruning.utility_log, training.layout
    assert isinstance(layout, ChunkLayout)
    if utility_log is not None and training.runtime.rank == 0 and layout.awaits_columns:
        utility_log.squares[:] = reader.arrays(reader.facts[saved_pruning.FACT]["file"])["0.sums"]


def restore_utilities(scheduler: Scheduler, reader: CheckpointReader) -> None:
    """Let a scheduler, restored already, know what was useful by the last pruning; on the same cluster."""
    assert isinstance(scheduler, ChunkScheduler)
    saved = reader.arrays(f"{_UTILITIES}.safetensors")
    scheduler.chunks.set_utilities(saved["utilities"], int(saved["at"][0]))


def bring(
    scheduler: Scheduler, reader: CheckpointReader, tables: list[str], state: Mapping[str, Any] | None
) -> None:
    """Let a new scheduler of another cluster know all chunks; ``state`` is the other scheduler's, if any."""
    assert isinstance(scheduler, ChunkScheduler)
    chunks, now = scheduler.chunks, int(reader.facts["step"])
    rows = _all_rows(reader, tables, chunks.settings, now)
    pruner = reader.arrays(reader.facts[saved_pruning.FACT]["file"])
    if state is None:
        chunks.take_over(rows, pruner["0.registers"], pruner["0.numbers"], now)
    else:
        chunks.restore(Saved(state).part("chunks"))
        known = chunks.rows()
        assert rows.utilities is not None
        utilities = np.zeros((int(known.numbers.max(initial=-1)) + 1, chunks.num_chunks), np.float32)
        utilities[known.numbers] = rows.utilities  # both are by (table, key), and of the same rows
        chunks.set_utilities(utilities, now)
    assert rows.present is not None
    row, place = np.nonzero(rows.present)
    chunk_tables = rows.tables[row] * chunks.num_chunks + place
    scheduler.mark_trained(chunk_tables.astype(np.int32), rows.keys[row])


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
        for parts in reader.pruned_rows(name):
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
