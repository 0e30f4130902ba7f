"""How many rows a data set will make: distinct keys by table, streamed, in 64 KiB a table.

A HyperLogLog sketch keeps, for each of 65,536 parts of the hash space, the longest run of leading zeros among
the hashes that fell into it; a key seen twice changes nothing. The estimator is Ertl's (2017, algorithm 6),
which needs no special cases for few keys. Its standard error is 1.04 / sqrt(65,536) = 0.41 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream

BITS = 16
ERROR = 1.04 / math.sqrt(1 << BITS)  # standard error of a count, as a share of it
_SAMPLES_AT_A_TIME = 1 << 16
_LONGEST = 64 - BITS + 1  # rank of a hash whose bits are all zero

Progress = Callable[[int, int], None]
"""Called with the samples done and all that are read."""


@kernel
def _raise_ranks(keys: Any, ranks: Any) -> None:
    for i in range(len(keys)):
        # The finalizer of splitmix64: every bit of the key moves every bit of the hash.
        h = np.uint64(keys[i]) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
        part = h >> np.uint64(64 - BITS)
        rest = (h << np.uint64(BITS)) | np.uint64((1 << BITS) - 1)  # ends the run of zeros at the latest
        rank = 1
        while rest < np.uint64(1 << 63):
            rest = rest << np.uint64(1)
            rank += 1
        if rank > ranks[part]:
            ranks[part] = rank


class DistinctKeys:
    """A sketch of how many different keys were added."""

    def __init__(self) -> None:
        self._ranks = np.zeros(1 << BITS, np.uint8)

    def add(self, keys: npt.NDArray[np.int64]) -> None:
        """Add keys, each as often as it occurs."""
        _raise_ranks(keys, self._ranks)

    def estimate(self) -> float:
        """About how many different ones there were."""
        parts = float(1 << BITS)
        counts = np.bincount(self._ranks, minlength=_LONGEST + 1).astype(float)
        total = parts * _tau(1 - counts[_LONGEST] / parts)
        for rank in range(_LONGEST - 1, 0, -1):
            total = 0.5 * (total + counts[rank])
        total += parts * _sigma(counts[0] / parts)
        return 0.0 if math.isinf(total) else parts * parts / (2 * math.log(2) * total)


def _sigma(x: float) -> float:
    """``x + sum over k >= 1 of x^(2^k) * 2^(k-1)``, for the parts that no key fell into."""
    if x == 1:
        return math.inf
    y, z, before = 1.0, x, -1.0
    while z != before:
        x *= x
        before = z
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    """The like for the parts whose run of zeros was as long as it can be."""
    if x in (0, 1):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x = math.sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
    return z / 3


@dataclass(frozen=True)
class RowCounts:
    """What a pass over the data has found."""

    rows: dict[str, int]  # by table, of all that will be trained
    samples: int  # that will be trained, of one epoch
    read: int  # samples read
    ids_by_table: dict[str, int]  # in the samples read

    @property
    def is_sample(self) -> bool:
        """Whether less was read than will be trained, so that ``rows`` is an extrapolation."""
        return self.read < self.samples

    @property
    def ids_per_sample(self) -> float:
        """Ids of all features together, on average."""
        return sum(self.ids_by_table.values()) / max(self.read, 1)

    @property
    def table_ids_per_sample(self) -> dict[str, float]:
        """The same by table."""
        return {name: count / max(self.read, 1) for name, count in self.ids_by_table.items()}


def count_rows(
    files: Any,
    schema: Schema,
    *,
    limit: int | None = None,
    sample: int | None = None,
    progress: Progress = lambda done, total: None,
) -> RowCounts:
    """Count the rows that training on ``files`` makes.

    Args:
        files: as `SampleStream` takes them.
        schema: whose id columns are read, and nothing else.
        limit: number of samples to train on, from the first; None: all.
        sample: number of samples to read, and to extrapolate from: of their second half a power
            law is fitted for each table (Heaps' law). New keys become rarer than it says as a
            table fills up, so this is rather too many than too few.
    """
    ids_only = Schema(label=None, dense=(), ids=schema.ids)
    available = SampleStream(files, ids_only, 1, require_label=False).num_samples
    trained = min(available, limit or available)
    to_read = min(trained, sample or trained)
    at_a_time = max(1, min(_SAMPLES_AT_A_TIME, to_read // 16))
    stream = SampleStream(files, ids_only, at_a_time, limit=to_read, require_label=False)
    sketches = {table: DistinctKeys() for table in ids_only.tables}
    half, half_read = dict.fromkeys(sketches, 0.0), 0
    by_table = dict.fromkeys(sketches, 0)
    for samples in stream:
        for column, keys in zip(ids_only.ids, samples.ids_of_features(), strict=True):
            sketches[column.table].add(keys)
            by_table[column.table] += len(keys)
        if not half_read and 2 * stream.position >= to_read:
            half_read, half = stream.position, {name: one.estimate() for name, one in sketches.items()}
        progress(stream.position, to_read)
    counted = {name: one.estimate() for name, one in sketches.items()}
    growth = {name: _power(half[name], counted[name], to_read / half_read) for name in counted}
    scale = trained / to_read
    return RowCounts(
        rows={name: round(count * scale ** growth[name]) for name, count in counted.items()},
        samples=trained,
        read=to_read,
        ids_by_table=by_table,
    )


def _power(before: float, after: float, times: float) -> float:
    """The power of growth from ``before`` to ``after`` while samples became ``times`` as many."""
    if before <= 0 or times <= 1:
        return 1.0
    return min(1.0, max(0.0, math.log(after / before) / math.log(times)))
