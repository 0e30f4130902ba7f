"""Who owns a key, and knows where its row is: for all that is not training, table by table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.ring import join
from rowhaul.database.distributed.routing_kernels import find_owners
from rowhaul.database.pooled import Vectors
from rowhaul.database.requests import Request, TableKeys
from rowhaul.database.rows import Rows
from rowhaul.database.tickets import by_group, distinct_keys
from rowhaul.transport.base import Bytes

Int64s = npt.NDArray[np.int64]
Locate = Callable[[str, Int64s], Int64s]  # locations of distinct keys of a table that this rank owns


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
