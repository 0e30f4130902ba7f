"""The roll call: ranks agree, through the rendezvous store, on the processes that make up a run.

A store outlives a run: torchrun keeps it when it restarts the ranks, so it may still hold the keys of dead
processes, and torchrun's count of restarts differs between hosts. Therefore rank 0 calls with a new token,
all ranks answer the newest call, and the run begins when rank 0 has written the roster. A rank whose own id
is not in it has read an old one, and waits for the next call. All keys of the run start with the token.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rowhaul.cluster.place import roles_of
from rowhaul.cluster.rendezvous import PrefixStore, Store
from rowhaul.cluster.waiting import ranks_text
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology

PREFIX = "rowhaul"

_PAUSE = 0.1  # seconds between two checks
_SILENCE = 3.0  # seconds without a sign of rank 0 after which its call counts as an old one


@dataclass(frozen=True)
class Member:
    """One process of the run."""

    rank: int
    id: str  # of this process and this call of join
    host: str  # equal where memory can be shared
    host_name: str
    address: str
    process: int
    topology: Topology
    namespace: str = ""  # equal where abstract sockets reach
    probe: str = ""  # address of its `NeighbourProbe`; empty: nothing to find out


@dataclass(frozen=True)
class Roster:
    """All processes of a run, and the prefix of its keys."""

    token: str
    members: tuple[Member, ...]


def call_the_roll(store: Store, me: Member, seconds: float) -> Roster:
    """Wait for all ranks of the topology; raise an error that names the missing ones."""
    store = PrefixStore(PREFIX, store)
    roster = _call(store, me, seconds) if me.rank == 0 else _answer(store, me, seconds)
    _check_topologies(roster.members)
    return roster


def _call(store: Store, me: Member, seconds: float) -> Roster:
    token, num_ranks = uuid.uuid4().hex, me.topology.num_ranks
    run = PrefixStore(token, store)
    run.set(_arrival(0), json.dumps(asdict(me)))
    store.set("call", json.dumps({"token": token, "num_ranks": num_ranks}))
    deadline = time.monotonic() + seconds
    while missing := _missing(run, num_ranks):
        run.add("calling", 1)
        if time.monotonic() > deadline:
            error = _absent(missing, me.topology, seconds)
            run.set("refused", str(error))
            time.sleep(4 * _PAUSE)  # the store may be in this process: the others must read it first
            raise error
        time.sleep(_PAUSE)
    members = [_member(json.loads(text)) for text in run.multi_get(list(map(_arrival, range(num_ranks))))]
    run.set("roster", json.dumps([asdict(member) for member in members]))
    return Roster(token, tuple(members))


def _answer(store: Store, me: Member, seconds: float) -> Roster:
    deadline, num_ranks = time.monotonic() + seconds, me.topology.num_ranks
    rank_0 = _Signs()
    run: Store | None = None
    call: dict[str, Any]
    while time.monotonic() <= deadline:
        call = json.loads(store.get("call")) if store.check(["call"]) else {"token": ""}
        if call["token"] != rank_0.token:
            if call["num_ranks"] != num_ranks:
                raise ClusterError(
                    f"rank 0 waits for {call['num_ranks']} ranks and rank {me.rank} for {num_ranks}: start "
                    "all with the same WORLD_SIZE, and two runs at the same time with different MASTER_PORTs"
                )
            run = PrefixStore(call["token"], store)
            run.set(_arrival(me.rank), json.dumps(asdict(me)))
            rank_0 = _Signs(call["token"])
        if run is not None:
            rank_0.look(run)
            if (roster := _verdict(run, me, rank_0)) is not None:
                return roster
        time.sleep(_PAUSE)
    missing = [0]
    if run is not None and rank_0.is_calling:
        missing = _missing(run, num_ranks)
        run.delete_key(_arrival(me.rank))  # a rank that still waits must not count on this one
    raise _absent(missing, me.topology, seconds)


def _verdict(run: Store, me: Member, rank_0: _Signs) -> Roster | None:
    """Return rank 0's roster once it includes this process; None before."""
    if run.check(["refused"]) and rank_0.has_called:
        raise ClusterError(run.get("refused").decode())
    if not run.check(["roster"]):
        return None
    members = tuple(_member(entry) for entry in json.loads(run.get("roster")))
    other = members[me.rank]
    if other.id == me.id:
        return Roster(rank_0.token, members)
    if rank_0.has_called:
        raise ClusterError(
            f"two processes say that they are rank {me.rank}: process {me.process} on {me.host_name} and "
            f"process {other.process} on {other.host_name}; every rank has one process"
        )
    return None


class _Signs:
    """Whether rank 0 is calling now, or its call is left from an earlier run."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self._count: bytes | None = None
        self._moved = -math.inf

    def look(self, run: Store) -> None:
        count = run.get("calling") if run.check(["calling"]) else b""
        if self._count is not None and count != self._count:
            self._moved = time.monotonic()
        self._count = count

    @property
    def has_called(self) -> bool:
        return self._moved > -math.inf

    @property
    def is_calling(self) -> bool:
        return time.monotonic() - self._moved < _SILENCE


def _missing(run: Store, num_ranks: int) -> list[int]:
    return [rank for rank in range(num_ranks) if not run.check([_arrival(rank)])]


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


def _member(entry: dict[str, Any]) -> Member:
    return Member(**{**entry, "topology": Topology(**entry["topology"])})


def _check_topologies(members: Sequence[Member]) -> None:
    by_topology: dict[Topology, list[int]] = {}
    for member in members:
        by_topology.setdefault(member.topology, []).append(member.rank)
    if len(by_topology) > 1:
        said = "; ".join(
            f"{one.num_workers} workers, {'co-located' if one.colocated else f'{one.num_stores} stores'}, "
            f"peer_to_peer={one.peer_to_peer} on {ranks_text(ranks)}"
            for one, ranks in by_topology.items()
        )
        raise ClusterError(
            f"ranks disagree about who stores the rows: {said}. Give all ranks the same options"
        )


def _absent(missing: Sequence[int], topology: Topology, seconds: float) -> ClusterError:
    roles = roles_of(topology.num_ranks, topology.num_workers)
    return ClusterError(
        f"{ranks_text(missing, roles)} of {topology.num_ranks} did not arrive within {seconds:g} s: "
        "either not started, or ended while starting (see their output)"
    )
