"""The memory that pruned rows share: chunks of one size, never more than there is room for.

A chunk is a small record, its values followed by the optimizer's state for so many, so row optimizers step
chunks as they step rows. Freed chunks are used again at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.store.arena import RecordArena

Int64s = npt.NDArray[np.int64]

# Blocks of the pool and of the entries: small enough not to matter beside a pruned table.
BLOCK_BYTES = 1 << 16


def chunk_starts(num_values: int, num_chunks: int) -> Int64s:
    """Where the chunks of a row begin, and where the last one ends; sizes differ by one at most."""
    sizes = np.full(num_chunks, num_values // num_chunks, dtype=np.int64)
    sizes[: num_values % num_chunks] += 1
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


class ChunkArena(RecordArena):
    """Records that can become narrower where they are."""

    def __init__(self, width: int, dtype: npt.DTypeLike) -> None:
        super().__init__(width, dtype, BLOCK_BYTES)

    def narrowed(self, width: int) -> ChunkArena:
        """The first ``width`` elements of every record under the number it had; this one is empty then.

        Blocks are given back as they are copied, so both together never take more than this one did.
        """
        other = ChunkArena(width, self.dtype)
        other._num_used = self._num_used
        other.release(self._free[: self._num_free])
        per_block = 1 << self.shift
        for first in range(0, self._num_used, per_block):
            numbers = np.arange(first, min(first + per_block, self._num_used))
            contents = self.read(numbers)[:, :width]
            self._chunks[first >> self.shift] = np.empty(0, dtype=np.uint8)
            other._grow(int(numbers[-1]) + 1)
            other.write(numbers, contents)
        return other

    def sort_free(self) -> None:
        """Hand out free numbers in ascending order from now on: chunks of a row then lie side by side."""
        with self._lock:
            self._free[: self._num_free] = np.sort(self._free[: self._num_free])[::-1]


class ChunkPool:
    """Chunks for rows of ``num_values`` values in ``num_chunks`` pieces; at most ``capacity`` at a time."""

    def __init__(
        self, num_values: int, num_chunks: int, optimizer: RowOptimizerRule, dtype: npt.DTypeLike
    ) -> None:
        self.optimizer = optimizer
        self.has_state = True  # no longer once it only serves
        self.capacity = 0
        self._cut(num_values, num_chunks)
        self.arena = ChunkArena(self._width, dtype)

    @property
    def num_chunks(self) -> int:
        """Pieces of a row."""
        return len(self.sizes)

    @property
    def num_values(self) -> int:
        """Values of a row that are stored."""
        return int(self.starts[-1])

    @property
    def num_used(self) -> int:
        """Chunks in use."""
        return self.arena.num_records

    @property
    def num_free(self) -> int:
        """Chunks that may still be taken."""
        return max(0, self.capacity - self.num_used)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk with its state."""
        return self.arena.record_bytes

    def clear(self, num_values: int) -> None:
        """Forget every chunk, and cut rows of so many values."""
        self._cut(num_values, self.num_chunks)
        self.arena = ChunkArena(self._width, self.arena.dtype)

    def narrow(self, num_values: int) -> None:
        """Cut rows of fewer values into as many chunks; their records are in place already."""
        self._cut(num_values, self.num_chunks)
        self.arena = self.arena.narrowed(self._width)

    def drop_state(self) -> None:
        """Keep values alone: chunks can be read and no longer trained."""
        self.has_state = False
        self._cut(self.num_values, self.num_chunks)
        self.arena = self.arena.narrowed(self._width)

    def take(self, count: int) -> Int64s:
        """Numbers of ``count`` chunks, which must be free."""
        assert count <= self.num_free, f"{count} chunks asked for, {self.num_free} are free"
        return self.arena.allocate(count)

    def give_back(self, numbers: Int64s) -> None:
        """Free chunks for whoever comes next."""
        self.arena.release(numbers)

    def _cut(self, num_values: int, num_chunks: int) -> None:
        self.starts = chunk_starts(num_values, num_chunks)
        self.sizes: Int64s = np.diff(self.starts)
        state_width = self.optimizer.state_width if self.has_state else lambda size: 0
        self.state_widths: Int64s = np.array([state_width(int(size)) for size in self.sizes])
        self._width = int((self.sizes + self.state_widths).max())
