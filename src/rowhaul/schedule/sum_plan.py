"""Ways to sum a tensor over ranks whose links differ, and what each makes the links carry.

Every rank adds up a *part* of the tensor: it receives that part from all others, adds in rank order, and
sends them the sum. Over the link of a rank with the part ``p``, of ``n`` ranks, ``1 + (n - 2) p`` tensors
travel each way, so parts in proportion to ``speed x time - 1`` keep all links busy to the end. A rank whose
link is too slow for a part is a leaf: it sends its values once and receives the sum once.

No way to add on the ranks does with less: a rank must send its values and receive the sum, and all together
send ``2 (n - 1)`` tensors. `least_seconds` is the bound that follows. The parts meet it where a tensor is cut
into *buckets*, so that one bucket's sums travel while the next one's parts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.sizes import apportion

SCALE = 1 << 16  # parts are given in these
MOST_BUCKETS = 8
LEAST_MESSAGE = 1024  # bytes; with smaller messages headers would be what travels
NEGLIGIBLE = 0.01  # longer a way may take that needs fewer messages
MESSAGE_SECONDS = 150e-6  # of processors for each message, with Gloo

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SumPlan:
    """One way to sum over ranks; all ways give the same bits."""

    parts: tuple[int, ...] = ()  # of each rank, in `SCALE`; empty: everyone sends everything to everyone
    buckets: int = 1

    def bounds(self, begin: int, end: int) -> list[int]:
        """Cut a bucket, given as a range of values, into the ranks' parts."""
        ends = np.cumsum((0, *self.parts)).tolist()
        return [begin + (end - begin) * one // SCALE for one in ends]

    def loads(self, num_ranks: int) -> tuple[Floats, Floats]:
        """Tensors that each rank sends as parts, and as sums; it receives as many, the other way round."""
        if not self.parts:
            return np.full(num_ranks, num_ranks - 1.0), np.zeros(num_ranks)
        own = np.array(self.parts) / SCALE
        return 1 - own, (num_ranks - 1) * own

    def num_messages(self, num_ranks: int) -> int:
        """The most messages that a rank sends."""
        adding = sum(part > 0 for part in self.parts)
        return self.buckets * (num_ranks - 1 + min(adding, num_ranks - 1))

    def seconds(self, speeds: Sequence[float], num_bytes: float) -> float:
        """Seconds that a sum takes if nothing else travels; ``speeds`` are bytes per second each way.

        The first bucket's parts, then one bucket's sums beside the next one's parts, then the last sums.
        """
        parts, sums = self.loads(len(speeds))
        each = num_bytes / np.array(speeds)
        if not self.parts:
            return float((parts * each).max())
        ends = 2 * (np.maximum(parts, sums) * each).max()
        between = ((parts + sums) * each).max()
        return float((ends + (self.buckets - 1) * between) / self.buckets)


def least_seconds(speeds: Sequence[float], num_bytes: float) -> float:
    """Seconds below which no sum can be made: see the module."""
    return num_bytes * max(1 / min(speeds), 2 * (len(speeds) - 1) / sum(speeds))


def plain_ways(num_ranks: int) -> list[SumPlan]:
    """The ways in one bucket over equal links: to everyone, by way of the first rank, in equal slices."""
    if num_ranks < 3:
        return [SumPlan()]
    first = (SCALE, *[0] * (num_ranks - 1))
    return [SumPlan(), SumPlan(first), SumPlan(tuple(apportion(SCALE, [1] * num_ranks).tolist()))]


def ways_to_sum(speeds: Sequence[float], num_bytes: float) -> list[SumPlan]:
    """The ways that may be the quickest over links of these speeds, quickest first."""
    num_ranks = len(speeds)
    ways = plain_ways(num_ranks)
    counts = {min(1 << power, num_ranks) for power in range(num_ranks.bit_length() + 1)}
    for count in sorted(counts) if num_ranks > 2 else ():
        parts = _parts(speeds, count)
        ways += [SumPlan(parts, buckets) for buckets in _numbers_of_buckets(parts, num_bytes)]

    costs = {way: (way.seconds(speeds, num_bytes), way.num_messages(num_ranks)) for way in ways}
    best = {
        way: seconds + messages * MESSAGE_SECONDS
        for way, (seconds, messages) in costs.items()
        if not any(less <= seconds * (1 + NEGLIGIBLE) and fewer < messages for less, fewer in costs.values())
    }
    return sorted(best, key=lambda way: best[way])


def _numbers_of_buckets(parts: Sequence[int], num_bytes: float) -> list[int]:
    adding = sum(part > 0 for part in parts)
    found = [1]
    while found[-1] < MOST_BUCKETS and num_bytes >= 2 * found[-1] * adding * LEAST_MESSAGE:
        found.append(2 * found[-1])
    return found


def _parts(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """Parts of the ``count`` fastest ranks that take their links equally long, none for too slow ones."""
    order = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))[:count]
    spare = len(speeds) - 2
    while True:  # the last one joins only if the others' links are busy for as long as its own values take
        fast = [speeds[rank] for rank in order]
        seconds = (spare + len(order)) / sum(fast)  # of a tensor; the parts come to 1
        if len(order) == 1 or seconds * fast[-1] > 1:
            break
        order.pop()
    weights = [0] * len(speeds)
    for rank in order:
        weights[rank] = max(round((seconds * speeds[rank] - 1) * SCALE), 1) if len(order) > 1 else 1
    return tuple(apportion(SCALE, weights).tolist())
