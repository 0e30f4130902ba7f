"""Divide what a request reads by the ranks that store it.

A rank sends rows as they are or, if fewer sums than rows would travel, sums of the rows that it stores of a
bag. The requesting rank treats both alike: each of its vectors is a sum of some that arrive, and its gradient
goes to each of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.routing_kernels import count_bags, find_owners, gather_bags, sort_by_rank
from rowhaul.database.rows import Rows
from rowhaul.database.tickets import GroupRequest

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Division:
    """The keys of a request by rank, and the vectors that arrive from each rank."""

    order: Int64s  # the keys, rank by rank, and table by table within
    counts: Int64s  # ranks x tables: keys
    row_bounds: Int64s  # ranks + 1, of the keys in that order
    bounds: Int64s  # ranks + 1, of the vectors that arrive
    inverse: Int32s  # entries: which of the vectors that arrive
    offsets: Int64s  # vectors + 1: the entries of each requested vector
    bags: list[tuple[Int32s, Int32s]]  # by rank: keys to sum, and the number of keys in each sum; or nothing

    def of_rank(self, rank: int) -> Int64s:
        """The positions of the keys that a rank is asked for."""
        return self.order[self.row_bounds[rank] : self.row_bounds[rank + 1]]


def owners_of(keys: Int64s, num_ranks: int) -> Int64s:
    """The rank that knows where each key's row is."""
    owners = np.empty(len(keys), np.int64)
    find_owners(keys, num_ranks, owners)
    return owners


def divide(rows: Rows, asked: GroupRequest, ranks: Int64s, num_ranks: int, own: int | None) -> Division:
    """Divide a request by the rank of each key.

    Args:
        rows: the tables.
        asked: what is requested of a group of tables.
        ranks: of each key.
        num_ranks: of the database.
        own: this rank, whose rows are never summed; None if no rank is to sum any.
    """
    num_keys = len(asked.keys.values)
    counts = np.zeros((num_ranks, len(asked.keys.starts) - 1), np.int64)
    row_bounds = np.zeros(num_ranks + 1, np.int64)
    order, places = np.empty(num_keys, np.int64), np.empty(num_keys, np.int32)
    sort_by_rank(ranks, asked.keys.starts, counts, row_bounds, order, places)
    entry_offsets = _entry_offsets(asked)
    firsts = np.zeros(len(asked.keys.starts), np.int64)  # where each table's vectors begin
    firsts[asked.tables + 1] = [part.num_vectors for part in asked.parts]
    np.cumsum(firsts, out=firsts)
    num_entries, num_bags = np.zeros((2, *counts.shape), np.int64)
    is_summed = np.zeros(counts.shape, np.bool_)
    if own is not None and any(part.offsets is not None for part in asked.parts):
        count_bags(asked.inverse, entry_offsets, firsts, ranks, num_entries, num_bags)
        row_bytes = rows.groups[asked.keys.group].dim * np.dtype(rows.settings.dtype).itemsize
        # A row or a sum travels twice, back again as a gradient; its keys travel once.
        is_summed[:] = 2 * num_bags * row_bytes + 4 * (num_entries + num_bags) < 2 * counts * row_bytes
        is_summed[own] = False
    if not is_summed.any():
        nothing = [(_NONE, _NONE)] * num_ranks
        return Division(order, counts, row_bounds, row_bounds, places[asked.inverse], entry_offsets, nothing)
    bounds, entry_bounds = np.zeros((2, num_ranks + 1), np.int64)
    np.cumsum(np.where(is_summed, num_bags, counts).sum(axis=1), out=bounds[1:])
    np.cumsum(np.where(is_summed, num_entries, counts).sum(axis=1), out=entry_bounds[1:])
    entries, lengths = np.empty(entry_bounds[-1], np.int32), np.empty(bounds[-1], np.int32)
    inverse, offsets = np.empty_like(asked.inverse), np.empty_like(entry_offsets)
    places -= row_bounds[ranks].astype(np.int32)  # among the rows of the same rank
    count = gather_bags(
        asked.inverse, entry_offsets, firsts, asked.keys.starts, ranks, is_summed, places,
        bounds[:-1].copy(), entry_bounds[:-1].copy(), entries, lengths, np.empty(num_keys, np.int32),
        inverse, offsets, np.full((2, num_ranks), -1, np.int64),
    )  # fmt: skip
    bags = [
        (entries[entry_bounds[rank] : entry_bounds[rank + 1]], lengths[bounds[rank] : bounds[rank + 1]])
        if is_summed[rank].any()
        else (_NONE, _NONE)
        for rank in range(num_ranks)
    ]
    return Division(order, counts, row_bounds, bounds, inverse[:count], offsets, bags)


def _entry_offsets(asked: GroupRequest) -> Int64s:
    """The entries of all vectors, part by part."""
    if all(part.offsets is None for part in asked.parts):
        return np.arange(asked.bounds[-1] + 1)
    begins = [
        np.arange(first, last) if part.offsets is None else part.offsets[:-1] + first
        for part, first, last in zip(asked.parts, asked.bounds[:-1], asked.bounds[1:], strict=True)
    ]
    return np.concatenate([*begins, asked.bounds[-1:]])
