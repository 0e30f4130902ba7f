"""Calibrates the simulator's clock with the measured times of moves and sums.

Links are measured pair by pair, without packing, stepping and processors that ranks share. So moves and sums
of several sizes are timed and simulated, and a factor corrects the difference: on the links for moves (with
stores, on the stores' links only, which workers share), on the bytes of sums for sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowhaul.schedule import Plan, Topology
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.hot import Processors
from rowhaul.simulate.links import Link, Links
from rowhaul.tuning.move_costs import CollectiveTimes, Timed

_SLOWER = (0.2, 100.0)  # limits of the correction of a byte's time
_LATER = (1.0, 50.0)  # and of a message's
_HALVINGS = 16  # in the search for a store's speed


@dataclass(frozen=True)
class Line:
    """Seconds that grow with a quantity, bytes or rows."""

    seconds: float  # at 0
    each: float  # per byte, or per row

    @classmethod
    def through(cls, quantity: Sequence[float], seconds: Sequence[float]) -> Line:
        """Fit a line that neither begins below 0 nor falls.

        Absolute errors count, not relative ones: disturbances add seconds to trials of any size, and would
        distort the small ones most.
        """
        x, y = np.array(quantity, np.float64), np.array(seconds, np.float64)
        (start, slope), *_ = np.linalg.lstsq(np.stack([np.ones(len(x)), x], axis=1), y, rcond=None)
        if start < 0 or slope < 0:
            start, slope = 0.0, (x * y).sum() / (x * x).sum()
        return cls(float(start), float(slope))


def calibrated(
    times: CollectiveTimes, links: Links, topology: Topology, *, shared_links: bool = True
) -> TimeModel:
    """Make a time model that reproduces the measured moves and sums, without compute.

    Args:
        times: as measured.
        links: as measured, pair by pair.
        topology: whose links they are.
        shared_links: whether sums use the links of the rows.
    """
    nothing = (0.0,) * topology.num_workers
    model = TimeModel(links, nothing)
    if not times.moves or topology.num_workers < 2:
        return model
    sizes = [int(one.plan.moves.num_bytes.sum()) for one in times.moves]
    slower, later = _factors(times.moves, model, sizes)
    summed = [one.plan.all_reduce_bytes for one in times.sums]
    if links.stores:
        # Sums show the workers' links, moves the stores', which all workers share: no pair shows that.
        slower, _ = _factors(times.sums, model, summed)
        links = _store_speeds(times.moves, _adjusted(links, min(slower, 1.0), later), sizes)
    else:
        links = _adjusted(links, slower, later)
    model = TimeModel(links, nothing, dense_links=None if shared_links else Links(links.workers, ()))
    slower, _ = _factors(times.sums, model, summed)
    return replace(model, sum_weight=slower)


def _store_speeds(timed: Sequence[Timed], links: Links, sizes: Sequence[int]) -> Links:
    """Set the stores' speed so that the simulated time of a byte equals the measured one."""
    measured = Line.through(sizes, [one.seconds for one in timed]).each
    fast, slow = _SLOWER
    for _ in range(_HALVINGS):
        middle = math.sqrt(fast * slow)
        tried = Links(links.workers, _adjusted(links, middle, 1.0).stores)
        model = TimeModel(tried, (0.0,) * len(links.workers))
        modelled = Line.through(sizes, [modelled_seconds(one.plan, model) for one in timed]).each
        fast, slow = (fast, middle) if modelled > measured else (middle, slow)
    return Links(links.workers, _adjusted(links, fast, 1.0).stores)


def processors(times: CollectiveTimes, share: float) -> Processors:
    """Return the processor time of a host for a moved and for a summed row.

    Args:
        times: as measured; CPU seconds are those of all ranks together.
        share: the part of all ranks' CPU seconds that falls on one host's processors.
    """
    if not times.moves:
        return Processors()
    moved = Line.through(
        [len(one.plan.moves) for one in times.moves], [one.cpu_seconds for one in times.moves]
    )
    summed = Line.through(
        [one.plan.all_reduce_rows for one in times.sums], [one.cpu_seconds for one in times.sums]
    )
    return Processors(0.0, moved.each * share, summed.each * share)


def _factors(timed: Sequence[Timed], model: TimeModel, sizes: Sequence[int]) -> tuple[float, float]:
    """Return how much longer bytes, and messages, take than in the model."""
    measured = Line.through(sizes, [one.seconds for one in timed])
    modelled = Line.through(sizes, [modelled_seconds(one.plan, model) for one in timed])
    slower = measured.each / max(modelled.each, 1e-15)
    later = measured.seconds / max(modelled.seconds, 1e-9)
    return float(np.clip(slower, *_SLOWER)), float(np.clip(later, *_LATER))


def modelled_seconds(plan: Plan, model: TimeModel) -> float:
    """Simulate a single plan."""
    clock = Clock(model, range(plan.num_workers))
    clock.observe(plan)
    return clock.finish()


def _adjusted(links: Links, slower: float, later: float) -> Links:
    def adjusted(some: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(Link(one.bytes_per_second / slower, one.latency_seconds * later) for one in some)

    return Links(adjusted(links.workers), adjusted(links.stores))
