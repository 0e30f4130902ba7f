"""Vectors made of rows, gathered or pooled, and the gradients of rows from those of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.gather_kernels import gather_rows, merge_rows
from rowhaul.database.leases import Lease
from rowhaul.database.threads import Pieces
from rowhaul.store.arena import RecordArena
from rowhaul.store.pooling import pool_rows, sum_row_gradients

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]
_ONE_COLUMN = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Vectors:
    """The rows that each vector is made of.

    Entry ``i`` is row ``inverse[i]`` of those at ``locations``. ``offsets`` cuts the entries into bags;
    without it every entry is a vector. A location ``-1 - k`` means row ``k`` of ``spare``: not stored here.
    """

    locations: Int64s  # distinct rows
    inverse: npt.NDArray[np.int32]  # entries
    offsets: Int64s | None = None
    is_mean: bool = False
    spare: Floats | None = None  # rows not stored x dim

    @property
    def num_vectors(self) -> int:
        """Number of vectors."""
        return len(self.inverse) if self.offsets is None else len(self.offsets) - 1

    @property
    def is_plain(self) -> bool:
        """Whether the vectors are the rows themselves, each once and in order."""
        # Distinct rows are in the order of their first appearance.
        return self.offsets is None and len(self.inverse) == len(self.locations)


@dataclass(frozen=True)
class Gradients:
    """Gradients of distinct records, and the lease under which the records were found."""

    lease: Lease
    group: int
    table: str | None  # of all records; None if they belong to several tables of the group
    records: Int64s
    values: Floats  # records x dim


def read_vectors(arena: RecordArena, vectors: Vectors, out: Floats, pieces: Pieces) -> None:
    """Write all vectors to ``out``, vectors x dim."""
    if not len(out):
        return
    dim, size = out.shape[1], out.itemsize
    addresses = arena.addresses  # read after the locations were found: growing replaces it
    if vectors.offsets is None and vectors.spare is None:
        inverse = vectors.inverse[:0] if vectors.is_plain else vectors.inverse

        def gather(first: int, last: int) -> None:
            gather_rows(
                addresses, arena.shift, arena.record_bytes, vectors.locations, inverse,
                first, last, dim * size, out[first:].ctypes.data,
            )  # fmt: skip

        pieces.run(len(out), dim * size, gather)
        return
    offsets = np.arange(len(out) + 1) if vectors.offsets is None else vectors.offsets
    spare_address = 0 if vectors.spare is None else vectors.spare.ctypes.data
    is_mean, no_weights = np.array([vectors.is_mean]), np.empty(0, out.dtype)

    def pool(first: int, last: int) -> None:
        some = out[first:last]
        pool_rows(
            addresses, arena.shift, arena.width, vectors.locations, spare_address, vectors.inverse,
            offsets[first : last + 1], _ONE_COLUMN, dim, is_mean, no_weights, some, some.ctypes.data,
        )  # fmt: skip

    pieces.run(len(out), dim * size * max(1, len(vectors.inverse) // len(out)), pool)


def row_gradients(vectors: Vectors, gradients: Floats) -> Floats:
    """Sum the gradients of vectors for each distinct row, in the order of the entries.

    Returns the given array itself if the vectors are the rows.
    """
    if vectors.is_plain:
        return gradients
    summed = np.empty((len(vectors.locations), gradients.shape[1]), gradients.dtype)
    offsets = np.arange(len(vectors.inverse) + 1) if vectors.offsets is None else vectors.offsets
    sum_row_gradients(
        vectors.inverse, offsets, _ONE_COLUMN, np.array([vectors.is_mean]), np.empty(0, gradients.dtype),
        gradients, gradients.ctypes.data, summed,
    )  # fmt: skip
    return summed


def sum_by_record(parts: Sequence[tuple[Int64s, Floats]]) -> tuple[Int64s, Floats]:
    """Sum (records, gradients) for each record, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    most = sum(len(records) for records, _ in parts)
    first = parts[0][1]
    distinct, sums = np.empty(most, np.int64), np.empty((most, first.shape[1]), first.dtype)
    slots = np.zeros(1 << max(4, (2 * most).bit_length()), np.int32)
    count = 0
    for records, gradients in parts:
        count = merge_rows(records, gradients, slots, count, distinct, sums)
    return distinct[:count], sums[:count]
