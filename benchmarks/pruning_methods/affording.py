"""How much of the rows methods can keep for so many bytes in all: of values, state, entries and index."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pruning_methods.mixed import popularity_dims
from rowhaul.errors import ConfigError
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.deciding.room import LEAST_ENTRIES, part_sizes, room_for
from rowhaul.pruning.pool.collection import PrunedRows

Counts = npt.NDArray[np.int64]

# What the index takes for a table, and for a key of it: shards of small tables are a third full.
_TABLE_BYTES, _KEY_BYTES, _KEY_BYTES_OF_MANY = 4352, 47.0, 23.5
_MANY = 4300


def index_bytes(num_keys: Counts | npt.NDArray[np.float64]) -> float:
    """Bytes of an index with so many keys by table."""
    by_key = np.where(num_keys < _MANY, _KEY_BYTES, _KEY_BYTES_OF_MANY)
    return float(_TABLE_BYTES * len(num_keys) + by_key @ num_keys)


def pruned_ratio(
    settings: PruneSettings, dim: int, rule: RowOptimizerRule, num_rows: Counts, budget: int
) -> float:
    """The smallest ratio with which pruned rows of ``dim`` take no more than ``budget`` bytes.

    However few rows there are, none is tracked beyond the share that the ratio allows: see `limit_entries`.
    """
    sizes = part_sizes(settings.dims or dim, dim, settings, rule, np.float32)
    total = int(num_rows.sum())

    def bytes_of(kept: float) -> float:
        room = room_for(replace(settings, ratio=1 - kept), 0, sizes, total, least_entries=1)
        num_entries = min(room.num_entries, total)
        return (
            room.num_chunks * sizes.chunk
            + num_entries * sizes.entry
            + index_bytes(num_rows * (num_entries / total))
        )

    return 1 - affordable(bytes_of, budget)


def limit_entries(rows: PrunedRows, num_rows: Counts) -> None:
    """Track no more rows than the ratio allows for ``num_rows``, where a library would always track some.

    Logs here are small: entries of 16,384 rows, which are always allowed, can be more than a whole budget.
    """
    most = math.ceil(math.sqrt(1 - rows.settings.ratio) * int(num_rows.sum()))
    for tables in rows.tables:
        tables.map._least_entries = min(most, LEAST_ENTRIES)


def mixed_dims(
    num_rows: Counts, num_reads: Counts, dim: int, rule: RowOptimizerRule, budget: int
) -> list[int]:
    """Row sizes by table with which mixed dimensions take no more than ``budget`` bytes."""

    def bytes_of(kept: float) -> float:
        dims = popularity_dims(num_rows, num_reads, dim, kept)
        states = [rule.state_width(size) for size in dims]
        projections = sum(4 * size * dim for size in dims if size < dim)
        return 4 * float((np.array(dims) + states) @ num_rows) + index_bytes(num_rows) + projections

    return popularity_dims(num_rows, num_reads, dim, affordable(bytes_of, budget))


def affordable(bytes_of: Callable[[float], float], budget: int) -> float:
    """The largest share of the values that costs no more than ``budget``; an error where none does."""
    low, high = 1e-4, 1.0
    if bytes_of(low) > budget:
        raise ConfigError(f"the least takes {bytes_of(low):,.0f} bytes, but the budget is {budget:,}")
    for _ in range(40):
        middle = (low + high) / 2
        if bytes_of(middle) <= budget:
            low = middle
        else:
            high = middle
    return low
