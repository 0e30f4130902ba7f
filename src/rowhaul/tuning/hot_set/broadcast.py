"""What ranks tell each other of hot rows: rank 0 tells of sets of them, and which one has won.

It is told the state of the scheduler, which is on another rank of its host.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rowhaul.cluster.cluster import Cluster
from rowhaul.schedule import HotRows
from rowhaul.schedule.arrays import Arrays
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.transport.base import Links

MOST_STATE_BYTES = 128 << 20  # of a scheduler that is copied: about two million rows


def state_for_first(cluster: Cluster, training: DistributedTraining) -> Arrays | None:
    """What the scheduler of rank 0's host knows, on rank 0; None elsewhere, and where it is too much to copy.

    A collective call, between two segments.
    """
    planner = max(next(ranks for ranks in cluster.hosts if 0 in ranks))
    state = None
    if cluster.rank == planner:
        state = training.runtime.feed.at_rest(lambda scheduler: scheduler.export())
        if state is not None and sum(one.nbytes for one in state.values()) > MOST_STATE_BYTES:
            state = None
    if planner == 0:
        return state
    return training.runtime.in_moves(lambda mover: _send_state(mover.links, planner, state)).wait()


def _send_state(links: Links, source: int, state: Arrays | None) -> Arrays | None:
    """Arrays from a rank to rank 0, made small on the way: most of them are much alike."""
    size = np.zeros(1, np.int64)
    if links.rank == source:
        packed = io.BytesIO()
        if state is not None:
            arrays: dict[str, Any] = dict(state)
            np.savez(packed, **arrays)
        data = np.frombuffer(zlib.compress(packed.getvalue(), 1), np.uint8).copy()
        size[0] = len(data) if state is not None else 0
        for part in (size.view(np.uint8), data[: size[0]]):
            links.post({}, {0: part}).wait_sent()
    elif links.rank == 0:
        links.post({source: size.view(np.uint8)}, {}).wait_received()
        data = np.empty(size[0], np.uint8)
        links.post({source: data}, {}).wait_received()
        if size[0]:
            with np.load(io.BytesIO(zlib.decompress(data.tobytes()))) as found:
                return dict(found)
    return None


def broadcast_sets(links: Links, mine: Sequence[HotRows]) -> list[HotRows]:
    """Sets of rows from rank 0 to all."""
    count = broadcast_number(links, len(mine))
    told = [broadcast_rows(links, mine[place] if links.rank == 0 else None) for place in range(count)]
    return [one for one in told if one is not None]


def broadcast_number(links: Links, mine: int) -> int:
    """A number from rank 0 to all."""
    number = np.array([mine], np.int64)
    if links.rank == 0:
        links.post({}, dict.fromkeys(range(1, links.num_ranks), number.view(np.uint8))).wait_sent()
    else:
        links.post({0: number.view(np.uint8)}, {}).wait_received()
    return int(number[0])


def broadcast_rows(links: Links, mine: HotRows | None) -> HotRows | None:
    """Rows from rank 0 to all; None, on all ranks, where rank 0 has none to tell of."""
    size = broadcast_number(links, -1 if mine is None else len(mine))
    if size < 0:
        return None
    tables, keys = (
        (np.empty(size, np.int32), np.empty(size, np.int64)) if mine is None else (mine.tables, mine.keys)
    )
    for part in (tables, keys):
        if links.rank == 0:
            others = range(1, links.num_ranks)
            links.post({}, dict.fromkeys(others, part.view(np.uint8))).wait_sent()
        else:
            links.post({0: part.view(np.uint8)}, {}).wait_received()
    return HotRows(tables, keys)
