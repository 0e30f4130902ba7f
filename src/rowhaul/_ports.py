"""Ports for servers that start later, below those that the system gives to connections meanwhile."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port at which nobody listens, and at which none of the processes that start now will by chance."""
    end = int(_OF_CONNECTIONS.read_text().split()[0]) if _OF_CONNECTIONS.exists() else 32768
    while True:
        port = end // 2 + secrets.randbelow(end - end // 2)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # in use
                continue
            return port
