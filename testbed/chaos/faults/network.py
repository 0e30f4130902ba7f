"""Links that fail, machines that restart, strangers at the ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from testbed import endings, iproute, layout
from testbed.chaos.faults.base import Fault, LostRank
from testbed.chaos.listening import listening_ports, script


class Unplugged(LostRank):
    """Both cables of a machine are pulled."""

    name = "network of a machine cut"

    def throw(self) -> None:
        self._set("down")

    def repair(self) -> None:
        self._set("up")
        self.run.wait_for_end(self.seconds, "a rank without network ends")

    def _set(self, state: str) -> None:
        ports = (layout.haul_port(self.victim), layout.side_port(self.victim))
        iproute.ip_batch([f"link set dev {port} {state}" for port in ports], self.run.network.switch)


class LinkCutBriefly(Fault):
    """The rows' link of a machine is cut for two seconds."""

    name = "link cut for 2 s"
    promise = "training goes on"

    def throw(self) -> None:
        for state, seconds in (("down", 2.0), ("up", 0.0)):
            port = layout.haul_port(self.victim)
            iproute.ip_batch([f"link set dev {port} {state}"], self.run.network.switch)
            time.sleep(seconds)


class Throttled(Fault):
    """The rows' link of a machine becomes twenty times slower for two seconds."""

    name = "link throttled to 5 %"
    promise = "training goes on"

    def throw(self) -> None:
        usual = round(self.run.network.links[self.victim].bytes_per_second * 8)
        for rate, seconds in ((usual // 20, 2.0), (usual, 0.0)):
            change = f"class change dev {layout.haul_port(self.victim)} parent 1: classid 1:1 htb"
            iproute.tc_batch([f"{change} rate {rate}bit ceil {rate}bit"], self.run.network.switch)
            time.sleep(seconds)


class Restarted(Unplugged):
    """A machine restarts: all of its processes are killed at once, and its network comes back later."""

    name = "machine restarted"

    def throw(self) -> None:
        super().throw()
        for pid in endings.processes_in([self.run.network.namespace(self.victim)]):
            os.kill(pid, signal.SIGKILL)


class Stranger(Fault):
    """Somebody who knows no secret connects to every open port, sends garbage and stays."""

    name, promise = "stranger at every port", "training goes on"

    def throw(self) -> None:
        network = self.run.network
        targets = [
            f"{address}:{port}"
            for rank in network.ranks
            if rank != self.victim
            for port in listening_ports(network.namespace(rank))
            for address in (network.haul_address(rank), network.side_address(rank))
        ]
        knock = [sys.executable, script("stranger.py"), "1.0", *targets]
        subprocess.run(network.inside(self.victim, knock), check=True, timeout=60)
