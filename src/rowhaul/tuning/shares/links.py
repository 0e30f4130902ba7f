"""The links of all ranks as measured, as the simulator wants them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rowhaul.cluster.cluster import Cluster
from rowhaul.schedule import ScheduleSettings, Topology
from rowhaul.simulate.links import Link, Links
from rowhaul.transport.base import Collective
from rowhaul.transport.base import Links as Connections
from rowhaul.transport.calibration import LinkMeasurements, measure_links

SLOW_STORE = 2.0  # a store is slow if workers are this much faster among themselves


@dataclass(frozen=True)
class MeasuredLinks:
    """The speed and latency of each rank's link, workers first."""

    bytes_per_second: tuple[float, ...]
    latency_seconds: tuple[float, ...]

    @classmethod
    def measure(cls, cluster: Cluster) -> MeasuredLinks:
        """Measure the links of all ranks; a collective call before training."""
        return cls.measure_over(cluster.moves, cluster.control, cluster.topology)

    @classmethod
    def measure_over(cls, moves: Connections, control: Collective, topology: Topology) -> MeasuredLinks:
        """Measure the links of all ranks over these connections; a collective call."""
        measured = measure_links(moves, control)
        others = np.where(np.eye(measured.num_ranks, dtype=bool), np.inf, measured.latency_seconds)
        # A message occupies both of its ends: each gets half of its latency.
        latencies = tuple((others.min(axis=1) / 2).tolist())
        return cls(_own_speeds(measured, topology), latencies)

    def for_time_model(self, settings: ScheduleSettings) -> Links:
        """Convert to the simulator's links."""
        links = list(map(Link, self.bytes_per_second, self.latency_seconds))
        workers = settings.topology.num_workers
        stores = None if settings.topology.colocated else tuple(links[workers:])
        return Links.make(settings.topology, tuple(links[:workers]), stores)

    def largest_change(self, others: MeasuredLinks) -> float:
        """The factor, at least 1, by which the speed of a link differs most from other measurements."""
        pairs = zip(self.bytes_per_second, others.bytes_per_second, strict=True)
        return max(max(one / other, other / one) for one, other in pairs)


def _own_speeds(measured: LinkMeasurements, topology: Topology) -> tuple[float, ...]:
    """Estimate the speed of each rank's own link from those of pairs.

    A pair is as fast as the slower of its links. A worker's pairs with stores count, unless workers are much
    faster among themselves: then the store is slow. Otherwise a store is assumed to be as fast as all
    workers together: its speed cannot be measured over slower links.
    """
    workers = topology.num_workers
    if topology.colocated:
        return measured.rank_speeds()
    pairs = measured.both_ways_bytes_per_second
    with_stores = np.median(pairs[:workers, workers:], axis=1)
    among = np.where(np.eye(workers, dtype=bool), 0.0, pairs[:workers, :workers]).max(axis=1)
    held_back = among > SLOW_STORE * with_stores
    speeds = np.where(held_back, among, with_stores)
    store = float(with_stores.max()) if held_back.any() else float(speeds.sum())
    return (*speeds.tolist(), *([store] * topology.num_stores))
