"""Plans and outcomes written by hand."""

import numpy as np

from rowhaul.schedule.plan import Kind, Moves, Plan
from rowhaul.simulate.links import Link, Links
from rowhaul.simulate.results import Outcome


def links(workers, stores=(), latency=0.0):
    """Links of these speeds in bytes a second."""
    return Links(tuple(Link(speed, latency) for speed in workers), tuple(Link(speed) for speed in stores))


def plan(iteration, moves=(), worker=(), num_workers=2, all_reduce_bytes=0):
    """A plan of the given moves: (kind, source, target, bytes, ready)."""
    kind, source, target, num_bytes, ready = zip(*moves, strict=True) if moves else ((),) * 5
    none = np.zeros(0, np.int64)
    return Plan(
        iteration=iteration,
        num_workers=num_workers,
        worker=np.array(worker, np.int32),
        tables=none,
        keys=none,
        trainers=none.astype(np.uint64),
        states=none.astype(np.uint8),
        moves=Moves(
            kind=np.array(kind, np.uint8),
            payload=np.ones(len(moves), np.uint8),
            table=np.zeros(len(moves), np.int32),
            key=np.arange(len(moves)),
            source=np.array(source, np.int16),
            target=np.array(target, np.int16),
            num_bytes=np.array(num_bytes, np.int64),
            ready=np.array(ready, np.int32),
        ),
        lookups=np.full(num_workers, 4),
        hits=np.full(num_workers, 1),
        all_reduce_rows=all_reduce_bytes // 8,
        all_reduce_bytes=all_reduce_bytes,
        evicted_from=none,
        evicted_tables=none,
        evicted_keys=none,
        controls=(),
    )


def pull(target, num_bytes, ready, store=2):
    return Kind.MISS_PULL, store, target, num_bytes, ready


def push(source, num_bytes, ready, store=2):
    return Kind.UPDATE_PUSH, source, store, num_bytes, ready


def outcome(name, link_seconds, compute_seconds=None, shares=(4, 4), iterations=3, dispatch=None, scale=1.0):
    """An outcome whose links are busy for these seconds in every iteration."""
    link_seconds = np.array(link_seconds, float) * scale
    busy = link_seconds if compute_seconds is None else link_seconds + compute_seconds
    num_workers, steps = len(link_seconds), iterations + 1
    return Outcome(
        name=name,
        dispatch=dispatch or name.partition("@")[0],
        shares=tuple(shares),
        iterations=iterations,
        rows=np.arange(4.0 * num_workers).reshape(4, num_workers),
        bytes=np.arange(4.0 * num_workers).reshape(4, num_workers) * 8,
        all_reduce_rows=0.0,
        all_reduce_bytes=0.0,
        link_seconds=link_seconds,
        compute_seconds=np.zeros(num_workers)
        if compute_seconds is None
        else np.array(compute_seconds, float),
        hit_ratio=0.25,
        cost_series=np.full(steps, link_seconds.sum()),
        slowest_link_series=np.full(steps, link_seconds.max()),
        iteration_series=np.full(steps, busy.max()),
        decision_series=np.linspace(0.001, 0.002, steps),
        lookup_series=np.full(steps, 0.0005),
    )
