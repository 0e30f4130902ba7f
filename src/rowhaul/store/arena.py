"""Chunked storage for records of one width: a row's values followed by its optimizer state.

Chunks have a fixed size and are allocated one by one, so growing never copies or moves a record.
A record is known by its number; freed numbers are used again before new memory is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.store.kernels import read_records, write_records

# From this size on NumPy asks Linux for huge pages, which random reads of large tables gain from.
CHUNK_BYTES = 4 << 20
_CACHE_LINE = 64

Records = npt.NDArray[np.int64]


class OutOfMemoryError(RowhaulError, MemoryError):
    """A chunk of records could not be allocated; nothing was changed."""


class RecordArena:
    """Records of ``width`` elements of ``dtype``, addressed by number."""

    def __init__(self, width: int, dtype: npt.DTypeLike, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.width, self.dtype = width, np.dtype(dtype)
        # A chunk holds 2**shift records, so a record's chunk is its number shifted.
        self.shift = max(0, (chunk_bytes // self.record_bytes).bit_length() - 1)
        self.addresses: Records = np.empty(0, dtype=np.int64)
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._num_used = 0  # numbers handed out at least once
        self._free: Records = np.empty(0, dtype=np.int64)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy (pickle, deepcopy) has chunks of its own, at other addresses.
        self.__dict__.update(state)
        self.addresses = _addresses(self._chunks)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.width * self.dtype.itemsize

    @property
    def num_records(self) -> int:
        """Records in use."""
        return self._num_used - len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks, used or not."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def allocate(self, count: int) -> Records:
        """Numbers of ``count`` records whose contents are undefined; all or none are allocated."""
        num_reused = min(count, len(self._free))
        num_new = count - num_reused
        self._grow(self._num_used + num_new)
        self._free, reused = np.split(self._free, [len(self._free) - num_reused])
        fresh = np.arange(self._num_used, self._num_used + num_new, dtype=np.int64)
        self._num_used += num_new
        return np.concatenate([reused[::-1], fresh])

    def release(self, records: Records) -> None:
        """Give records back; their numbers are handed out again, last released first."""
        self._free = np.concatenate([self._free, records])

    def read(self, records: Records) -> npt.NDArray[Any]:
        """A copy of the given records, one a row."""
        out = np.empty((len(records), self.width), dtype=self.dtype)
        read_records(self.addresses, self.shift, records, out)
        return out

    def write(self, records: Records, contents: npt.NDArray[Any]) -> None:
        """Overwrite the given records with the rows of ``contents``."""
        contents = np.ascontiguousarray(contents, dtype=self.dtype)
        write_records(self.addresses, self.shift, records, contents)

    def _grow(self, num_records: int) -> None:
        num_chunks = (num_records + (1 << self.shift) - 1) >> self.shift
        chunk_bytes = self.record_bytes << self.shift
        try:
            more = [_aligned(chunk_bytes) for _ in range(num_chunks - len(self._chunks))]
        except MemoryError:
            raise OutOfMemoryError(
                f"no memory for {num_records:,} rows of {self.record_bytes} bytes "
                f"({self.num_records:,} are held); use a smaller embedding_dim or a larger machine"
            ) from None
        if more:
            self._chunks += more
            self.addresses = np.concatenate([self.addresses, _addresses(more)])


def _addresses(chunks: list[npt.NDArray[np.uint8]]) -> Records:
    return np.array([chunk.ctypes.data for chunk in chunks], dtype=np.int64)


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins with a cache line, so that a row of 64 bytes is one line and not two."""
    memory = np.empty(num_bytes + _CACHE_LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + num_bytes]
