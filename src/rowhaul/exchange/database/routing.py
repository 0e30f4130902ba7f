"""From keys to the ranks that store their rows, by way of the ranks that know where they are.

Every distinct key goes to its owner, which finds or makes the row and answers with a location: (rank,
record). The storing ranks then hear which records will be asked of them, so that pulls and pushes are
payloads alone. Where keys form bags and fewer bags than rows would travel, the storing rank also gets the
bags: it sends the sum of its part of each, and gets one gradient for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.exchange.database.calls import Calls
from rowhaul.exchange.database.kernels import find_owners
from rowhaul.exchange.database.ring import join
from rowhaul.exchange.transport import Bytes
from rowhaul.store.database.pooled import Vectors
from rowhaul.store.database.requests import Request, TableKeys
from rowhaul.store.database.rows import Rows
from rowhaul.store.database.tickets import by_group, distinct_keys
from rowhaul.store.location import rank_of, record_of

Int64s = npt.NDArray[np.int64]
Locate = Callable[[str, Int64s], Int64s]  # locations of distinct keys of a table that this rank owns
_NUMBERS = 3  # records, entries and bags, that a rank tells another of each table
NUM_DETAILS = _NUMBERS  # of each table


@dataclass(frozen=True)
class Asked:
    """What this rank wants of one table from one rank: some distinct rows, or sums of parts of some bags."""

    rows: Int64s  # places among the table's distinct rows
    bags: Int64s | None = None  # numbers of the bags, where their parts come as sums


@dataclass(frozen=True)
class TableRoute:
    """One table's part of a request, and what of it is asked of each rank."""

    part: TableKeys
    vectors: Vectors  # locations are of no use here
    asked: list[Asked]  # by rank


@dataclass(frozen=True)
class Route:
    """What this rank asks of others, and what it will serve to each of them, by table."""

    tables: list[TableRoute]
    served: list[dict[str, Vectors]]  # by rank


def owners_of(keys: Int64s, num_ranks: int) -> npt.NDArray[np.int64]:
    """The rank that knows where each key's row is."""
    owners = np.empty(len(keys), np.int64)
    find_owners(keys, num_ranks, owners)
    return owners


def locate_everywhere(
    calls: Calls, names: Sequence[str], keys: Sequence[Int64s], locate: Locate, what: str, subject: int
) -> list[Int64s]:
    """Locations of distinct keys of every table, from their owners; `calls.agree` if any rank fails."""
    owners = [owners_of(some, calls.num_ranks) for some in keys]
    orders = [np.argsort(some, kind="stable") for some in owners]
    counts = np.array([np.bincount(some, minlength=calls.num_ranks) for some in owners]).T
    asked = calls.tell(what, subject, counts.reshape(calls.num_ranks, -1))[:, : len(names)]
    bounds = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(counts, axis=0)])
    requests = [
        join([keys[t][orders[t][bounds[rank, t] : bounds[rank + 1, t]]] for t in range(len(names))])
        for rank in range(calls.num_ranks)
    ]
    failure: list[BaseException] = []

    def answer(peer: int, request: Bytes) -> Bytes:
        given = np.split(request.view(np.int64), np.cumsum(asked[peer])[:-1])
        try:
            found = [locate(name, some) for name, some in zip(names, given, strict=True)]
        except Exception as error:  # told to all ranks below: an answer of some kind must go out
            failure.append(error)
            found = [np.zeros(len(some), np.int64) for some in given]
        return join(found)

    sizes = [len(request) for request in requests]
    answers = calls.ring.ask(requests, (8 * asked.sum(axis=1)).tolist(), answer, sizes)
    calls.agree(what, subject, failure[0] if failure else None)
    locations = [np.empty(len(some), np.int64) for some in keys]
    for rank, reply in enumerate(answers):
        found = np.split(reply.view(np.int64), np.cumsum(counts[rank])[:-1])
        for t in range(len(names)):
            locations[t][orders[t][bounds[rank, t] : bounds[rank + 1, t]]] = found[t]
    return locations


def distinct_of(rows: Rows, request: Request) -> dict[str, tuple[TableKeys, Int64s, Vectors]]:
    """Each table's part of a request with its distinct keys and the vectors made of them."""
    found: dict[str, tuple[TableKeys, Int64s, Vectors]] = {}
    for group, parts in by_group(rows, request).items():
        keys, _, located = distinct_keys(rows, parts, group)
        found |= {part.table: (part, keys[own], vectors) for part, own, vectors in located}
    return found


def find_route(calls: Calls, rows: Rows, request: Request, locate: Locate, ticket: int) -> Route:
    """Locate all rows of a request, and tell the ranks that store them what will be asked."""
    names = [spec.name for spec in rows.settings.tables]
    distinct = distinct_of(rows, request)
    nothing = np.empty(0, np.int64)
    keys = [distinct[name][1] if name in distinct else nothing for name in names]
    locations = locate_everywhere(calls, names, keys, locate, "prefetch", ticket)
    tables: list[TableRoute] = []
    numbers = np.zeros((calls.num_ranks, len(names), _NUMBERS), np.int64)
    messages: list[list[npt.NDArray[np.generic]]] = [[] for _ in range(calls.num_ranks)]
    row_bytes = np.dtype(rows.settings.dtype).itemsize
    for t, name in enumerate(names):
        if name not in distinct:
            continue
        part, _, vectors = distinct[name]
        tables.append(TableRoute(part, vectors, []))
        for rank in range(calls.num_ranks):
            here = rank_of(locations[t]) == rank
            asked, entries, lengths = _ask(vectors, here, rows.settings.table(name).dim * row_bytes)
            records = record_of(locations[t][asked.rows])
            numbers[rank, t] = len(records), len(entries), len(lengths)
            messages[rank] += [records, entries, lengths]
            tables[-1].asked.append(asked)
    told = calls.tell("prefetch", ticket, numbers.reshape(calls.num_ranks, -1))
    told = told[:, : len(names) * _NUMBERS].reshape(calls.num_ranks, len(names), _NUMBERS)
    sizes = (told * np.array([8, 4, 4])).sum(axis=(1, 2)).tolist()
    arrived = calls.ring.exchange([join(message) for message in messages], sizes)
    order = {part.table: place for place, part in enumerate(request.parts)}
    tables.sort(key=lambda route: order[route.part.table])
    return Route(tables, [_served(names, told[rank], arrived[rank]) for rank in range(calls.num_ranks)])


def _ask(
    vectors: Vectors, here: npt.NDArray[np.bool_], row_bytes: int
) -> tuple[Asked, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What to ask of the rank that stores the distinct rows which are ``here``.

    With it, for bags: which of the asked rows every entry is, and how many entries each bag has.
    """
    rows = np.flatnonzero(here)
    nothing = np.empty(0, np.int32)
    if vectors.offsets is None or not len(rows):
        return Asked(rows), nothing, nothing
    is_here = here[vectors.inverse]  # by entry
    of_bag = np.repeat(np.arange(vectors.num_vectors), np.diff(vectors.offsets))[is_here]
    bags, lengths = np.unique(of_bag, return_counts=True)
    num_entries = len(of_bag)
    # A row or a sum travels twice, forth and back as a gradient; the bags are told once.
    if 2 * len(bags) * row_bytes + 4 * (num_entries + len(bags)) >= 2 * len(rows) * row_bytes:
        return Asked(rows), nothing, nothing
    places = np.cumsum(here) - 1
    entries = places[vectors.inverse[is_here]]
    return Asked(rows, bags), entries.astype(np.int32), lengths.astype(np.int32)


def _served(names: Sequence[str], numbers: Int64s, message: Bytes) -> dict[str, Vectors]:
    """What another rank will ask for, by table."""
    served: dict[str, Vectors] = {}
    begin = 0

    def take(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal begin
        end = begin + count * np.dtype(dtype).itemsize
        # A copy: parts of a message may begin anywhere, and kernels read whole words.
        array = message[begin:end].copy().view(dtype)
        begin = end
        return array

    for name, (num_records, num_entries, num_bags) in zip(names, numbers.tolist(), strict=True):
        records, entries = take(num_records, np.int64), take(num_entries, np.int32)
        lengths = take(num_bags, np.int32)
        if num_bags:
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
            served[name] = Vectors(records, entries, offsets)
        elif num_records:
            served[name] = Vectors(records, np.arange(num_records, dtype=np.int32))
    return served
