"""Messages about hot rows: sets of them from rank 0 to all, and a scheduler's state to rank 0."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
    mine = np.frombuffer(zlib.compress(packed.getvalue(), 1), np.uint8)
    size = np.array([len(mine)])
    _send(links, size, source, [0])
    data = mine if links.rank == source else np.empty(size[0], np.uint8)
    _send(links, data, source, [0])
    unpacked = zlib.decompress(data.tobytes())
    if links.rank == source or not unpacked:
        return None
    with np.load(io.BytesIO(unpacked)) as found:
        return dict(found)


def broadcast_sets(links: Links, mine: Sequence[HotRows]) -> list[HotRows]:
    """Send sets of rows from rank 0 to all."""
    count = broadcast_number(links, len(mine))
    return [
        HotRows(_broadcast(links, tables).astype(np.int32), _broadcast(links, keys))
        for tables, keys in (_columns(mine, place) for place in range(count))
    ]


def broadcast_rows(links: Links, mine: HotRows | None) -> HotRows | None:
    """Send rows from rank 0 to all; None on all ranks if rank 0 has none."""
    return next(iter(broadcast_sets(links, [] if mine is None else [mine])), None)


def broadcast_number(links: Links, mine: int) -> int:
    """Send a number from rank 0 to all."""
    return int(_broadcast(links, np.array([mine]))[0])


def _columns(sets: Sequence[HotRows], place: int) -> tuple[Ints, Ints]:
    """Tables and keys of a set; nothing where only rank 0 knows it."""
    rows = sets[place] if place < len(sets) else NO_ROWS
    return rows.tables.astype(np.int64), rows.keys


def _broadcast(links: Links, mine: Ints) -> Ints:
    size, others = np.array([len(mine)]), range(1, links.num_ranks)
    _send(links, size, 0, others)
    values = mine if links.rank == 0 else np.empty(size[0], np.int64)
    _send(links, values, 0, others)
    return values


def _send(links: Links, values: npt.NDArray[Any], source: int, targets: Sequence[int]) -> None:
    """Send an array from one rank to others, into theirs of the same size."""
    if links.rank == source:
        links.post({}, dict.fromkeys(targets, values.view(np.uint8))).wait_sent()
    else:
        links.post({source: values.view(np.uint8)}, {}).wait_received()
