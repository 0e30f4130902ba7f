"""Chunked storage for records of one width: a row's values followed by its optimizer state.

Chunks have a fixed size and are allocated one by one, so growing never copies or moves a record.
A record is known by its number; freed numbers are used again before new memory is touched.

Records may be allocated and released in several threads. Growing replaces the array of chunk addresses, whose
beginning never changes: who takes it after the records' numbers finds them all.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.store.records import gather_bytes, read_records, scatter_bytes, write_records

CHUNK_BYTES = 4 << 20
# Chunks of a large arena are cut from slabs that Linux backs with huge pages: random steps over a large table
# are half as fast again. Of these a row takes a whole one, so small arenas, of which there may be hundreds,
# have none. A slab is a quarter of its arena at most: its memory is given back when all its chunks are.
_SLAB_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_SMALL_BYTES = 4 * _HUGE_PAGE
_SMALL_SLAB_BYTES = 1 << 16
_CACHE_LINE = 64

Records = npt.NDArray[np.int64]


class OutOfMemoryError(RowhaulError, MemoryError):
    """A chunk of records could not be allocated; nothing was changed."""


class Keeper(Protocol):
    """Copies records before they change: a snapshot that is being written; see `GroupSnapshot`."""

    def keep(self, records: Records) -> None:
        """Copy records that are about to change."""

    def keep_removed(self, tables: Records, keys: Records, records: Records) -> None:
        """Copy records whose keys were removed, before their numbers are used again."""


class RecordArena:
    """Records of ``width`` elements of ``dtype``, addressed by number."""

    def __init__(self, width: int, dtype: npt.DTypeLike, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.width, self.dtype = width, np.dtype(dtype)
        # A chunk holds 2**shift records, so a record's chunk is its number shifted.
        self.shift = max(0, (chunk_bytes // self.record_bytes).bit_length() - 1)
        self.addresses: Records = np.empty(0, dtype=np.int64)
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._uncut: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)  # rest of the last slab
        self._num_used = 0  # numbers handed out at least once
        self._free: Records = np.empty(0, dtype=np.int64)  # a stack, of which the first ones count
        self._num_free = 0
        self._lock = threading.Lock()
        self.keeper: Keeper | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_lock", "_uncut", "keeper")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy (pickle, deepcopy) has chunks of its own, at other addresses.
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._uncut = np.empty(0, dtype=np.uint8)
        self.keeper = None
        self.addresses = _addresses(self._chunks)

    def new(self) -> RecordArena:
        """Return an arena of the same kind without records."""
        return RecordArena(self.width, self.dtype)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.width * self.dtype.itemsize

    @property
    def num_records(self) -> int:
        """Records in use."""
        return self._num_used - self._num_free

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks, used or not."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def allocate(self, count: int) -> Records:
        """Numbers of ``count`` records whose contents are undefined; all or none are allocated."""
        with self._lock:
            num_reused = min(count, self._num_free)
            num_new = count - num_reused
            self._grow(self._num_used + num_new)
            records = np.empty(count, dtype=np.int64)
            records[:num_reused] = self._free[self._num_free - num_reused : self._num_free][::-1]
            records[num_reused:] = np.arange(self._num_used, self._num_used + num_new)
            self._num_free -= num_reused
            self._num_used += num_new
            return records

    def release(self, records: Records) -> None:
        """Give records back; their numbers are handed out again, last released first."""
        with self._lock:
            end = self._num_free + len(records)
            if end > len(self._free):  # by half, so that each number is copied a few times at most
                grown = np.empty(max(end, 3 * len(self._free) // 2), dtype=np.int64)
                grown[: self._num_free] = self._free[: self._num_free]
                self._free = grown
            self._free[self._num_free : end] = records
            self._num_free = end

    def read(self, records: Records) -> npt.NDArray[Any]:
        """A copy of the given records, one a row."""
        out = np.empty((len(records), self.width), dtype=self.dtype)
        read_records(self.addresses, self.shift, records, out)
        return out

    def write(self, records: Records, contents: npt.NDArray[Any]) -> None:
        """Overwrite the given records with the rows of ``contents``."""
        self.before_change(records)
        contents = np.ascontiguousarray(contents, dtype=self.dtype)
        write_records(self.addresses, self.shift, records, contents)

    def copy_out(
        self, records: Records, lengths: Records, offsets: Records, out: npt.NDArray[np.uint8]
    ) -> None:
        """Copy the first bytes of each record to its offset in ``out``."""
        gather_bytes(
            self.addresses, self.shift, self.record_bytes, records, lengths, offsets, out.ctypes.data
        )

    def copy_in(
        self, records: Records, lengths: Records, offsets: Records, given: npt.NDArray[np.uint8]
    ) -> None:
        """Overwrite the first bytes of each record with those at its offset in ``given``."""
        scatter_bytes(
            self.addresses, self.shift, self.record_bytes, records, lengths, offsets, given.ctypes.data
        )

    def before_change(self, records: Records) -> None:
        """Call this before records are changed in place, other than by `write`."""
        if self.keeper is not None:
            self.keeper.keep(records)

    def used(self) -> tuple[int, Records]:
        """Return how many numbers were ever handed out, and which of them are free now."""
        with self._lock:
            return self._num_used, self._free[: self._num_free].copy()

    def _grow(self, num_records: int) -> None:
        num_chunks = (num_records + (1 << self.shift) - 1) >> self.shift
        chunk_bytes, uncut = self.record_bytes << self.shift, self._uncut
        try:
            more = [self._cut(chunk_bytes, num_chunks) for _ in range(num_chunks - len(self._chunks))]
        except (MemoryError, OSError, OverflowError):
            self._uncut = uncut
            raise OutOfMemoryError(
                f"no memory for {num_records:,} rows of {self.record_bytes} bytes "
                f"({self.num_records:,} are held); use a smaller embedding_dim or a larger machine"
            ) from None
        if more:
            self._chunks += more
            self.addresses = np.concatenate([self.addresses, _addresses(more)])

    def _cut(self, num_bytes: int, num_chunks: int) -> npt.NDArray[np.uint8]:
        """Allocate a chunk; it begins with a cache line, so that a row of 64 bytes does not straddle two."""
        stride = num_bytes + -num_bytes % _CACHE_LINE
        if len(self._uncut) < stride:
            is_small = stride * num_chunks <= _SMALL_BYTES
            size = _SMALL_SLAB_BYTES if is_small else min(stride * num_chunks // 4, _SLAB_BYTES)
            self._uncut = self._new_slab(max(1, size // stride) * stride, huge_pages=not is_small)
        chunk, self._uncut = self._uncut[:num_bytes], self._uncut[stride:]
        return chunk

    def _new_slab(self, num_bytes: int, *, huge_pages: bool) -> npt.NDArray[np.uint8]:
        return _slab(num_bytes, huge_pages=huge_pages)


class FixedArena(RecordArena):
    """As many records as are given, in one piece that neither grows nor shrinks; all are in use."""

    def __init__(self, num_records: int, width: int, dtype: npt.DTypeLike) -> None:
        super().__init__(width, dtype)
        self.shift = 62  # every number is in the first chunk
        try:
            self._chunks = [self._cut(num_records * self.record_bytes, 1)]
        except (MemoryError, OSError, OverflowError):
            raise OutOfMemoryError(
                f"no memory for {num_records:,} rows of {self.record_bytes} bytes; use a smaller budget"
            ) from None
        self._num_used = num_records
        self.addresses = _addresses(self._chunks)


def _addresses(chunks: list[npt.NDArray[np.uint8]]) -> Records:
    return np.array([chunk.ctypes.data for chunk in chunks], dtype=np.int64)


def _slab(num_bytes: int, *, huge_pages: bool) -> npt.NDArray[np.uint8]:
    """Memory that is not there until it is touched, whole pages of it; private: shared has no huge ones."""
    alignment = _HUGE_PAGE if huge_pages else 1
    memory = mmap.mmap(-1, num_bytes + alignment - 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    first = -array.ctypes.data % alignment
    return array[first : first + num_bytes]
