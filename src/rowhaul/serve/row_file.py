"""The file that rows are served from: mapped into memory, so that opening it reads next to nothing.

All numbers are little-endian; every part begins at a multiple of 64 bytes. The file begins with 8 numbers of
8 bytes (`HEADER`), then come 32 of them for each table (`FIELDS`, the rest zeros), then the tables' names.

Rows that are found by key are grouped into buckets by a hash of the key. Bucket ``b`` has the rows
``starts[b]`` to ``starts[b + 1]``; ``keys`` has their keys, in order within a bucket. Record ``i`` is at
``records_at + i * record_bytes`` or, where records differ in size (``record_bytes`` is 0), at
``records_at + offsets[i]``. Rows that ids share (`rowhaul.budget`) are found by slot instead.

docs/row-file.md describes it for readers in other languages. A published change of some rows is a file of the
same kind, looked up before this one; it has the keys of deleted rows, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rowhaul.errors import CheckpointError, ConfigError

MAGIC = int.from_bytes(b"RowhaulR", "little")
VERSION = 1
HEADER = ("magic", "version", "num_tables", "file_bytes", "step", "header_bytes", "reserved", "checksum")
FIELDS = (
    *("name_at", "name_bytes", "dim", "value_type", "record_bytes", "num_rows", "records_at"),
    *("finds_by", "hash_seed", "num_buckets"),
    *("starts_at", "keys_at", "offsets_at"),  # found by key
    *("num_chunks", "chunk_starts_at", "columns_at", "num_columns"),  # rows in chunks
    *("marks_at", "owners_at", "owner_bytes", "position", "first_shared", "num_shared"),  # found by slot
    *("unknown", "initial_seed", "initial_low", "initial_step"),  # the last two are float64
    *("num_deleted", "deleted_at"),  # of a change: keys that have no row any more
)
ENTRY = 32  # numbers of a table
ALIGN = 64
VALUE_TYPES = ("float32", "float64", "bfloat16", "float16", "int8")
BY_KEY, BY_SLOT = 0, 1
UNKNOWN = ("default", "init", "error")  # what ids without a row read: zeros, first values, or nothing
BUCKET_ROWS = 4  # rows of a bucket, on average
SLOTS = 8  # of a bucket of slots
FIELD = {name: place for place, name in enumerate(FIELDS)}

_INSTEAD = "export again"


class RowFile:
    """An open file of rows.

    Args:
        path: of the file.
        expected: its checksum of the header, where a manifest knows it.

    Raises:
        CheckpointError: the file is missing, cut off, damaged, or no such file.
    """

    def __init__(self, path: str | Path, expected: str | None = None) -> None:
        self.path = Path(path)
        try:
            self.data: npt.NDArray[np.uint8] = np.frombuffer(_mapped(self.path), np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {_INSTEAD}") from None
        self._check(expected)
        words = self.data[: self._header["header_bytes"]].view(np.int64)
        first, count = len(HEADER), self._header["num_tables"]
        self.entries: npt.NDArray[np.int64] = (
            words[first : first + ENTRY * count].reshape(count, ENTRY).copy()
        )
        self.tables: dict[str, int] = {self._name(entry): row for row, entry in enumerate(self.entries)}

    @property
    def address(self) -> int:
        """Where the file begins in memory."""
        return int(self.data.ctypes.data)

    @property
    def step(self) -> int:
        """Training steps behind these rows."""
        return int(self._header["step"])

    def field(self, table: str, name: str) -> int:
        """Return a number of a table's entry."""
        return int(self.entries[self.tables[table], FIELD[name]])

    def value_type(self, table: str) -> str:
        """Return what a table's values are stored in."""
        return VALUE_TYPES[self.field(table, "value_type")]

    def keys(self, table: str) -> npt.NDArray[np.int64]:
        """Return the keys of a table whose rows are found by key."""
        return self._numbers(table, "keys_at", self.field(table, "num_rows"))

    def deleted(self, table: str) -> npt.NDArray[np.int64]:
        """Return the keys that a change deletes."""
        return self._numbers(table, "deleted_at", self.field(table, "num_deleted"))

    def offsets(self, table: str) -> npt.NDArray[np.int64]:
        """Return where the record of each key begins, counted from the first one's."""
        size, count = self.field(table, "record_bytes"), self.field(table, "num_rows")
        return np.arange(count) * size if size else self._numbers(table, "offsets_at", count + 1)[:-1]

    def bucket_starts(self, table: str) -> npt.NDArray[np.int64]:
        """Return the first row of each bucket, and the number of rows."""
        return self._numbers(table, "starts_at", self.field(table, "num_buckets") + 1)

    def _numbers(self, table: str, place: str, count: int) -> npt.NDArray[np.int64]:
        begin = self.field(table, place)
        return self.data[begin : begin + 8 * count].view(np.int64)

    def _name(self, entry: npt.NDArray[np.int64]) -> str:
        begin, size = int(entry[FIELD["name_at"]]), int(entry[FIELD["name_bytes"]])
        return self.data[begin : begin + size].tobytes().decode("utf-8")

    def _check(self, expected: str | None) -> None:
        size, least = len(self.data), 8 * len(HEADER)
        if size < least:
            raise CheckpointError(f"{self.path} is damaged: it has {size:,} bytes; {_INSTEAD}")
        values = self.data[:least].view(np.uint64).tolist()
        self._header = dict(zip(HEADER, values, strict=True))
        if self._header["magic"] != MAGIC:
            raise CheckpointError(f"{self.path} is no file of rows to serve from; {_INSTEAD}")
        if self._header["version"] != VERSION:
            raise CheckpointError(
                f"{self.path}: version {self._header['version']}, but this Rowhaul reads version {VERSION}; "
                f"{_INSTEAD}"
            )
        if self._header["file_bytes"] != size:
            raise CheckpointError(
                f"{self.path} is damaged: it has {size:,} bytes, and its header says "
                f"{self._header['file_bytes']:,}; {_INSTEAD}"
            )
        if not least <= self._header["header_bytes"] <= size:
            raise CheckpointError(f"{self.path} is damaged: its header does not fit; {_INSTEAD}")
        found = header_checksum(self.data[: self._header["header_bytes"]])
        if found != self._header["checksum"]:
            raise CheckpointError(f"{self.path} is damaged: its header has another checksum; {_INSTEAD}")
        if expected is not None and expected != f"{found:016x}":
            raise CheckpointError(
                f"{self.path} belongs to another export: its header has the checksum {found:016x}, the "
                f"manifest says {expected}; {_INSTEAD}"
            )


def _mapped(path: Path) -> pa.Buffer:
    """Map a file without keeping it open: a server has one for each delta and rank, more than it may open.

    Python's own maps keep a descriptor before 3.13.
    """
    with pa.memory_map(str(path)) as file:
        if not file.size():
            raise CheckpointError(f"{path} is empty; {_INSTEAD}")
        return file.read_buffer(1).parent  # reading all of it would have the system fetch it from the disk


def header_checksum(header: npt.NDArray[np.uint8]) -> int:
    """Return XXH3 (64 bits) of a header but for the checksum in it."""
    place = 8 * HEADER.index("checksum")
    digest = xxhash.xxh3_64(header[:place].tobytes())
    digest.update(header[place + 8 :].tobytes())
    return digest.intdigest()


def entry_of(numbers: Mapping[str, int | float]) -> npt.NDArray[np.uint64]:
    """Return the entry of a table, given its numbers by name; those left out are 0."""
    entry = np.zeros(ENTRY, np.uint64)
    for name, value in numbers.items():
        word: Any = np.float64(value).view(np.uint64) if isinstance(value, float) else value
        entry[FIELD[name]] = word
    return entry


def unknown_mode(on_unknown: str) -> int:
    """Return the number of what ids without a row read; the tail of whole rows is their first values."""
    known = (*UNKNOWN, "tail")
    if on_unknown not in known:
        raise ConfigError(f"on_unknown must be one of {', '.join(known)}, got {on_unknown!r}")
    return UNKNOWN.index("init" if on_unknown == "tail" else on_unknown)


def aligned(place: int) -> int:
    """Return the next place at which a part may begin."""
    return -(-place // ALIGN) * ALIGN
