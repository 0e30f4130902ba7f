"""What a request wants of one group of tables, divided by the ranks that are asked for it.

Vectors come from every rank in one piece: rows as they are, or sums of those rows of a bag that the rank
stores, where fewer sums than rows would travel. To what is done with them here both are alike: a vector of
the request is a sum of some that came, and its gradient goes to each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.routing_kernels import count_bags, gather_bags, sort_by_rank
from rowhaul.database.requests import TableKeys
from rowhaul.database.rows import Rows

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Wanted:
    """The distinct rows of a group of tables that a request needs, and what its vectors are made of."""

    parts: tuple[TableKeys, ...]  # in the order of their tables
    firsts: Int64s  # tables + 1: where each table's vectors begin
    keys: Int64s  # distinct, table by table
    starts: Int64s  # tables + 1: where each table's keys begin
    inverse: Int32s  # entries: which of the keys
    offsets: Int64s  # vectors + 1: the entries of each vector


@dataclass(frozen=True)
class Division:
    """Wanted rows by the rank that is asked for them, and the vectors that come from each rank."""

    order: Int64s  # the keys, rank by rank, and table by table within
    counts: Int64s  # ranks x tables: keys
    row_bounds: Int64s  # ranks + 1, of the keys in that order
    bounds: Int64s  # ranks + 1, of the vectors that come
    inverse: Int32s  # entries: which of the vectors that come
    offsets: Int64s  # vectors + 1: the entries of each vector wanted
    bags: list[tuple[Int32s, Int32s]]  # by rank: keys summed to vectors, and how many each; or nothing


def want(rows: Rows, group: int, parts: Sequence[TableKeys]) -> Wanted:
    """The rows that parts of a request need of one group."""
    parts = sorted(parts, key=lambda part: rows.places[part.table].position)
    tables = np.array([rows.places[part.table].position for part in parts], np.int64)
    lengths = [len(part.keys) for part in parts]
    values = np.concatenate([part.keys for part in parts]) if parts else np.empty(0, np.int64)
    bounds = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    keys, starts, inverse = rows.groups[group].distinct(values, bounds, tables)
    firsts = np.zeros(len(starts), np.int64)
    firsts[tables + 1] = [part.num_vectors for part in parts]
    return Wanted(tuple(parts), np.cumsum(firsts), keys, starts, inverse, _offsets(parts, bounds))


def _offsets(parts: Sequence[TableKeys], bounds: Int64s) -> Int64s:
    """The entries of all vectors, one part's after the other's."""
    if all(part.offsets is None for part in parts):
        return np.arange(bounds[-1] + 1)
    begins = [
        np.arange(bounds[i], bounds[i + 1]) if part.offsets is None else part.offsets[:-1] + bounds[i]
        for i, part in enumerate(parts)
    ]
    return np.concatenate([*begins, bounds[-1:]])


def divide(rows: Rows, group: int, wanted: Wanted, ranks: Int64s, num_ranks: int, own: int) -> Division:
    """Ask each row of the rank given with it; ``own`` is this rank, whose rows are never summed."""
    num_keys, num_tables = len(wanted.keys), len(wanted.starts) - 1
    counts = np.zeros((num_ranks, num_tables), np.int64)
    row_bounds = np.zeros(num_ranks + 1, np.int64)
    order, places = np.empty(num_keys, np.int64), np.empty(num_keys, np.int32)
    sort_by_rank(ranks, wanted.starts, counts, row_bounds, order, places)
    summed = _sums_that_pay(rows, group, wanted, ranks, counts, own)
    if summed is None:
        nothing = [(_NONE, _NONE)] * num_ranks
        return Division(
            order, counts, row_bounds, row_bounds, places[wanted.inverse], wanted.offsets, nothing
        )
    is_summed, num_entries, num_bags = summed
    bounds, entry_bounds = np.zeros((2, num_ranks + 1), np.int64)
    np.cumsum(np.where(is_summed, num_bags, counts).sum(axis=1), out=bounds[1:])
    np.cumsum(np.where(is_summed, num_entries, counts).sum(axis=1), out=entry_bounds[1:])
    entries, lengths = np.empty(entry_bounds[-1], np.int32), np.empty(bounds[-1], np.int32)
    inverse, offsets = np.empty_like(wanted.inverse), np.empty_like(wanted.offsets)
    places -= row_bounds[ranks].astype(np.int32)  # among the rows of the same rank
    count = gather_bags(
        wanted.inverse, wanted.offsets, wanted.firsts, wanted.starts, ranks, is_summed, places,
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


def _sums_that_pay(
    rows: Rows, group: int, wanted: Wanted, ranks: Int64s, counts: Int64s, own: int
) -> tuple[npt.NDArray[np.bool_], Int64s, Int64s] | None:
    """Whose rows of which tables are better summed there, by rank and table; with entries and bags."""
    if all(part.offsets is None for part in wanted.parts):
        return None
    num_entries, num_bags = np.zeros((2, *counts.shape), np.int64)
    count_bags(wanted.inverse, wanted.offsets, wanted.firsts, ranks, num_entries, num_bags)
    row_bytes = rows.groups[group].dim * np.dtype(rows.settings.dtype).itemsize
    # A row or a sum travels twice, forth and back as a gradient; the bags are told once.
    is_summed = 2 * num_bags * row_bytes + 4 * (num_entries + num_bags) < 2 * counts * row_bytes
    is_summed[own] = False
    return (is_summed, num_entries, num_bags) if is_summed.any() else None
