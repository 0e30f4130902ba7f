"""The network as the time model sees it: one full-duplex link per worker and per store."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul._quantities import parse_for_each, parse_seconds, parse_speed
from rowhaul.errors import ConfigError
from rowhaul.schedule.topology import Topology

MOST_UNEQUAL = 1_000_000  # as far apart as the speeds of links may be: costs are counted in whole numbers

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """What connects a node to the network: bytes a second each way, and seconds that every message costs."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < math.inf:
            raise ConfigError(f"a link's speed must be positive and finite; got {self.bytes_per_second}")
        if not 0 <= self.latency_seconds < math.inf:
            raise ConfigError(f"a link's latency must be finite and not negative; got {self.latency_seconds}")

    def __str__(self) -> str:
        bits = self.bytes_per_second * 8
        scale, unit = next(
            pair for pair in ((1e9, "gbit"), (1e6, "mbit"), (1e3, "kbit"), (0, "bit")) if bits >= pair[0]
        )
        latency = f"@{self.latency_seconds * 1e3:g}ms" if self.latency_seconds else ""
        return f"{bits / (scale or 1):g}{unit}{latency}"


@dataclass(frozen=True)
class Links:
    """The links of a cluster. ``stores`` is empty where workers store the rows themselves."""

    workers: tuple[Link, ...]
    stores: tuple[Link, ...]

    @classmethod
    def make(
        cls, topology: Topology, workers: tuple[Link, ...], stores: tuple[Link, ...] | None = None
    ) -> Links:
        """The links of all ranks of a topology.

        Without ``stores`` every store is as fast as all workers together: it is never what an
        iteration waits for.
        """
        if len(workers) != topology.num_workers:
            raise ConfigError(f"links name {len(workers)} workers, but there are {topology.num_workers}")
        if topology.colocated:
            if stores is not None:
                raise ConfigError("co-located stores share the workers' links; leave the stores' links out")
            return cls(workers, ())
        if stores is None:
            together = sum(link.bytes_per_second for link in workers)
            stores = (Link(together),) * topology.num_stores
        if len(stores) != topology.num_stores:
            raise ConfigError(f"links name {len(stores)} stores, but there are {topology.num_stores}")
        return cls(workers, stores)

    @property
    def worker_speeds(self) -> tuple[float, ...]:
        """Bytes a second of each worker."""
        return tuple(link.bytes_per_second for link in self.workers)

    def rank_speeds(self) -> Floats:
        """Bytes a second of every rank, workers first."""
        return np.array([link.bytes_per_second for link in (*self.workers, *self.stores)])

    def rank_latencies(self) -> Floats:
        """Seconds per message of every rank, workers first."""
        return np.array([link.latency_seconds for link in (*self.workers, *self.stores)])

    def classes(self) -> dict[Link, tuple[int, ...]]:
        """The workers that have the same link, fastest link first."""
        by_link: dict[Link, list[int]] = {}
        for worker, link in enumerate(self.workers):
            by_link.setdefault(link, []).append(worker)
        fastest_first = sorted(by_link, key=lambda link: (-link.bytes_per_second, link.latency_seconds))
        return {link: tuple(by_link[link]) for link in fastest_first}


def parse_links(text: str, count: int, option: str, nodes: str = "workers") -> tuple[Link, ...]:
    """Links from ``5gbit*4,0.5gbit@0.2ms*4``: speed, latency if any, how many nodes."""
    links = parse_for_each(text, count, option, parse_link, nodes)
    speeds = [link.bytes_per_second for link in links]
    if max(speeds) > MOST_UNEQUAL * min(speeds):
        raise ConfigError(
            f"{option} {text}: the fastest link has more than {MOST_UNEQUAL:,} times the speed of the "
            "slowest; bring them closer together"
        )
    return links


def parse_link(text: str, option: str) -> Link:
    """One link: ``5gbit`` or, with a latency per message, ``5gbit@0.2ms``."""
    speed, _, latency = text.partition("@")
    return Link(parse_speed(speed, option), parse_seconds(latency, option) if "@" in text else 0.0)
