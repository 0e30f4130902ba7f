"""From keys to the ranks that store their rows, by way of the ranks that own the keys.

Every distinct key goes to its owner, which finds or creates the row. Usually the owner also stores it: both
ends then know the sizes of all payloads of pulls and pushes. Only if a rank knows of rows that are stored
elsewhere, or do not exist, do locations return, and the ranks that store the rows are asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.dividing import Division, divide, owners_of
from rowhaul.database.requests import Request
from rowhaul.database.rows import Keys, Rows
from rowhaul.database.tickets import GroupRequest, group_requests
from rowhaul.database.vectors import Vectors
from rowhaul.store.location import rank_of, record_of

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Locate = Callable[[Keys], Int64s]  # of distinct keys that this rank owns; -1 for those without a row
ARRAYS_PER_GROUP = 4  # that a rank sends to another: keys, keys by table, entries and lengths of bags


@dataclass(frozen=True)
class GroupRoute:
    """What this rank requests from others for one group of tables, and what it serves to each of them."""

    asked: GroupRequest
    vectors: Vectors  # location -1 - k is the k-th vector that arrives, others are stored here
    bounds: list[int]  # ranks + 1, of the vectors that arrive
    served: list[Vectors]  # by rank; without a row the location is -1
    served_bounds: list[int]  # ranks + 1, of the vectors sent to others
    own_keys: Int64s  # positions of the requested keys that this rank serves to itself


Route = list[GroupRoute]  # by group
_Asked = list[list[tuple[Keys, Int32s, Int32s]]]  # by rank and group: keys, entries and lengths of bags


def find_route(
    calls: Calls,
    rows: Rows,
    request: Request,
    locate: Locate,
    operation: str,
    subject: int,
    *,
    may_sum: bool = True,
) -> Route:
    """Locate all rows of a request, on all ranks together; ranks may sum the rows they store if it pays."""
    own = calls.rank if may_sum else None
    requests = group_requests(rows, request)
    divided = [
        divide(rows, asked, owners_of(asked.keys.values, calls.num_ranks), calls.num_ranks, own)
        for asked in requests
    ]
    asked = _ask(calls, operation, subject, divided, [one.keys.values for one in requests])
    found, is_elsewhere = calls.attempt(
        operation,
        subject,
        lambda: [[locate(keys) for keys, _, _ in of_rank] for of_rank in asked],
        lambda found: any((rank_of(some) != calls.rank).any() for of_rank in found for some in of_rank),
    )
    records = [[record_of(some) for some in of_rank] for of_rank in found]
    if is_elsewhere:
        locations = _return_locations(calls, operation, subject, divided, found)
        divided = [
            divide(rows, one, np.where(at < 0, calls.rank, rank_of(at)), calls.num_ranks, own)
            for one, at in zip(requests, locations, strict=True)
        ]
        numbers = [np.where(at < 0, -1, record_of(at)) for at in locations]
        asked = _ask(calls, operation, subject, divided, numbers)
        records = [[keys.values for keys, _, _ in of_rank] for of_rank in asked]
    route = []
    for group, (one, by_rank) in enumerate(zip(requests, divided, strict=True)):
        served = [
            _served(of_rank[group], *bags[group][1:]) for of_rank, bags in zip(records, asked, strict=True)
        ]
        route.append(_route(one, by_rank, served, calls.rank))
    return route


def _ask(
    calls: Calls, operation: str, subject: int, divided: Sequence[Division], numbers: Sequence[Int64s]
) -> _Asked:
    """Send every rank the numbers (keys or records) it is asked for; return what is asked here."""
    given = [
        [
            part
            for one, some in zip(divided, numbers, strict=True)
            for part in (some[one.of_rank(rank)], one.counts[rank], *one.bags[rank])
        ]
        for rank in range(calls.num_ranks)
    ]
    asked: _Asked = []
    for arrived in calls.swap(operation, subject, given):
        parts = [arrived[i : i + ARRAYS_PER_GROUP] for i in range(0, len(arrived), ARRAYS_PER_GROUP)]
        asked.append(
            [
                (Keys(group, values, np.concatenate([[0], np.cumsum(counts)])), entries, lengths)
                for group, (values, counts, entries, lengths) in enumerate(parts)
            ]
        )
    return asked


def _return_locations(
    calls: Calls,
    operation: str,
    subject: int,
    divided: Sequence[Division],
    found: Sequence[Sequence[Int64s]],
) -> list[Int64s]:
    """Return locations to the ranks that asked; those of the keys requested here, in their order."""
    locations = [np.empty(len(one.order), np.int64) for one in divided]
    for rank, answers in enumerate(calls.swap(operation, subject, found)):
        for one, at, answer in zip(divided, locations, answers, strict=True):
            at[one.of_rank(rank)] = answer
    return locations


def _route(asked: GroupRequest, divided: Division, served: list[Vectors], own: int) -> GroupRoute:
    bounds: list[int] = divided.bounds.tolist()
    locations = -1 - np.arange(bounds[-1])
    locations[bounds[own] : bounds[own + 1]] = served[own].locations
    counts = [0 if rank == own else one.num_vectors for rank, one in enumerate(served)]
    return GroupRoute(
        asked,
        Vectors(locations, divided.inverse, divided.offsets),
        bounds,
        served,
        np.cumsum([0, *counts]).tolist(),
        divided.of_rank(own),
    )


def _served(records: Int64s, entries: Int32s, lengths: Int32s) -> Vectors:
    if not len(lengths):
        return Vectors(records, np.arange(len(records), dtype=np.int32))
    return Vectors(records, entries, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
