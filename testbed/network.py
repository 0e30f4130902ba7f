"""Brings a network of namespaces up and takes it down again, whatever happens in between.

Everything lies in namespaces of its own, bridges too: the machine's network is not touched, and no packet
can leave. A rank has two interfaces. ``haul0`` is shaped in both directions, at the sending end of either
direction, by htb (tbf with a small burst drops packets); rows travel there. ``side0`` is not shaped; dense
gradients and control messages travel there, as in the clusters of the papers.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from rowhaul.simulate.links import Link
from testbed import endings, iproute, layout, names, signals
from testbed.errors import TestbedError, TestbedUnavailable
from testbed.layout import Network

_FRAME_BYTES = 1514
_BURST_SECONDS = 0.001  # what a link that rested may send at once
_QUEUE_PACKETS = 10_000  # a link that is late queues, it does not drop

# The links of the simulator are full in both directions at once while there is something to send; TCP is made
# to use these so. Measured at 5 and 50 Mbit/s, both ways at once: bbr leaves one direction at 60 %, cubic
# leaves slow start too soon and now and then stays at 50 %, reno fills both. A window is bounded by the
# receiver's link, so that acknowledgements do not wait behind seconds of data; nothing is ever dropped.
_SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",  # the one that every kernel has and every namespace may use
    "net/ipv4/tcp_tso_rtt_log": "0",  # or TCP sends pieces of 64 KiB, each 0.1 s of a link of 5 Mbit/s
    "net/ipv6/conf/all/disable_ipv6": "1",  # it chatters on its own, and would be counted
    "net/ipv6/conf/default/disable_ipv6": "1",
}
_WINDOW_SECONDS, _LEAST_WINDOW_BYTES = 0.1, 1 << 17  # of buffer; about half of it is window


class ShapedNetwork:
    """A network for the length of a ``with`` block: one rank per link, workers first.

    It is removed when the block is left, by an exception, SIGINT, SIGTERM or SIGHUP too, after the
    processes inside were ended. What a killed owner leaves behind is removed by the next network that
    starts, or by ``python -m testbed clean``.

    Example::

        with ShapedNetwork(parse_links("50mbit*2,5mbit*2", 4, "links")) as network:
            subprocess.run(network.inside(0, ["ping", "-c1", network.haul_address(3)]))
    """

    def __init__(self, links: Sequence[Link], stores: Sequence[Link] = ()) -> None:
        self.network = Network(names.new_name(), tuple(links), tuple(stores))
        self._open = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            stack.enter_context(signals.ending_raises())
            check_available()
            remove_leftovers()
            stack.callback(self._remove)
            build(self.network)
            self._open = stack.pop_all()
        return self.network

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def _remove(self) -> None:
        if names.is_owned_here(self.network.name):  # not in a process forked off inside the block
            remove(self.network.name)


def bring_up(name: str, links: Sequence[Link], stores: Sequence[Link] = ()) -> Network:
    """A network that stays up until ``remove``; named, since it has no owner."""
    network = Network(names.kept_name(name), tuple(links), tuple(stores))
    if network.name in names.networks():
        raise TestbedError(f"a network {name!r} is up already; take it down first, or choose another --name")
    with signals.ending_raises():
        check_available()
        remove_leftovers()
        try:
            build(network)
        except BaseException:
            remove(network.name)
            raise
    return network


def check_available() -> None:
    """Raise `TestbedUnavailable` with the reason where namespaces with shaped links cannot be made."""
    if not sys.platform.startswith("linux"):
        raise TestbedUnavailable("network namespaces exist on Linux only")
    if os.geteuid() != 0:
        raise TestbedUnavailable("network namespaces take root; run as root or with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise TestbedUnavailable(f"`{tool}` is not installed; install iproute2")
    scratch = names.switch_of(names.new_name())
    try:
        iproute.ip_batch([f"netns add {scratch}"])
        iproute.ip_batch(
            ["link add name try0 type veth peer name try1", "link add name try type bridge"], scratch
        )
        iproute.tc_batch(["qdisc add dev try0 root handle 1: htb default 1"], scratch)
    except TestbedError as error:
        raise TestbedUnavailable(f"no namespaces with shaped links on this machine: {error}") from error
    finally:
        with suppress(TestbedError):
            iproute.ip_batch([f"netns delete {scratch}"])


def build(network: Network) -> None:
    """Make the namespaces, join them, shape the links."""
    iproute.ip_batch(
        f"netns add {namespace}" for namespace in (network.switch, *map(network.namespace, network.ranks))
    )
    iproute.run_inside(network.switch, ["sh", "-c", _set(_SETTINGS)])
    iproute.ip_batch(_switch_lines(network), network.switch)
    iproute.tc_batch(
        (line for rank in network.ranks for line in _shape(layout.haul_port(rank), network.links[rank])),
        network.switch,
    )
    for rank in network.ranks:
        settings = _SETTINGS | {"net/ipv4/tcp_rmem": _receive_buffer(network.links[rank])}
        iproute.run_inside(network.namespace(rank), ["sh", "-c", _set(settings)])
        iproute.ip_batch(_rank_lines(network, rank), network.namespace(rank))
        iproute.tc_batch(_shape(layout.HAUL, network.links[rank]), network.namespace(rank))


def remove(network_name: str) -> None:
    """End what runs in a network, then remove it. Signals wait until it is gone."""
    with signals.held_back(), ExitStack() as stack:
        namespaces = names.networks().get(network_name, [])
        for namespace in namespaces:  # each is tried, whatever happens to the others
            stack.callback(_delete, namespace)
        endings.end(lambda: endings.processes_in(namespaces))


def _delete(namespace: str) -> None:
    try:
        iproute.ip_batch([f"netns delete {namespace}"])
    except TestbedError:
        if (names.NAMESPACES / namespace).exists():  # otherwise somebody else was faster
            raise


def remove_leftovers() -> list[str]:
    """Remove the networks whose owner is dead; returns their names."""
    found = names.leftovers()
    for network_name in found:
        remove(network_name)
    return found


def _set(settings: Mapping[str, str]) -> str:
    """Make a shell script that applies the settings that this kernel supports."""
    return "\n".join(
        f"if [ -e /proc/sys/{path} ]; then echo '{value}' > /proc/sys/{path}; fi"
        for path, value in settings.items()
    )


def _receive_buffer(link: Link) -> str:
    """Least, first and most bytes of a socket's receive buffer."""
    most = round(max(_LEAST_WINDOW_BYTES, link.bytes_per_second * _WINDOW_SECONDS))
    return f"4096 {_LEAST_WINDOW_BYTES} {most}"


def _switch_lines(network: Network) -> Iterator[str]:
    for bridge in (layout.HAUL_BRIDGE, layout.SIDE_BRIDGE):
        # Addresses that are forgotten are flooded to every port: a quiet rank must not cost the others.
        yield f"link add name {bridge} type bridge mcast_snooping 0 ageing_time 100000000"
        yield f"link set dev {bridge} up"
    yield f"address add {network.switch_address}/{layout.PREFIX_LENGTH} dev {layout.HAUL_BRIDGE}"
    yield "link set dev lo up"
    for rank in network.ranks:
        namespace = network.namespace(rank)
        for port, bridge, name in (
            (layout.haul_port(rank), layout.HAUL_BRIDGE, layout.HAUL),
            (layout.side_port(rank), layout.SIDE_BRIDGE, layout.SIDE),
        ):
            yield f"link add name {port} type veth peer name {name} netns {namespace}"
            yield f"link set dev {port} master {bridge} up"
        yield f'link set dev {layout.haul_port(rank)} alias "{layout.description(network, rank)}"'


def _rank_lines(network: Network, rank: int) -> Iterator[str]:
    yield "link set dev lo up"
    for name, address in (
        (layout.HAUL, network.haul_address(rank)),
        (layout.SIDE, network.side_address(rank)),
    ):
        yield f"address add {address}/{layout.PREFIX_LENGTH} dev {name}"
        yield f"link set dev {name} up"


def _shape(device: str, link: Link) -> Iterator[str]:
    """Limit the traffic that leaves a device to the link's speed."""
    yield f"qdisc add dev {device} root handle 1: htb default 1"
    yield _limit("add", device, link)
    yield f"qdisc add dev {device} parent 1:1 handle 10: pfifo limit {_QUEUE_PACKETS}"


def _limit(what: str, device: str, link: Link) -> str:
    """Add or change the class that holds a device's traffic back."""
    rate = f"{round(link.bytes_per_second * 8)}bit"
    burst = round(max(_FRAME_BYTES, link.bytes_per_second * _BURST_SECONDS))
    return (
        f"class {what} dev {device} parent 1: classid 1:1 htb rate {rate} ceil {rate} "
        f"burst {burst} cburst {burst} quantum {2 * _FRAME_BYTES}"
    )


def reshape(network: Network, rank: int, link: Link) -> None:
    """Change the speed of a rank's link while it is in use, both ways; the description stays as it was."""
    iproute.tc_batch([_limit("change", layout.haul_port(rank), link)], network.switch)
    iproute.tc_batch([_limit("change", layout.HAUL, link)], network.namespace(rank))
