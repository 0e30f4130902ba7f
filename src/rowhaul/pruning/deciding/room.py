"""How rows are cut into chunks, and how much a pruned model may hold, from a ratio or a budget in bytes.

Entries cost memory too, so their number is limited as well: with a ratio ``r`` to ``sqrt(1 - r)`` of all rows
ever seen (a tenth of them at 99 %), with a budget to one for each chunk. Between prunings a full index turns
new rows away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.deciding.decision import Room
from rowhaul.pruning.deciding.entries import entry_words
from rowhaul.pruning.settings import PruneSettings

Int64s = npt.NDArray[np.int64]

# What an entry is reckoned to take in the index. Small shards are a third full once they have grown, which
# makes 47 bytes of its 16; the rest is for what every table takes, and for the last blocks of chunks and
# entries, which are not full. Beyond this many entries shards are large, and take 23 bytes each.
INDEX_BYTES = 64
_FEW_ENTRIES = 1 << 20
_INDEX_BYTES_OF_MANY = 32
# Where rows have few columns, and many of them room, at least this many entries for each of these: rows that
# come need one to show what they are worth.
_CHOICE = 1.25
# However few rows are known, this many entries are allowed: about a megabyte.
LEAST_ENTRIES = 1 << 14


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
    def widths(self) -> Int64s:
        """Elements of each chunk's record."""
        return self.sizes + self.state_widths

    @cached_property
    def width(self) -> int:
        """Elements of the largest record."""
        return int(self.widths.max())


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a pruned row."""

    chunk: int  # with its state
    entry: int
    num_chunks: int
    columns: float = 1.0  # the share of all columns that rows have by now

    @property
    def of_budgeted_chunk(self) -> int:
        """A chunk with the entry that a budget allows for it."""
        return self.chunk + self.entry + INDEX_BYTES


def part_sizes(
    num_values: int, dim: int, settings: PruneSettings, optimizer: RowOptimizerRule, dtype: npt.DTypeLike
) -> Sizes:
    """Bytes of the parts of a row of ``dim`` values, of which ``num_values`` are stored."""
    cut = RowCut(num_values, settings.chunks, optimizer)
    chunk = cut.width * np.dtype(dtype).itemsize
    return Sizes(chunk, 4 * entry_words(settings), settings.chunks, num_values / dim)


def room_for(
    settings: PruneSettings, budget: int, sizes: Sizes, num_rows: int, least_entries: int = LEAST_ENTRIES
) -> Room:
    """What may be held when ``num_rows`` different rows have been seen."""
    if settings.budget:
        affordable = budget // sizes.of_budgeted_chunk
        if affordable > _FEW_ENTRIES:
            left = budget - _FEW_ENTRIES * sizes.of_budgeted_chunk
            affordable = _FEW_ENTRIES + left // (sizes.chunk + sizes.entry + _INDEX_BYTES_OF_MANY)
        return Room(affordable, affordable, num_rows)
    kept = 1 - settings.ratio
    # A little more than nothing, so that 0.1 * 10 rows is one row although 1 - 0.9 is below 0.1.
    chunks = min(1.0, kept / sizes.columns) if settings.counts_columns else kept
    num_chunks = math.floor(chunks * sizes.num_chunks * num_rows + 1e-6)
    entries = min(1.0, max(math.sqrt(kept), _CHOICE * chunks)) if settings.counts_columns else math.sqrt(kept)
    num_entries = max(least_entries, math.ceil(entries * num_rows))
    return Room(num_chunks, num_entries, num_rows)


def check_batch(settings: PruneSettings, budget: int, sizes: Sizes, num_rows: int) -> None:
    """Refuse a budget that has no chunk for each row of one batch."""
    if settings.budget and budget // sizes.of_budgeted_chunk < num_rows:
        # These tables may have less than a byte of it.
        needed = math.ceil(num_rows * sizes.of_budgeted_chunk / max(budget, 1) * settings.budget)
        raise ConfigError(
            f"prune.budget is {settings.budget:,} bytes, but one batch reads {num_rows:,} different rows, "
            f"which take at least {needed:,} with one chunk each ({sizes.chunk} bytes and "
            f"{sizes.entry + INDEX_BYTES} to find it); raise the budget, or make batches or chunks smaller"
        )
