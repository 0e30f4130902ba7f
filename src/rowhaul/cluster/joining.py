"""Joining a cluster: from a process with an environment to a connected rank with a heartbeat."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from torch.distributed import DistError

from rowhaul._proof import BrokenProofError
from rowhaul._threads import Failure
from rowhaul.cluster.announcement import first_line
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.interface import Interface, choose, is_loopback, towards
from rowhaul.cluster.neighbours import NeighbourProbe
from rowhaul.cluster.place import Place, require_linux, roles_of, topology_of
from rowhaul.cluster.rendezvous import (
    PrefixStore,
    Store,
    StoreAddress,
    connect,
    host_store,
    reach_store,
)
from rowhaul.cluster.roll_call import PREFIX, Member, Roster, call_the_roll
from rowhaul.cluster.secret import load_secret
from rowhaul.cluster.waiting import within
from rowhaul.cluster.watchdog.settings import Settings
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
    silence: float = 8.0  # without a heartbeat, before a rank counts as lost
    stall: float = 20.0  # without progress, before the ranks that the others wait for are named
    stuck: float = 1800.0  # the same, before the run ends; 0: never

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds > 0 and not (name == "stuck" and seconds == 0):
                raise ClusterError(f"timeout {name!r} must be more than 0 seconds; got {seconds}")


def join(
    num_stores: int = 1,
    colocated: bool = False,
    peer_to_peer: bool = False,
    *,
    interface: str | None = None,
    side_interface: str | None = None,
    host: str | None = None,
    secret_file: str | None = None,
    timeouts: Timeouts = Timeouts(),
    transport: Transport | None = None,
    place: Place | None = None,
    stacks: bool = False,
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
        secret_file: holds the secret that every rank must prove; by default ROWHAUL_SECRET does, or no
            proof is asked for. Ranks that `launch` has started have a secret already.
        timeouts: how long to wait for others.
        transport: connects the ranks; by default Gloo, with shared memory within a host.
        place: this rank's number and the master's address; by default from torchrun's variables.
        stacks: log the stacks of all threads of a rank that the others wait for.

    Raises:
        ClusterError: an address, port, number of ranks or option is wrong, or a rank is missing; says which.
        SecretError: the secret cannot be used, or is not the one of the other ranks.

    Example:
        >>> with join(num_stores=1) as cluster:
        ...     print(cluster.role, cluster.interface.name)
    """
    require_linux()
    interface = interface or os.environ.get("ROWHAUL_INTERFACE")
    side_interface = side_interface or os.environ.get("ROWHAUL_SIDE_INTERFACE")
    place = place or Place.from_environment()
    topology = topology_of(place.world_size, num_stores, colocated, peer_to_peer)
    secret = load_secret(None if place.launcher_keeps_store else secret_file)
    if place.keeps_store:
        host_store(place, secret, timeouts.master, interface)
    given_side = choose(side_interface, place.master_address, place.master_port) if side_interface else None
    address, deadline = StoreAddress((place.master_address,), place.master_port), 0.0
    try:
        with NeighbourProbe(secret) as probe:
            while True:
                store, address, first = reach_store(place, secret, timeouts.master, interface)
                me = Member(
                    rank=place.rank,
                    id=uuid.uuid4().hex,
                    host=host or host_id(),
                    host_name=socket.gethostname(),
                    address=first.address,
                    process=os.getpid(),
                    topology=topology,
                    namespace=host_id(),
                    probe="" if host else probe.address,
                )
                call = partial(call_the_roll, store, me, timeouts.arrival)
                try:
                    roster = within(timeouts.arrival + timeouts.master, call)
                    break
                except (DistError, ConnectionError):
                    # When torchrun restarts ranks, the store may be that of a rank 0 that is about to end.
                    deadline = deadline or time.monotonic() + timeouts.arrival
                    if address.port == place.master_port or time.monotonic() > deadline:
                        raise
            store.set_timeout(timedelta(seconds=timeouts.connection))
            own = first if interface else _avoid_loopback(first, roster)
            _log.info("rank %d uses %s (%s): %s", place.rank, own.name, own.address, own.chosen_by)
            interfaces = (own, given_side or own)
            door = _Door(address, secret, store, probe)
            return _connect(place, roster, door, interfaces, timeouts, transport or GlooTransport(), stacks)
    except (DistError, ConnectionError, TimeoutError, BrokenProofError) as error:
        raise ClusterError(
            f"the rendezvous store at {address.name} was lost while the ranks were joining: "
            f"{'its launcher' if place.launcher_keeps_store else 'rank 0'} has ended (see its output)"
        ) from error


@dataclass(frozen=True)
class _Door:
    """The rendezvous store, what it takes to connect to it again, and one connection; this rank's probe."""

    address: StoreAddress
    secret: bytes | None = field(repr=False)
    store: Store
    probe: NeighbourProbe


def _connect(
    place: Place,
    roster: Roster,
    door: _Door,
    interfaces: tuple[Interface, Interface],
    timeouts: Timeouts,
    transport: Transport,
    stacks: bool,
) -> Cluster:
    """Start the heartbeat, then connect to the other ranks."""
    topology, failure = roster.members[place.rank].topology, Failure()
    prefix = f"{PREFIX}/{roster.token}"
    run = PrefixStore(prefix, door.store)

    def another_store() -> Store:
        return PrefixStore(prefix, connect(door.address, door.secret, timeouts.master))

    num_missed = 8
    watchdog = Settings(
        rank=place.rank,
        process=os.getpid(),
        token=roster.token,
        roles=roles_of(topology.num_ranks, topology.num_workers),
        addresses=tuple(member.address for member in roster.members),
        listen=interfaces[0].address,
        secret=door.secret,
        interval=timeouts.silence / num_missed,
        num_missed=num_missed,
        first_missed=max(num_missed, round(timeouts.connection / timeouts.silence * num_missed)),
        warn_seconds=timeouts.stall,
        end_seconds=timeouts.stuck,
        stacks=stacks,
    )
    heartbeat = Heartbeat(watchdog, failure, keeps_store=place.keeps_store)
    heartbeat.start()
    own, side = (interface.name for interface in interfaces)
    try:
        heartbeat.meet(run, timeouts.connection)
        if place.launcher_keeps_store:
            heartbeat.watch_store(another_store(), f"the rendezvous store at {door.address.name}")
        members = within(
            timeouts.connection,
            lambda: door.probe.confirm(run, roster.members, place.rank),
            check=failure.check,
        )
        host, groups_store = members[place.rank].host, PrefixStore("groups", run)
        membership = Membership(place.rank, topology, host, own, side, groups_store, door.secret)
        groups = _connect_within(timeouts.connection, transport, membership, failure)
    except BaseException as error:
        explained = _connection_error(error, heartbeat)
        heartbeat.leave(explained)
        if explained is error:
            raise
        raise explained from error
    return Cluster(place, members, interfaces, groups, run, heartbeat, failure, another_store, door.secret)


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
