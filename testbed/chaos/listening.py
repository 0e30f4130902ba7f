"""Which TCP ports are open inside a namespace."""

from __future__ import annotations

from pathlib import Path

from testbed import iproute

_LISTENS = "0A"


def listening_ports(namespace: str) -> list[int]:
    """Ports at which something in a namespace listens."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in iproute.run_inside(namespace, ["cat", f"/proc/net/{table}"]).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def script(name: str) -> str:
    """The path of a script beside this file."""
    return str(Path(__file__).with_name(name))
