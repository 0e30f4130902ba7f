"""Plans and outcomes written by hand."""

import numpy as np

from rowhaul.schedule.plan import Kind, Moves, Plan
from rowhaul.simulate.links import Link, Links
from rowhaul.simulate.results import Outcome


def links(workers, stores=(), latency=0.0):
    """Links of these speeds in bytes a second."""
    return Links(tuple(Link(speed, latency) for speed in workers), tuple(Link(speed) for speed in stores))


def plan(iteration, moves=(), worker=(), num_workers=2, all_reduce_bytes=0):
    """A plan of the given moves: (kind, source, target, bytes, ready), and perhaps (..., key, after).

    Moves without a key are of rows of their own.
    """
    columns = zip(*((*move, None, 0)[:7] for move in moves), strict=True) if moves else ((),) * 7
    kind, source, target, num_bytes, ready, key, after = columns
    key = [10_000 + number if one is None else one for number, one in enumerate(key)]
    keys = np.unique(np.array(key, np.int64))
    pushed = {k for k, kd, a in zip(key, kind, after, strict=True) if kd == Kind.UPDATE_PUSH and not a}
    second = [k in pushed and kd == Kind.MISS_PULL for k, kd in zip(key, kind, strict=True)]
    none = np.zeros(0, np.int64)
    return Plan(
        iteration=iteration,
        num_workers=num_workers,
        worker=np.array(worker, np.int32),
        tables=np.zeros(len(keys), np.int32),
        keys=keys,
        trainers=np.ones(len(keys), np.uint64),
        states=np.zeros(len(keys), np.uint8),
        moves=Moves(
            kind=np.array(kind, np.uint8),
            payload=np.ones(len(moves), np.uint8),
            table=np.zeros(len(moves), np.int32),
            key=np.array(key, np.int64),
            source=np.array(source, np.int16),
            target=np.array(target, np.int16),
            num_bytes=np.array(num_bytes, np.int64),
            ready=np.array(ready, np.int32),
            after=np.array(after, np.uint8),
            second=np.array(second, np.uint8),
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


def pull(target, num_bytes, ready, store=2, key=None):
    return Kind.MISS_PULL, store, target, num_bytes, ready, key, 0


def push(source, num_bytes, ready, store=2, key=None, after=0):
    return Kind.UPDATE_PUSH, source, store, num_bytes, ready, key, after


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
        alone_seconds=0.0,
        num_summing=sum(share > 0 or not worker for worker, share in enumerate(shares)),
        hit_ratio=0.25,
        cost_series=np.full(steps, link_seconds.sum()),
        slowest_link_series=np.full(steps, link_seconds.max()),
        iteration_series=np.full(steps, busy.max()),
        decision_series=np.linspace(0.001, 0.002, steps),
        lookup_series=np.full(steps, 0.0005),
    )
