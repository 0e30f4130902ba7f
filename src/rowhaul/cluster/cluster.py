"""A rank's view of the cluster it has joined."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from types import TracebackType

from rowhaul._threads import Failure
from rowhaul.cluster.groups import Groups
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.interface import Interface
from rowhaul.cluster.place import Place, roles_of
from rowhaul.cluster.rendezvous import PrefixStore, Store
from rowhaul.cluster.roll_call import Member
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology
from rowhaul.transport.base import Collective, KeyValueStore, Links
from rowhaul.transport.collectives import RankCollective, RankLinks


class Cluster:
    """All ranks of a run, seen from one; made by `rowhaul.cluster.join`, a context manager.

    Leaving it with an error tells the other ranks what it was; leaving it without says goodbye.

    Attributes:
        place: the variables this process was started with.
        rank: of this process.
        topology: workers and stores.
        role: of this rank in words, for instance ``worker 3``.
        roles: of all ranks.
        members: where each rank runs.
        interface: the network interface that row moves use, and why.
        side_interface: the one that dense gradients, control messages and data use.
        hosts: the ranks of each host.
        local_ranks: the ranks of this host.
        leader: the highest of them; it plans for its host.
        moves: messages between pairs of ranks.
        dense: what workers do together; None on a store.
        control: what all ranks do together.
        data: messages between pairs of ranks, for samples that only rank 0 can read.
        store: a few small values shared by all ranks. Used by one thread, as it blocks.
        failure: the first error of this rank.
        heartbeat: tells which ranks are lost.
    """

    def __init__(
        self,
        place: Place,
        topology: Topology,
        members: Sequence[Member],
        interfaces: tuple[Interface, Interface],
        groups: Groups,
        store: Store,
        heartbeat: Heartbeat,
        failure: Failure,
    ) -> None:
        self.place, self.rank, self.topology, self.members = place, place.rank, topology, tuple(members)
        self.roles = roles_of(topology.num_ranks, topology.num_workers)
        self.role = self.roles[self.rank]
        self.interface, self.side_interface = interfaces
        self.hosts = _hosts(self.members)
        self.local_ranks = next(ranks for ranks in self.hosts if self.rank in ranks)
        self.leader = max(self.local_ranks)
        self.moves: Links = RankLinks(groups.moves)
        self.dense: Collective | None = None if groups.dense is None else RankCollective(groups.dense)
        self.control: Collective = RankCollective(groups.control)
        self.data: Links = RankLinks(groups.data)
        self._shared = PrefixStore("shared", store)
        self.store: KeyValueStore = self._shared
        self.failure, self.heartbeat = failure, heartbeat
        self._groups = groups
        self._meetings: dict[str, int] = {}
        self._is_open = True
        atexit.register(self._at_exit)

    @property
    def num_ranks(self) -> int:
        """Workers and dedicated stores."""
        return self.topology.num_ranks

    @property
    def is_worker(self) -> bool:
        """Whether this rank trains."""
        return self.rank < self.topology.num_workers

    def next_meeting(self, what: str) -> int:
        """The number of a collective call of one kind, equal on all ranks if they make the same calls."""
        self._meetings[what] = self._meetings.get(what, -1) + 1
        return self._meetings[what]

    def forget(self, key: str) -> None:
        """Remove a key from the store; it may be gone already."""
        self._shared.delete_key(key)

    def close(self, error: BaseException | None = None) -> None:
        """Leave: say goodbye, or what went wrong, to the other ranks and give up the groups.

        Close the lanes that use the groups first.
        """
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        self.heartbeat.leave(error if error is not None else self.failure.error)
        self._groups.destroy()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _at_exit(self) -> None:
        cause = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.close(cause or ClusterError("the process ended without closing its cluster"))


def _hosts(members: Sequence[Member]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[str, list[int]] = {}
    for member in members:
        ranks.setdefault(member.host, []).append(member.rank)
    return tuple(tuple(one) for one in ranks.values())
