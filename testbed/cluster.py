"""A whole experiment in one call: a network, one process per rank, their outputs, the kernel's counters."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowhaul.simulate.links import Link
from testbed import counters
from testbed.counters import Counters
from testbed.layout import Network
from testbed.network import ShapedNetwork
from testbed.processes import RankOutput, RankProcesses


@dataclass(frozen=True)
class ClusterRun:
    """The result of a run: each rank's output, its traffic, and the seconds taken."""

    outputs: list[RankOutput]
    counters: Counters
    seconds: float


def run_cluster(
    command_of_rank: Callable[[int], Sequence[str]],
    links: Sequence[Link],
    stores: Sequence[Link] = (),
    timeout: float = 600.0,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ClusterRun:
    """Run one command per rank, workers first, in a network that exists for this run only.

    Output files stay in ``folder`` (without one: in a new temporary folder). Raises `RanksFailedError` when
    a rank ends with an error or ``timeout`` seconds pass, `TestbedUnavailable` where there can be no testbed.
    """
    with ShapedNetwork(links, stores) as network:
        return run_in(network, command_of_rank, timeout, folder=folder, environment=environment)


def run_in(
    network: Network,
    command_of_rank: Callable[[int], Sequence[str]],
    timeout: float = 600.0,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> ClusterRun:
    """As `run_cluster`, in an existing network: several runs can share one."""
    folder = folder or Path(tempfile.mkdtemp(prefix="testbed-"))
    before, begin = counters.read(network), time.monotonic()
    with RankProcesses(network, command_of_rank, folder, environment) as processes:
        outputs = processes.wait(timeout, meanwhile=meanwhile)
    return ClusterRun(outputs, counters.read(network) - before, time.monotonic() - begin)
