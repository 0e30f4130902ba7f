"""How rows are cut into chunks, and the bytes that the parts of a pruned row take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.deciding.entries import entry_words
from rowhaul.pruning.deciding.room import Sizes
from rowhaul.pruning.settings import PruneSettings

Int64s = npt.NDArray[np.int64]


def chunk_starts(num_values: int, num_chunks: int) -> Int64s:
    """Where the chunks of a row begin, and where the last one ends; sizes differ by one at most."""
    sizes = np.full(num_chunks, num_values // num_chunks, dtype=np.int64)
    sizes[: num_values % num_chunks] += 1
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@dataclass(frozen=True)
class RowCut:
    """Rows of ``num_values`` stored values in ``num_chunks`` records: values, then the optimizer's state."""

    num_values: int
    num_chunks: int
    optimizer: RowOptimizerRule
    with_state: bool = True

    @cached_property
    def starts(self) -> Int64s:
        """Where chunks begin among the stored values, and where the last one ends."""
        return chunk_starts(self.num_values, self.num_chunks)

    @cached_property
    def sizes(self) -> Int64s:
        """Values of each chunk."""
        return np.diff(self.starts)

    @cached_property
    def state_widths(self) -> Int64s:
        """Numbers of state of each chunk."""
        return np.array([self.optimizer.state_width(int(size)) * self.with_state for size in self.sizes])

    @cached_property
    def width(self) -> int:
        """Elements of the largest record."""
        return int((self.sizes + self.state_widths).max())


def part_sizes(
    num_values: int, dim: int, settings: PruneSettings, optimizer: RowOptimizerRule, dtype: npt.DTypeLike
) -> Sizes:
    """Bytes of the parts of a row of ``dim`` values, of which ``num_values`` are stored."""
    cut = RowCut(num_values, settings.chunks, optimizer)
    chunk = cut.width * np.dtype(dtype).itemsize
    return Sizes(chunk, 4 * entry_words(settings), settings.chunks, num_values / dim)
