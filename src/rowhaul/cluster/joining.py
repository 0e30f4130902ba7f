"""Joining a cluster: from a process with an environment to a rank with groups and a heartbeat."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError

from rowhaul._threads import Failure
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.groups import form_groups
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.interface import Interface, choose, is_loopback, towards
from rowhaul.cluster.place import Place, roles_of, topology_of
from rowhaul.cluster.rendezvous import PrefixStore, Store, connect, keep_store, reach_store
from rowhaul.cluster.roll_call import PREFIX, Member, Roster, call_the_roll
from rowhaul.cluster.waiting import within
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology
from rowhaul.transport.local_sockets import host_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for others, in seconds."""

    master: float = 30.0  # until the rendezvous store answers
    arrival: float = 120.0  # until all ranks are there
    connection: float = 30.0  # until all pairs of ranks are connected
    silence: float = 6.0  # without a heartbeat, until a rank is lost

    def __post_init__(self) -> None:
        for name in ("master", "arrival", "connection", "silence"):
            if not getattr(self, name) > 0:
                raise ClusterError(f"timeout {name!r} must be more than 0 seconds; got {getattr(self, name)}")


def join(
    num_stores: int = 1,
    colocated: bool = False,
    peer_to_peer: bool = False,
    *,
    interface: str | None = None,
    side_interface: str | None = None,
    host: str | None = None,
    timeouts: Timeouts = Timeouts(),
) -> Cluster:
    """Join the other ranks; every process that torchrun or `launch` has started calls it once.

    Of the ranks, the last ``num_stores`` store rows and the others train. Rank 0 must be reachable by all.

    Args:
        num_stores: how many ranks only store; not used when co-located.
        colocated: every rank trains and stores a shard.
        peer_to_peer: workers send rows to each other too.
        interface: network interface for row moves; by default ROWHAUL_INTERFACE or GLOO_SOCKET_IFNAME of the
            environment, or else the one that leads to the master.
        side_interface: network interface for dense gradients and control; by default
            ROWHAUL_SIDE_INTERFACE, or else the same.
        host: a name that the ranks of one host share, to group them differently from what they find out.
        timeouts: how long to wait for others.

    Raises:
        ClusterError: an address, port, number of ranks or option is wrong, or a rank is missing; says which.

    Example:
        >>> with join(num_stores=1) as cluster:
        ...     print(cluster.role, cluster.interface.name)
    """
    interface = interface or os.environ.get("ROWHAUL_INTERFACE")
    side_interface = side_interface or os.environ.get("ROWHAUL_SIDE_INTERFACE")
    place = Place.from_environment()
    topology = topology_of(place.world_size, num_stores, colocated, peer_to_peer)
    if place.keeps_store:
        keep_store(place, timeouts.master)
    first = reach_store(place, timeouts.master, interface)
    given_side = choose(side_interface, place.master_address, place.master_port) if side_interface else None
    with _told_when_the_store_goes(place):
        store = connect(place, timeouts.master, first)
        me = _introduce(place, topology, first, host)
        patience = timeouts.arrival + timeouts.master
        roster = within(patience, lambda: call_the_roll(store, me, timeouts.arrival))
        store.set_timeout(timedelta(seconds=timeouts.connection))
        own = first if interface else _avoid_loopback(first, roster)
        side = given_side or own
        _log.info("rank %d talks over %s (%s): %s", place.rank, own.name, own.address, own.chosen_by)
        return _assemble(place, roster, store, (own, side), timeouts)


def _assemble(
    place: Place,
    roster: Roster,
    store: Store,
    interfaces: tuple[Interface, Interface],
    timeouts: Timeouts,
) -> Cluster:
    topology, failure = roster.members[place.rank].topology, Failure()
    run = PrefixStore(f"{PREFIX}/{roster.token}", store)
    heartbeat = _heartbeat(place, roster, failure, timeouts, interfaces[0])
    heartbeat.start()
    try:
        groups = form_groups(
            PrefixStore("groups", run),
            place.rank,
            topology,
            interfaces[0].name,
            interfaces[1].name,
            roster.members[place.rank].host,
            timeouts.connection,
            failure.check,
        )
    except BaseException as error:
        explained = _formation_error(error, heartbeat)
        heartbeat.leave(explained)
        if explained is error:
            raise
        raise explained from error
    return Cluster(place, topology, roster.members, interfaces, groups, run, heartbeat, failure)


def _heartbeat(
    place: Place, roster: Roster, failure: Failure, timeouts: Timeouts, interface: Interface
) -> Heartbeat:
    topology = roster.members[place.rank].topology
    num_missed = 6
    return Heartbeat(
        PrefixStore(f"{PREFIX}/{roster.token}", connect(place, timeouts.master, interface)),
        place.rank,
        roles_of(topology.num_ranks, topology.num_workers),
        failure,
        store_name=f"the rendezvous store at {place.master}",
        store_rank=None if place.launcher_keeps_store else 0,
        interval=timeouts.silence / num_missed,
        num_missed=num_missed,
    )


def _introduce(place: Place, topology: Topology, interface: Interface, host: str | None) -> Member:
    return Member(
        rank=place.rank,
        id=uuid.uuid4().hex,
        host=host or host_id(),
        host_name=socket.gethostname(),
        address=interface.address,
        process=os.getpid(),
        topology=topology,
    )


def _avoid_loopback(chosen: Interface, roster: Roster) -> Interface:
    """On the master's own host its name may stand for 127.0.0.1; then go by another rank's address."""
    if not chosen.is_loopback:
        return chosen
    outside = [member.address for member in roster.members if not is_loopback(member.address)]
    with contextlib.suppress(OSError):  # no route: then stay
        return towards(outside[0], 1) if outside else chosen
    return chosen


def _formation_error(error: BaseException, heartbeat: Heartbeat) -> BaseException:
    """Gloo's errors, and the store's, in our words; the rank behind them where the heartbeat knows it."""
    if isinstance(error, ClusterError) or not isinstance(error, RuntimeError):
        return error
    explained = heartbeat.explain(ConnectionError(str(error)))
    if isinstance(explained, ClusterError):
        return explained
    reason = next(iter(str(error).strip().splitlines()), "no reason given")
    return ClusterError(f"the process groups cannot be formed: {reason}")


@contextlib.contextmanager
def _told_when_the_store_goes(place: Place) -> Iterator[None]:
    try:
        yield
    except (DistError, TimeoutError) as error:
        raise ClusterError(
            f"the rendezvous store at {place.master} has gone while the ranks were joining: "
            f"{'its launcher' if place.launcher_keeps_store else 'rank 0'} has ended (see its output)"
        ) from error
