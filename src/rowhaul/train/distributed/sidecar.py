"""Where rows were when a checkpoint was taken, for the same ranks to continue with the same bits.

The rows of a checkpoint are flushed, and do not say who else held them. The sidecar has the rest, a few
files a rank: the records in a worker's cache that it has not written as rows; gradients that wait for their
step, in a cache or at home; and what a home really has of rows that it has not written, or that were flushed
for the checkpoint: an older record, or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, ShardWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.errors import CheckpointError
from rowhaul.runtime.memory_snapshot import MemorySnapshot
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.keyed import locate
from rowhaul.train.deferred import DeferredWriter, Pace

PREFIX = "layout-"
CACHE, HOME = "cache", "home"
_ABSENT = "absent"
_WAITING = {CACHE: "waiting-in-cache", HOME: "waiting-at-home"}


class Piece(NamedTuple):
    """Some rows of one table that a rank holds, or some gradients of one worker."""

    kind: str
    worker: int  # whose gradients they are; 0 of records
    table: int
    keys: npt.NDArray[np.int64]
    records: npt.NDArray[Any]


def pieces(
    cache: RowMemory | None, home: RowMemory | None, flushed: RowMemory | None, num_workers: int
) -> Iterator[Piece]:
    """Yield all that a rank holds beside the rows of a checkpoint that homes have written, all flushed."""
    if cache is not None:
        for table in range(len(cache.layout.specs)):
            number, position = cache.place_of(table)
            for keys, records in cache.groups[number].blocks(position):
                yield Piece(CACHE, 0, table, keys, records)
        yield from waiting(CACHE, cache, num_workers)
    if home is not None and flushed is not None:
        yield from _unflushed(home, flushed)
        yield from waiting(HOME, home, num_workers)


def records(kind: str, snapshot: MemorySnapshot, *, marked: bool, num_tables: int) -> Iterator[Piece]:
    """Yield the rows of a snapshot that have a mark, or that have none."""
    for table in range(num_tables):
        for keys, some in snapshot.blocks(table, marked=marked):
            yield Piece(kind, 0, table, keys, some)


def absent(home: RowMemory, flushed: RowMemory) -> Iterator[Piece]:
    """Yield the flushed rows that a home has not."""
    for table in range(len(home.layout.specs)):
        number, position = home.place_of(table)
        group = home.groups[number]
        for keys, _ in flushed.groups[number].index.blocks(position):
            missing = keys[locate(group, np.full(len(keys), position), keys) < 0]
            yield Piece(_ABSENT, 0, table, missing, np.empty((0, 1), group.dtype))


def write(
    shard: ShardWriter | DeferredWriter, label: str, every: Iterable[Piece], pace: Pace = lambda: None
) -> None:
    """Write pieces into files of a size that memory has room for."""
    held: defaultdict[str, list[Piece]] = defaultdict(list)
    num_files = held_bytes = 0
    for piece in every:
        pace()
        if len(piece.keys):
            held[f"{piece.kind}.{piece.worker}.{piece.table}"].append(piece)
            held_bytes += piece.keys.nbytes + piece.records.nbytes
        if held_bytes >= shards.FILE_BYTES:
            shard.arrays(f"{PREFIX}{label}-{num_files:05d}", _joined(held))
            held_bytes, num_files = 0, num_files + 1
            held.clear()
    if held:
        shard.arrays(f"{PREFIX}{label}-{num_files:05d}", _joined(held))


def read(
    reader: CheckpointReader, names: Iterable[str], cache: RowMemory | None, home: RowMemory | None
) -> None:
    """Restore a rank's memory, whose home has the flushed rows already, to what `write` found."""
    memories = {CACHE: cache, HOME: home, _ABSENT: home}
    memories |= {_WAITING[CACHE]: cache, _WAITING[HOME]: home}
    for name in names:
        for piece in _read_pieces(reader, name):
            memory = memories.get(piece.kind)
            if memory is None or not 0 <= piece.table < len(memory.layout.specs):
                raise CheckpointError(f"{reader.path / name} is of another rank or model; use another one")
            if piece.kind in _WAITING.values():
                number, position = memory.place_of(piece.table)
                positions = np.full(len(piece.keys), position)
                memory.buffer(piece.worker, number).write(positions, piece.keys, piece.records)
            elif piece.kind == _ABSENT:
                memory.remove(np.full(len(piece.keys), piece.table), piece.keys)
            else:
                load(memory, piece.table, piece.keys, piece.records)


def load(memory: RowMemory, table: int, keys: npt.NDArray[np.int64], records: npt.NDArray[Any]) -> None:
    """Set rows of a table to the given records, as memory holds them."""
    number, position = memory.place_of(table)
    memory.groups[number].load_stored(position, np.ascontiguousarray(keys), records)


def _unflushed(home: RowMemory, flushed: RowMemory) -> Iterator[Piece]:
    """Yield what a home has of rows that were flushed, where it differs."""
    for table in range(len(home.layout.specs)):
        number, position = home.place_of(table)
        group = home.groups[number]
        for keys, records in flushed.groups[number].blocks(position):
            found = locate(group, np.full(len(keys), position), keys)
            there = np.flatnonzero(found >= 0)
            held = group.arena.read(found[there])
            differs = np.flatnonzero((_as_bytes(held) != _as_bytes(records[there])).any(axis=1))
            yield Piece(HOME, 0, table, keys[there[differs]], held[differs])
            yield Piece(_ABSENT, 0, table, keys[found < 0], records[:0])


def waiting(where: str, memory: RowMemory, num_workers: int) -> Iterator[Piece]:
    """Gradients that wait for their step."""
    if not memory.num_waiting:
        return
    group_of, position_of = memory.places
    for number in range(len(memory.groups)):
        table_at = {int(position_of[table]): int(table) for table in np.flatnonzero(group_of == number)}
        for worker in range(num_workers):
            buffer = memory.buffer(worker, number)
            for position, keys, locations in buffer.index.by_table():
                records = buffer.arena.read(locations)
                yield Piece(_WAITING[where], worker, table_at[position], keys, records)


def _joined(held: Mapping[str, list[Piece]]) -> dict[str, npt.NDArray[Any]]:
    return {
        f"{name}.{column}": np.concatenate([getattr(one, column) for one in some])
        for column in ("keys", "records")
        for name, some in held.items()
    }


def _read_pieces(reader: CheckpointReader, name: str) -> Iterator[Piece]:
    arrays = reader.arrays(name)
    for key in arrays:
        stem, _, what = key.rpartition(".")
        if what == "keys":
            kind, worker, table = stem.split(".")
            yield Piece(kind, int(worker), int(table), arrays[key], arrays[f"{stem}.records"])


def _as_bytes(records: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Compared so, what is no number equals itself."""
    return np.ascontiguousarray(records).view(np.uint8)
