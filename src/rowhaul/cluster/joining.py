"""Joining a cluster: from a process with an environment to a connected rank with a heartbeat."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError

from rowhaul._threads import Failure
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.interface import Interface, choose, is_loopback, towards
from rowhaul.cluster.place import Place, roles_of, topology_of
from rowhaul.cluster.rendezvous import PrefixStore, Store, connect, first_line, keep_store, reach_store
from rowhaul.cluster.roll_call import PREFIX, Member, Roster, call_the_roll
from rowhaul.cluster.waiting import within
from rowhaul.errors import ClusterError
from rowhaul.transport.base import Groups, Membership, Transport
from rowhaul.transport.gloo import GlooTransport
from rowhaul.transport.local_sockets import host_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for others, in seconds."""

    master: float = 30.0  # for the rendezvous store to answer
    arrival: float = 120.0  # for all ranks to start
    connection: float = 30.0  # for all pairs of ranks to connect
    silence: float = 6.0  # without a heartbeat, before a rank counts as lost

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds > 0:
                raise ClusterError(f"timeout {name!r} must be more than 0 seconds; got {seconds}")


def join(
    num_stores: int = 1,
    colocated: bool = False,
    peer_to_peer: bool = False,
    *,
    interface: str | None = None,
    side_interface: str | None = None,
    host: str | None = None,
    timeouts: Timeouts = Timeouts(),
    transport: Transport | None = None,
    place: Place | None = None,
) -> Cluster:
    """Join the other ranks; every process that torchrun or `launch` has started calls it once.

    Of the ranks, the last ``num_stores`` store rows and the others train. Rank 0 must be reachable by all.

    Args:
        num_stores: the number of ranks that only store; not used when co-located.
        colocated: every rank trains and stores a shard.
        peer_to_peer: workers send rows to each other too.
        interface: network interface for row moves; by default ROWHAUL_INTERFACE or GLOO_SOCKET_IFNAME of the
            environment, or else the one that leads to the master.
        side_interface: network interface for dense gradients and control; by default
            ROWHAUL_SIDE_INTERFACE, or else the same.
        host: a name that the ranks of one host share, to override the detected grouping.
        timeouts: how long to wait for others.
        transport: connects the ranks; by default Gloo, with shared memory within a host.
        place: this rank's number and the master's address; by default from torchrun's variables.

    Raises:
        ClusterError: an address, port, number of ranks or option is wrong, or a rank is missing; says which.

    Example:
        >>> with join(num_stores=1) as cluster:
        ...     print(cluster.role, cluster.interface.name)
    """
    interface = interface or os.environ.get("ROWHAUL_INTERFACE")
    side_interface = side_interface or os.environ.get("ROWHAUL_SIDE_INTERFACE")
    place = place or Place.from_environment()
    topology = topology_of(place.world_size, num_stores, colocated, peer_to_peer)
    if place.keeps_store:
        keep_store(place, timeouts.master)
    first = reach_store(place, timeouts.master, interface)
    given_side = choose(side_interface, place.master_address, place.master_port) if side_interface else None
    me = Member(
        rank=place.rank,
        id=uuid.uuid4().hex,
        host=host or host_id(),
        host_name=socket.gethostname(),
        address=first.address,
        process=os.getpid(),
        topology=topology,
    )
    try:
        store = connect(place, timeouts.master, first)
        roster = within(
            timeouts.arrival + timeouts.master, lambda: call_the_roll(store, me, timeouts.arrival)
        )
        store.set_timeout(timedelta(seconds=timeouts.connection))
        own = first if interface else _avoid_loopback(first, roster)
        _log.info("rank %d uses %s (%s): %s", place.rank, own.name, own.address, own.chosen_by)
        interfaces = (own, given_side or own)
        return _connect(place, roster, store, interfaces, timeouts, transport or GlooTransport())
    except (DistError, TimeoutError) as error:
        raise ClusterError(
            f"the rendezvous store at {place.master} was lost while the ranks were joining: "
            f"{'its launcher' if place.launcher_keeps_store else 'rank 0'} has ended (see its output)"
        ) from error


def _connect(
    place: Place,
    roster: Roster,
    store: Store,
    interfaces: tuple[Interface, Interface],
    timeouts: Timeouts,
    transport: Transport,
) -> Cluster:
    """Start the heartbeat, then connect to the other ranks."""
    me, failure, prefix = roster.members[place.rank], Failure(), f"{PREFIX}/{roster.token}"
    run = PrefixStore(prefix, store)

    def another_store() -> Store:
        return PrefixStore(prefix, connect(place, timeouts.master, interfaces[0]))

    num_missed = 6
    heartbeat = Heartbeat(
        another_store(),
        place.rank,
        roles_of(me.topology.num_ranks, me.topology.num_workers),
        failure,
        store_name=f"the rendezvous store at {place.master}",
        store_rank=None if place.launcher_keeps_store else 0,
        interval=timeouts.silence / num_missed,
        num_missed=num_missed,
    )
    heartbeat.start()
    own, side = (interface.name for interface in interfaces)
    membership = Membership(place.rank, me.topology, me.host, own, side, PrefixStore("groups", run))
    try:
        groups = _connect_within(timeouts.connection, transport, membership, failure)
    except BaseException as error:
        explained = _connection_error(error, heartbeat)
        heartbeat.leave(explained)
        if explained is error:
            raise
        raise explained from error
    return Cluster(place, roster.members, interfaces, groups, run, heartbeat, failure, another_store)


def _connect_within(seconds: float, transport: Transport, membership: Membership, failure: Failure) -> Groups:
    """Connect in a thread that can be abandoned: Gloo waits forever where a firewall drops packets."""
    try:
        return within(
            seconds,
            lambda: transport.connect(membership),
            check=failure.check,
            discard=lambda groups: groups.close(),
        )
    except TimeoutError:
        names = " and ".join(dict.fromkeys((membership.interface, membership.side_interface)))
        raise ClusterError(
            f"the ranks reach the master, but not each other, over {names} (waited {seconds:g} s): Gloo "
            "connects every pair of ranks at ports the system chooses, so firewalls between the hosts must "
            "let all ports pass; if this is the wrong interface, name another"
        ) from None


def _avoid_loopback(chosen: Interface, roster: Roster) -> Interface:
    """On the master's own host its name may resolve to 127.0.0.1; then use another rank's address."""
    if not is_loopback(chosen.address):
        return chosen
    outside = [member.address for member in roster.members if not is_loopback(member.address)]
    with contextlib.suppress(OSError):  # no route
        return towards(outside[0], 1) if outside else chosen
    return chosen


def _connection_error(error: BaseException, heartbeat: Heartbeat) -> BaseException:
    """Translate errors of Gloo and of the store; name the lost rank if the heartbeat knows it."""
    if isinstance(error, ClusterError) or not isinstance(error, RuntimeError):
        return error
    explained = heartbeat.explain(ConnectionError(str(error)))
    if isinstance(explained, ClusterError):
        return explained
    return ClusterError(f"the process groups cannot be formed: {first_line(error) or 'no reason given'}")
