"""Messages about hot rows: sets of them from rank 0 to all, and a scheduler's state to rank 0."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import Activity, doing
from rowhaul.cluster.cluster import Cluster
from rowhaul.schedule import HotRows
from rowhaul.schedule.arrays import Arrays
from rowhaul.schedule.settings import NO_ROWS
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.transport.base import Links

Ints = npt.NDArray[np.int64]

MOST_STATE_BYTES = 128 << 20  # of a scheduler that is copied: about two million rows


def state_for_first(cluster: Cluster, training: DistributedTraining) -> Arrays | None:
    """Return, on rank 0, the state of its host's scheduler; None elsewhere, and if it is too large to copy.

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
    """Send arrays from a rank to rank 0, compressed: most of them are repetitive."""
    if links.rank not in (source, 0):
        return None
    packed = io.BytesIO()
    if links.rank == source and state is not None:
        arrays: dict[str, Any] = dict(state)
        np.savez(packed, **arrays)
    data = _send(links, np.frombuffer(zlib.compress(packed.getvalue(), 1), np.uint8), source, [0])
    unpacked = zlib.decompress(data.tobytes())
    if links.rank == source or not unpacked:
        return None
    with np.load(io.BytesIO(unpacked)) as found:
        return dict(found)


def broadcast_sets(links: Links, mine: Sequence[HotRows]) -> list[HotRows]:
    """Send sets of rows from rank 0 to all."""
    count = broadcast_number(links, len(mine))
    found = []
    for rows in mine if links.rank == 0 else [NO_ROWS] * count:
        tables = _broadcast(links, rows.tables.astype(np.int64))
        found.append(HotRows(tables.astype(np.int32), _broadcast(links, rows.keys)))
    return found


def broadcast_rows(links: Links, mine: HotRows | None) -> HotRows | None:
    """Send rows from rank 0 to all; None on all ranks if rank 0 has none."""
    return next(iter(broadcast_sets(links, [] if mine is None else [mine])), None)


def broadcast_number(links: Links, mine: int) -> int:
    """Send a number from rank 0 to all."""
    return int(_broadcast(links, np.array([mine]))[0])


def _broadcast(links: Links, mine: Ints) -> Ints:
    return _send(links, mine, 0, range(1, links.num_ranks))


def _send(links: Links, mine: npt.NDArray[Any], source: int, targets: Sequence[int]) -> npt.NDArray[Any]:
    """Send an array, after its length, from one rank to others; return it on all of them."""
    with doing(Activity.WAITING):
        if links.rank == source:
            for array in (np.array([len(mine)]), mine):
                links.post({}, dict.fromkeys(targets, array.view(np.uint8))).wait_sent()
            return mine
        length = np.zeros(1, np.int64)
        links.post({source: length.view(np.uint8)}, {}).wait_received()
        values = np.empty(length[0], mine.dtype)
        links.post({source: values.view(np.uint8)}, {}).wait_received()
        return values
