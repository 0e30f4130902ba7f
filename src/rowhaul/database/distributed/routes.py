"""From keys to the ranks that store their rows, by way of the ranks that know where they are.

Every distinct key goes to its owner, which finds or makes the row. Mostly it also stores it: then both ends
know all that pulls and pushes need, which are payloads alone. Only if any rank knows of a row that has moved
elsewhere do locations come back, and the ranks that store the rows hear what will be asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.dividing import Division, Wanted, divide, want
from rowhaul.database.distributed.ring import join
from rowhaul.database.distributed.routing import owners_of
from rowhaul.database.pooled import Vectors
from rowhaul.database.requests import Request
from rowhaul.database.rows import Rows
from rowhaul.database.tickets import by_group
from rowhaul.store.location import rank_of, record_of
from rowhaul.transport.base import Bytes

Int64s = npt.NDArray[np.int64]
Locate = Callable[[int, Int64s, Int64s], Int64s]  # of distinct keys of a group that this rank owns, by table
_OF_GROUP = 2  # entries and vectors, that a rank tells another of each group beside the rows of each table
NUM_DETAILS = 1 + _OF_GROUP  # of each table at most


@dataclass(frozen=True)
class GroupRoute:
    """What this rank asks of others for one group of tables, and what it will serve to each of them."""

    wanted: Wanted
    vectors: Vectors  # those wanted; location -1 - k is the k-th vector that comes, others are stored here
    bounds: list[int]  # ranks + 1, of the vectors that come
    served: list[Vectors]  # by rank


Route = list[GroupRoute]  # by group


@dataclass(frozen=True)
class _Asked:
    """What one rank asks of another for one group."""

    numbers: Int64s  # keys, or records; table by table
    starts: Int64s  # tables + 1
    entries: npt.NDArray[np.int32]  # which of the numbers are summed to vectors; empty where none are
    lengths: npt.NDArray[np.int32]  # how many, for each vector


def find_route(calls: Calls, rows: Rows, request: Request, locate: Locate, ticket: int) -> Route:
    """Locate all rows of a request, on all ranks together."""
    parts = by_group(rows, request)
    wanted = [want(rows, group, parts.get(group, [])) for group in range(len(rows.groups))]
    divided = [
        divide(rows, group, one, owners_of(one.keys, calls.num_ranks), calls.num_ranks, calls.rank)
        for group, one in enumerate(wanted)
    ]
    numbers = [one.keys[by_rank.order] for one, by_rank in zip(wanted, divided, strict=True)]
    asked = _tell(calls, rows, divided, numbers, ticket)
    failure: BaseException | None = None
    found: list[list[Int64s]] = []
    try:
        found = [
            [locate(group, one.numbers, one.starts) for group, one in enumerate(of_rank)] for of_rank in asked
        ]
    except Exception as error:  # told to all ranks
        failure = error
    has_moved = any((rank_of(some) != calls.rank).any() for of_rank in found for some in of_rank)
    if calls.agree("prefetch", ticket, failure, has_moved):
        locations = _return_locations(calls, divided, found)
        divided = [
            divide(rows, group, one, rank_of(at), calls.num_ranks, calls.rank)
            for group, (one, at) in enumerate(zip(wanted, locations, strict=True))
        ]
        numbers = [record_of(at[by_rank.order]) for at, by_rank in zip(locations, divided, strict=True)]
        asked = _tell(calls, rows, divided, numbers, ticket)
        found = [[one.numbers for one in of_rank] for of_rank in asked]
    return [
        _route(
            one, by_rank, [of_rank[group] for of_rank in asked], [some[group] for some in found], calls.rank
        )
        for group, (one, by_rank) in enumerate(zip(wanted, divided, strict=True))
    ]


def _tell(
    calls: Calls, rows: Rows, divided: Sequence[Division], numbers: Sequence[Int64s], ticket: int
) -> list[list[_Asked]]:
    """Tell every rank what is asked of it; what is asked here, by rank and group."""
    ranks = range(calls.num_ranks)
    sums = np.array([[[len(bags) for bags in one.bags[rank]] for one in divided] for rank in ranks])
    details = np.concatenate([*(one.counts for one in divided), sums.reshape(calls.num_ranks, -1)], axis=1)
    told = calls.tell("prefetch", ticket, details)[:, : details.shape[1]]
    messages = [
        join(
            [
                some[one.row_bounds[rank] : one.row_bounds[rank + 1]]
                for one, some in zip(divided, numbers, strict=True)
            ]
            + [some for one in divided for some in one.bags[rank] if len(some)]
        )
        for rank in ranks
    ]
    num_tables = details.shape[1] - _OF_GROUP * len(divided)
    sizes = 8 * told[:, :num_tables].sum(axis=1) + 4 * told[:, num_tables:].sum(axis=1)
    arrived = calls.ring.exchange(messages, sizes.tolist())
    return [_read(rows, told[rank, :num_tables], told[rank, num_tables:], arrived[rank]) for rank in ranks]


def _read(rows: Rows, counts: Int64s, sums: Int64s, message: Bytes) -> list[_Asked]:
    """What a rank asks, by group."""
    num_rows = int(counts.sum())
    numbers = message[: 8 * num_rows].view(np.int64)
    bags = message[8 * num_rows :].view(np.int32)
    asked = []
    table = row = entry = 0
    for group, (num_entries, num_vectors) in zip(
        rows.groups, sums.reshape(-1, _OF_GROUP).tolist(), strict=True
    ):
        starts = np.zeros(len(group.tables) + 1, np.int64)
        np.cumsum(counts[table : table + len(group.tables)], out=starts[1:])
        middle, end = entry + num_entries, entry + num_entries + num_vectors
        asked.append(_Asked(numbers[row : row + starts[-1]], starts, bags[entry:middle], bags[middle:end]))
        table, row, entry = table + len(group.tables), row + int(starts[-1]), end
    return asked


def _return_locations(
    calls: Calls, divided: Sequence[Division], found: Sequence[Sequence[Int64s]]
) -> list[Int64s]:
    """Locations that were found for others to them; those of the keys wanted here, in their order."""
    sizes = sum(8 * np.diff(one.row_bounds) for one in divided)
    answers = calls.ring.exchange([join(of_rank) for of_rank in found], np.asarray(sizes).tolist())
    locations = [np.empty(len(one.order), np.int64) for one in divided]
    for rank, answer in enumerate(answers):
        begin = 0
        for one, at in zip(divided, locations, strict=True):
            own = one.order[one.row_bounds[rank] : one.row_bounds[rank + 1]]
            at[own] = answer.view(np.int64)[begin : begin + len(own)]
            begin += len(own)
    return locations


def _route(
    wanted: Wanted, divided: Division, asked: Sequence[_Asked], found: Sequence[Int64s], own: int
) -> GroupRoute:
    bounds: list[int] = divided.bounds.tolist()
    served = [_served(record_of(at), one) for at, one in zip(found, asked, strict=True)]
    locations = -1 - np.arange(bounds[-1])
    locations[bounds[own] : bounds[own + 1]] = served[own].locations
    return GroupRoute(wanted, Vectors(locations, divided.inverse, divided.offsets), bounds, served)


def _served(records: Int64s, asked: _Asked) -> Vectors:
    if not len(asked.lengths):
        return Vectors(records, np.arange(len(records), dtype=np.int32))
    offsets = np.zeros(len(asked.lengths) + 1, np.int64)
    np.cumsum(asked.lengths, out=offsets[1:])
    return Vectors(records, asked.entries, offsets)
