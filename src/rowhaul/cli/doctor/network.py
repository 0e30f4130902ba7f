"""Checks of the network that several machines would train over.

Gloo binds to the interface named by GLOO_SOCKET_IFNAME, or else to the address that the host's own
name resolves to. On many distributions that is 127.0.0.1: a cluster then hangs while each
machine talks to itself. `Network.here` gathers the facts; the checks judge them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from rowhaul.cli.doctor.machine import Check

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Network:
    """The interfaces that are up, the one that leads out, and the name and addresses of this host."""

    interfaces: Mapping[str, tuple[str, ...]]  # name -> IPv4 and IPv6 addresses
    routed: str | None
    hostname: str
    host_addresses: tuple[str, ...]
    chosen: str | None  # the value of GLOO_SOCKET_IFNAME

    @classmethod
    def here(cls) -> Network:
        """Inspect this machine; nothing is sent."""
        import psutil

        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        interfaces = {
            name: tuple(one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))
            for name, addresses in psutil.net_if_addrs().items()
            if name in up
        }
        outgoing = _outgoing_address()
        return cls(
            interfaces={name: addresses for name, addresses in interfaces.items() if addresses},
            routed=next((name for name, found in interfaces.items() if outgoing in found), None),
            hostname=socket.gethostname(),
            host_addresses=_resolve(socket.gethostname()),
            chosen=os.environ.get(INTERFACE_VARIABLE),
        )

    @property
    def best(self) -> str | None:
        """The interface to train over: the one that leads out, else any that is not the loopback."""
        others = [
            name for name, addresses in self.interfaces.items() if not all(map(_is_loopback, addresses))
        ]
        return self.routed or (others[0] if others else None)


def check_interfaces(network: Network) -> Check:
    """Which interface training would use, and whether it exists."""
    addresses = [f"{name}: {', '.join(found)}" for name, found in network.interfaces.items()]
    listed = "; ".join(addresses) or "none is up"
    if not network.chosen:
        leads = f"{network.best} leads to other machines" if network.best else "none leads to other machines"
        return Check("interfaces", "ok", f"{listed} ({leads})")
    missing = [name for name in network.chosen.split(",") if name not in network.interfaces]
    if missing:
        problem = f"{missing[0]!r} is not up with an address ({listed})"
        detail = f"{INTERFACE_VARIABLE}={network.chosen}, but {problem}"
        return Check("interfaces", "fail", detail, _set_variable(network))
    return Check("interfaces", "ok", f"{INTERFACE_VARIABLE}={network.chosen} is used ({listed})")


def check_hostname(network: Network) -> Check:
    """Whether other machines could reach the address that this host's name resolves to."""
    if not network.host_addresses:
        detail = f"{network.hostname!r} does not resolve to an address"
    else:
        detail = f"{network.hostname!r} is {', '.join(network.host_addresses)}"
    if network.chosen:
        return Check("host name", "ok", f"{detail}; {INTERFACE_VARIABLE} decides instead")
    if network.best is None:
        return Check("host name", "ok", f"{detail}; there is no network to other machines")
    if not network.host_addresses:
        detail += ": several machines could not train together"
        return Check("host name", "warn", detail, _set_variable(network))
    if all(map(_is_loopback, network.host_addresses)):
        detail += ", which only this machine can reach: several machines could not train together"
        return Check("host name", "warn", detail, _set_variable(network))
    return Check("host name", "ok", detail)


def check_gloo() -> Check:
    """Whether a process group forms and reduces, as a training run would form it."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        fix = "run `pip install --force-reinstall torch` to get a build with torch.distributed"
        return Check("Gloo", "fail", "this build of torch has no Gloo", fix)
    timeout = timedelta(seconds=10)
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout)  # type: ignore[attr-defined]  # compiled
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        detail = f"a process group of one cannot form: {str(error).strip().splitlines()[0]}"
        return Check("Gloo", "fail", detail, f"run `export {INTERFACE_VARIABLE}=lo`")
    return Check("Gloo", "ok", "a process group of one forms and reduces")


def _set_variable(network: Network) -> str:
    if network.best is None:
        return f"run `unset {INTERFACE_VARIABLE}`"
    return f"run `export {INTERFACE_VARIABLE}={network.best}` on this machine"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _resolve(hostname: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _outgoing_address() -> str | None:
    """The address from which a far machine would be reached. A UDP socket sends nothing to find it."""
    far_away = ("198.51.100.1", 9)  # TEST-NET-2 of RFC 5737: belongs to nobody
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(far_away)
        except OSError:
            return None
        return str(probe.getsockname()[0])
