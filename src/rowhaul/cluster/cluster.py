"""A rank's view of the cluster it has joined."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence

from rowhaul._threads import Failure
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.interface import Interface
from rowhaul.cluster.place import Place, roles_of
from rowhaul.cluster.rendezvous import PrefixStore, Store
from rowhaul.cluster.roll_call import Member
from rowhaul.errors import ClusterError
from rowhaul.transport.base import Groups


class Cluster:
    """All ranks of a run, seen from one; made by `rowhaul.cluster.join`, a context manager.

    Leaving the context with an error reports it to the other ranks.

    Attributes:
        place: the variables this process was started with.
        rank: of this process.
        topology: workers and stores.
        role: of this rank, for instance ``worker 3``.
        roles: of all ranks.
        members: where each rank runs.
        interface: the network interface of row moves, and why it was chosen.
        side_interface: the one of dense gradients, control messages and data.
        hosts: the ranks of each host.
        local_ranks: the ranks of this host.
        leader: the highest of them; it plans for its host.
        moves: links between all ranks, for rows.
        dense: collective of the workers; None on a store.
        control: collective of all ranks.
        data: links between all ranks, for samples that only rank 0 can read.
        store: the rendezvous store, for a few small values. Used by one thread, as it blocks.
        failure: the first error of this rank.
        heartbeat: detects lost and stuck ranks.
        secret: of the run, which every connecting process must prove; None: there is none.
    """

    def __init__(
        self,
        place: Place,
        members: Sequence[Member],
        interfaces: tuple[Interface, Interface],
        groups: Groups,
        store: Store,
        heartbeat: Heartbeat,
        failure: Failure,
        open_store: Callable[[], Store],
        secret: bytes | None = None,
    ) -> None:
        self.place, self.rank, self.members = place, place.rank, tuple(members)
        self.topology = self.members[self.rank].topology
        self.roles = roles_of(self.topology.num_ranks, self.topology.num_workers)
        self.role = self.roles[self.rank]
        self.interface, self.side_interface = interfaces
        ranks: dict[str, list[int]] = {}
        for member in members:
            ranks.setdefault(member.host, []).append(member.rank)
        self.hosts = tuple(map(tuple, ranks.values()))
        self.local_ranks = next(ranks for ranks in self.hosts if self.rank in ranks)
        self.leader = max(self.local_ranks)
        self.moves, self.data = groups.moves, groups.data
        self.dense, self.control = groups.dense, groups.control
        self.store = PrefixStore("shared", store)
        self.failure, self.heartbeat, self.secret = failure, heartbeat, secret
        self._groups, self._open_store = groups, open_store
        self._meetings: dict[str, int] = {}
        self._is_open = True
        atexit.register(self._at_exit)

    @property
    def num_ranks(self) -> int:
        """The number of workers and dedicated stores."""
        return self.topology.num_ranks

    @property
    def is_worker(self) -> bool:
        """Whether this rank trains."""
        return self.rank < self.topology.num_workers

    @property
    def has_abstract_sockets(self) -> bool:
        """Whether the ranks of this host reach each other at names without files.

        Ranks that were grouped by hand may be in several network namespaces; files may be in several
        containers.
        """
        namespaces = {self.members[rank].namespace for rank in self.local_ranks}
        return sys.platform == "linux" and len(namespaces) == 1

    def next_meeting(self, what: str) -> int:
        """Count collective calls of one kind: the same number on all ranks that make the same calls."""
        self._meetings[what] = self._meetings.get(what, -1) + 1
        return self._meetings[what]

    def another_store(self) -> Store:
        """Open another connection to the rendezvous store, for another thread."""
        return PrefixStore("shared", self._open_store())

    def close(self, error: BaseException | None = None) -> None:
        """Leave: report success or the error to the other ranks, and close the connections.

        Close the executors that use them first.
        """
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        self.heartbeat.leave(error if error is not None else self.failure.error)
        self._groups.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
        if error is not None and (explained := self.heartbeat.explain(error)) is not error:
            raise explained from error  # a broken connection, by the rank that is gone

    def _at_exit(self) -> None:
        cause = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.close(cause or ClusterError("the process ended without closing its cluster"))
