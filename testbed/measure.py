"""Measures the links with plain sockets, both directions at once, and compares them with their shape."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from testbed import endings, iproute
from testbed.errors import TestbedError
from testbed.layout import Network

_PROBE = Path(__file__).with_name("probe.py")
_FIRST_PORT = 5000
_SPARE_SECONDS = 30.0


@dataclass(frozen=True)
class Speeds:
    """Payload bytes a second that arrived: from the rank, and at the rank."""

    sent: float
    received: float


def measure_links(network: Network, seconds: float, together: bool) -> list[Speeds]:
    """Each rank exchanges with the bridge what its link carries in ``seconds``, alone or all at once."""
    groups = [list(network.ranks)] if together else [[rank] for rank in network.ranks]
    return [speeds for ranks in groups for speeds in _with_switch(network, ranks, seconds)]


def measure_pair(network: Network, first: int, second: int, num_bytes: int) -> Speeds:
    """Two ranks exchange ``num_bytes`` each way; the speeds are those of ``second``."""
    slowest = min(network.links[rank].bytes_per_second for rank in (first, second))
    with _Exchange(
        network.namespace(first),
        network.haul_address(first),
        network.namespace(second),
        _FIRST_PORT,
        num_bytes,
        num_bytes / slowest,
    ) as exchange:
        return exchange.result()


def _with_switch(network: Network, ranks: Sequence[int], seconds: float) -> list[Speeds]:
    with ExitStack() as stack:
        exchanges = [
            stack.enter_context(
                _Exchange(
                    network.switch,
                    network.switch_address,
                    network.namespace(rank),
                    _FIRST_PORT + rank,
                    max(1, round(network.links[rank].bytes_per_second * seconds)),
                    seconds,
                )
            )
            for rank in ranks
        ]
        return [exchange.result() for exchange in exchanges]


class _Exchange:
    """Two probes, one that listens and one that connects to it; both are ended with the ``with`` block."""

    def __init__(
        self, listening: str, address: str, connecting: str, port: int, num_bytes: int, seconds: float
    ) -> None:
        self._timeout = 4 * seconds + _SPARE_SECONDS
        arguments = [address, str(port), str(num_bytes), str(self._timeout)]
        self._probes: list[subprocess.Popen[str]] = []
        self._commands = [
            iproute.inside(namespace, [sys.executable, "-I", str(_PROBE), role, *arguments])
            for namespace, role in ((listening, "listen"), (connecting, "connect"))
        ]

    def __enter__(self) -> _Exchange:
        for command in self._commands:
            self._probes.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        endings.end(lambda: [probe.pid for probe in self._probes if probe.poll() is None])
        for probe in self._probes:
            probe.communicate()

    def result(self) -> Speeds:
        arrived = []
        for probe in self._probes:
            said, complaint = probe.communicate(timeout=self._timeout)
            if probe.returncode:
                command = " ".join(map(str, probe.args)) if isinstance(probe.args, list) else str(probe.args)
                raise TestbedError(f"`{command}` failed: {complaint.strip()}")
            arrived.append(float(said))
        return Speeds(sent=arrived[0], received=arrived[1])
