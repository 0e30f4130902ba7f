"""Writing the file that rows are served from; what is in it: `rowhaul.serve.row_file`.

Keys come first: they are counted by bucket, put in their places, and then say where each record goes. Memory
holds 10 bytes a row of one table; records pass through in blocks, into the mapped file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rowhaul._files import sync
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.serve.lookup_kernels import copy_records, count_buckets, place_keys, rows_of_keys
from rowhaul.serve.row_file import (
    BUCKET_ROWS,
    BY_KEY,
    BY_SLOT,
    ENTRY,
    HEADER,
    MAGIC,
    SLOTS,
    VALUE_TYPES,
    VERSION,
    aligned,
    entry_of,
    header_checksum,
    unknown_mode,
)
from rowhaul.store import TableSpec
from rowhaul.store.served_rows import ServedRows, SlotPlaces
from rowhaul.store.tables import table_seeds

Int64s = npt.NDArray[np.int64]
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # of file systems
_ZEROS = 1 << 20  # bytes written at a time


@dataclass(frozen=True)
class UnknownIds:
    """What ids without a row read: see `on_unknown` of `EmbeddingBagCollection`."""

    on_unknown: str
    seed: int
    specs: Mapping[str, TableSpec]  # with the range of first values

    def numbers(self, table: str, rows: ServedRows) -> dict[str, int | float]:
        """Return what a table's entry says of them."""
        spec = self.specs[table]
        mode = "default" if rows.unknown_is_zero else self.on_unknown
        return {
            "unknown": unknown_mode(mode),
            "initial_seed": int(table_seeds([table], self.seed)[0]),
            "initial_low": float(spec.initial_low),
            "initial_step": float((spec.initial_high - spec.initial_low) / 2**24),
        }


class _Room:
    """Where the next part of a file goes."""

    def __init__(self, begin: int) -> None:
        self.end = begin

    def take(self, size: int) -> int:
        begin = aligned(self.end)
        self.end = begin + size
        return begin


class _KeyTable:
    """A table whose rows are found by key."""

    def __init__(self, rows: ServedRows, room: _Room) -> None:
        self._rows = rows
        self._seed = np.uint64(int.from_bytes(os.urandom(8), "little"))  # nobody can aim at a bucket
        num_buckets = max(1, -(-rows.num_rows // BUCKET_ROWS))
        counts = np.zeros(num_buckets, np.int64)
        for keys in rows.key_blocks():
            count_buckets(keys, self._seed, counts)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._keys = np.empty(rows.num_rows, np.int64)
        num_placed = np.zeros(num_buckets, np.int64)
        for keys in rows.key_blocks():
            place_keys(keys, self._seed, self._starts, num_placed, self._keys)
        self._offsets = np.empty(0, np.int64)
        if not rows.record_bytes:
            lengths = np.zeros(rows.num_rows, np.int64)
            for block in rows.record_blocks():
                lengths[self._rows_of(block.keys)] = block.lengths
            self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        size = int(self._offsets[-1]) if len(self._offsets) else rows.num_rows * rows.record_bytes
        self.numbers = {
            "finds_by": BY_KEY,
            "hash_seed": int(self._seed),
            "num_buckets": num_buckets,
            "starts_at": room.take(self._starts.nbytes),
            "keys_at": room.take(self._keys.nbytes),
            "offsets_at": room.take(self._offsets.nbytes),
            "records_at": room.take(size),
        }

    def _rows_of(self, keys: Int64s) -> Int64s:
        found = np.empty(len(keys), np.int64)
        rows_of_keys(keys, self._seed, self._starts, self._keys, found)
        return found

    def write(self, data: mmap.mmap, count: Counter) -> None:
        """Fill this table's part of a file."""
        for place, array in (
            ("starts_at", self._starts),
            ("keys_at", self._keys),
            ("offsets_at", self._offsets),
        ):
            _put(data, self.numbers[place], array)
        num_written = 0
        for block in self._rows.record_blocks():
            rows = self._rows_of(block.keys)
            places = rows * self._rows.record_bytes if self._rows.record_bytes else self._offsets[rows]
            copy_records(_address(data) + self.numbers["records_at"], places, block.lengths, block.data)
            num_written += len(rows)
            count.add(len(rows))
        if num_written != self._rows.num_rows:
            raise CheckpointError(
                f"{num_written:,} rows were read of {self._rows.num_rows:,}; nothing was kept"
            )


class _SlotMap:
    """The rows of all tables of one size that ids share."""

    def __init__(self, places: SlotPlaces, num_shared: int, record_bytes: int, room: _Room) -> None:
        self._marks, self._owners = places.marks, places.owners
        self.numbers = {
            "finds_by": BY_SLOT,
            "num_buckets": len(places.marks) // SLOTS,
            "marks_at": room.take(places.marks.nbytes),
            "owners_at": room.take(places.owners.nbytes),
            "owner_bytes": places.owners.itemsize,
            "records_at": room.take((len(places.marks) + num_shared) * record_bytes),
        }

    def write(self, data: mmap.mmap) -> None:
        """Write who has slots."""
        _put(data, self.numbers["marks_at"], self._marks)
        _put(data, self.numbers["owners_at"], self._owners)


class _SlotTable:
    """A table whose rows ids share."""

    def __init__(self, rows: ServedRows, places: SlotPlaces, shared: _SlotMap) -> None:
        self._rows, self._places = rows, places
        own = {"position": places.position, "first_shared": places.first_shared}
        own |= {"num_shared": places.num_shared, "hash_seed": places.seed}
        self.numbers = {**shared.numbers, **own}

    def write(self, data: mmap.mmap, count: Counter) -> None:
        """Fill this table's part of a file."""
        first = len(self._places.marks) + self._places.first_shared
        for block in self._rows.record_blocks():
            rows = np.where(block.keys >= 0, block.keys, first - 1 - block.keys)
            places = rows * self._rows.record_bytes
            copy_records(_address(data) + self.numbers["records_at"], places, block.lengths, block.data)
            count.add(len(rows))


def write_rows(
    reader: CheckpointReader,
    tables: Sequence[str],
    unknown: UnknownIds,
    path: Path,
    step: int,
    count: Counter,
) -> str:
    """Write the tables of a checkpoint to a new file; returns the checksum of its header."""
    rows = {table: reader.format(table).served_rows(reader, table) for table in tables}
    return write_row_file(rows, {one: unknown.numbers(one, rows[one]) for one in tables}, path, step, count)


def write_row_file(
    tables: Mapping[str, ServedRows],
    unknown: Mapping[str, Mapping[str, int | float]],
    path: Path,
    step: int,
    count: Counter,
) -> str:
    """Write tables to a new file; ``unknown`` has the numbers of each on ids without a row."""
    names = [table.encode() for table in tables]
    begin = 8 * len(HEADER) + 8 * ENTRY * len(tables)
    room = _Room(begin + sum(map(len, names)))
    header_bytes = aligned(room.end)
    maps: dict[tuple[str, ...], _SlotMap] = {}
    parts: list[_KeyTable | _SlotTable] = []
    apart: list[tuple[int, npt.NDArray[Any]]] = []
    entries = []
    for number, (table, rows) in enumerate(tables.items()):
        part = _part(rows, maps, room)
        numbers: dict[str, int | float] = {
            "name_at": begin + sum(map(len, names[:number])),
            "name_bytes": len(names[number]),
            "dim": rows.dim,
            "value_type": VALUE_TYPES.index(rows.value_type),
            "record_bytes": rows.record_bytes,
            "num_rows": rows.num_rows,
            **part.numbers,
            **unknown[table],
        }
        if rows.cut is not None:
            places = [room.take(array.nbytes) for array in rows.cut]
            apart += zip(places, rows.cut, strict=True)
            numbers |= {"num_chunks": len(rows.cut.starts) - 1, "num_columns": len(rows.cut.columns)}
            numbers |= dict(zip(("chunk_starts_at", "columns_at"), places, strict=True))
        if rows.deleted is not None and rows.num_deleted:
            numbers |= {"num_deleted": len(rows.deleted), "deleted_at": room.take(rows.deleted.nbytes)}
            apart.append((int(numbers["deleted_at"]), rows.deleted))
        parts.append(part)
        entries.append(entry_of(numbers))
    size = aligned(room.end)
    header = np.zeros(header_bytes, np.uint8)
    values = dict.fromkeys(HEADER, 0) | {"magic": MAGIC, "version": VERSION, "num_tables": len(tables)}
    values |= {"file_bytes": size, "step": step, "header_bytes": header_bytes}
    _put(header, 0, np.array([values[name] for name in HEADER], np.uint64))
    _put(header, 8 * len(HEADER), np.concatenate(entries))
    _put(header, begin, np.frombuffer(b"".join(names), np.uint8))
    checksum = header_checksum(header)
    _put(header, 8 * HEADER.index("checksum"), np.array([checksum], np.uint64))
    with _new_map(path, size) as data:
        _put(data, 0, header)
        for place, array in apart:
            _put(data, place, array)
        for one in maps.values():
            one.write(data)
        for part in parts:
            part.write(data, count)
    sync(path)
    return f"{checksum:016x}"


def _part(rows: ServedRows, maps: dict[tuple[str, ...], _SlotMap], room: _Room) -> _KeyTable | _SlotTable:
    places = rows.slots
    if places is None:
        return _KeyTable(rows, room)
    if places.tables not in maps:
        maps[places.tables] = _SlotMap(places, places.all_shared, rows.record_bytes, room)
    return _SlotTable(rows, places, maps[places.tables])


@contextmanager
def _new_map(path: Path, size: int) -> Iterator[mmap.mmap]:
    """Map a new file of a size; where writing it fails it is removed, since a full disk needs the room."""
    with path.open("wb+") as file:
        try:
            _reserve(file, size)
            with mmap.mmap(file.fileno(), size) as mapped:
                yield mapped
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _reserve(file: BinaryIO, size: int) -> None:
    """Give a new file its place on the disk.

    Without one, a full disk would not be an error but a bus error, in the middle of writing to the map.
    """
    try:
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, size)
            return
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            error.filename = file.name
            raise
    zeros = memoryview(bytes(_ZEROS))
    for first in range(0, size, _ZEROS):
        file.write(zeros[: size - first])
    file.flush()


def _put(data: mmap.mmap | npt.NDArray[np.uint8], place: int, array: npt.NDArray[Any]) -> None:
    # A view of a map gets no name: the frames of an error would keep it, and the map could not be closed.
    of_array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    np.frombuffer(data, np.uint8)[place : place + array.nbytes] = of_array


def _address(data: mmap.mmap) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
