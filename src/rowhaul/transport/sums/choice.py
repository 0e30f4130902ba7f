"""Chooses how to sum: by a model of the links, then by trying the ways that the model finds best.

Rank 0 decides, and all ranks follow: a sum works only if all go the same way. Whether links or processors are
the bottleneck depends on the cluster, which is why the model alone does not decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.sum_plan import SumPlan, plain_ways, ways_to_sum
from rowhaul.transport.base import Bytes

TRIALS = 3  # of each way
LONG_TRIAL = 0.1  # seconds after which once is enough
MOST_TRIED = 3
PROMISING = 1.3  # times the seconds of the best way, by the model, up to which another is tried
ALIKE = 0.8  # speeds up to this part of each other count as equal: measurements are no better
BUCKETS_FROM = 0.005  # seconds on the links from which a sum is cut in two, to begin it during backward()

Gather = Callable[[Bytes], npt.NDArray[np.uint8]]


def candidates(speeds: Sequence[float] | None, num_ranks: int, num_bytes: int) -> list[SumPlan]:
    """Return the ways worth a trial; the plain ones where speeds are not known."""
    if speeds is None:
        return plain_ways(num_ranks)
    ways = ways_to_sum(speeds, num_bytes)
    limit = PROMISING * ways[0].seconds(speeds, num_bytes)
    promising = [one for one in ways if one.seconds(speeds, num_bytes) <= limit][:MOST_TRIED]
    # Equal slices in any case: speeds may have been measured wrong.
    return list(dict.fromkeys([*promising, plain_ways(num_ranks)[-1]]))


def try_ways(ways: Sequence[SumPlan], run: Callable[[SumPlan], None], gather: Gather) -> SumPlan:
    """Try each way on all ranks together; return rank 0's choice, on every rank.

    Args:
        ways: to try, the same on all ranks.
        run: makes a sum.
        gather: returns the bytes of all ranks.
    """
    best = [np.inf] * len(ways)
    gather(np.zeros(8, np.uint8))  # a barrier, as each gather below
    for number, way in enumerate(ways):
        for _ in range(TRIALS):
            began = time.perf_counter()
            run(way)
            seconds = _slowest(gather, time.perf_counter() - began)
            best[number] = min(best[number], seconds)
            if seconds > LONG_TRIAL:
                break
    every = gather(np.array([int(np.argmin(best))]).view(np.uint8))
    return ways[int(np.ascontiguousarray(every).view(np.int64)[0, 0])]


def in_buckets(way: SumPlan, seconds: float) -> SumPlan:
    """Cut a sum in two if it takes so long on the links that half of it is worth sending ahead.

    More buckets would cost processors more than they hide: most values are in one or two layers.
    """
    return replace(way, buckets=max(way.buckets, 2)) if seconds >= BUCKETS_FROM else way


def settled(speeds: Sequence[float]) -> list[float]:
    """Replace speeds that are alike by their mean.

    >>> settled([10.0, 1.0, 9.0, 1.1])
    [9.5, 1.05, 9.5, 1.05]
    """
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    groups: list[list[int]] = []
    for rank in order:
        if groups and speeds[rank] >= ALIKE * speeds[groups[-1][0]]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    found = [0.0] * len(speeds)
    for group in groups:
        for rank in group:
            found[rank] = sum(speeds[one] for one in group) / len(group)
    return found


def _slowest(gather: Gather, seconds: float) -> float:
    every = gather(np.array([seconds]).view(np.uint8))
    return float(np.ascontiguousarray(every).view(np.float64).max())
