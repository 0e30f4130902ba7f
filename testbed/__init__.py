"""A cluster on one machine: network namespaces, one per rank, with links that really are slow and unequal.

``python -m testbed --help`` lists the commands; docs/testbed.md explains them. In programs:

- `ShapedNetwork`: a network for the length of a ``with`` block;
- `run_cluster`, `run_in`: one command per rank, its outputs, and the bytes that the kernel counted;
- `TestbedUnavailable`: raised, with the reason, where there can be none (not root, no iproute2).
"""

from testbed.cluster import ClusterRun, run_cluster, run_in
from testbed.counters import Counters, Traffic
from testbed.errors import RanksFailedError, TestbedError, TestbedUnavailable
from testbed.layout import Network
from testbed.network import ShapedNetwork
from testbed.processes import RankOutput, RankProcesses

__all__ = [
    "ClusterRun",
    "Counters",
    "Network",
    "RankOutput",
    "RankProcesses",
    "RanksFailedError",
    "ShapedNetwork",
    "TestbedError",
    "TestbedUnavailable",
    "Traffic",
    "run_cluster",
    "run_in",
]
