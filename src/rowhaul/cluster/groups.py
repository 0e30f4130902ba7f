"""The groups of ranks: row moves, control and data among all of them, dense gradients among workers.

Ranks of one host talk through shared memory, the others over process groups of ``torch.distributed``.

They are made in a thread that can be given up, because Gloo waits for its peers without end where a
firewall drops their packets. A group that is complete too late, or only in part, is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rowhaul.cluster.interface import bound_to
from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.waiting import within
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology
from rowhaul.transport.collectives import connect_pairs
from rowhaul.transport.gloo import Pairs

# Waiting for another rank is not an error, however long it computes; the heartbeat tells when it is gone.
_OPERATION = timedelta(days=7)


@dataclass
class Groups:
    """The groups of a rank; ``dense`` is None on a store."""

    moves: Pairs
    dense: Pairs | None
    control: Pairs
    data: Pairs
    made: list[ProcessGroup]
    owns_default: bool  # torch.distributed was not initialised before

    def destroy(self) -> None:
        """Give up the groups; those that the user has made stay, if they were there first."""
        for pairs in (self.data, self.control, self.dense, self.moves):
            if pairs is not None:
                pairs.close()
        _destroy(self.made, self.owns_default)


def form_groups(
    store: Store,
    rank: int,
    topology: Topology,
    interface: str,
    side_interface: str,
    host: str,
    seconds: float,
    check: Callable[[], None],
) -> Groups:
    """Make the groups, all ranks together.

    Args:
        store: the rendezvous store, below the run's token.
        rank: of this process.
        topology: of all ranks.
        interface: for row moves.
        side_interface: for dense gradients, control and data.
        host: a name that the ranks of one host share.
        seconds: how long it may take.
        check: raises when a rank is known to be lost.
    """
    try:
        return within(
            seconds,
            lambda: _form(store, rank, topology, (interface, side_interface), host),
            check=check,
            discard=Groups.destroy,
        )
    except TimeoutError:
        names = interface if side_interface == interface else f"{interface} and {side_interface}"
        raise ClusterError(
            f"the ranks reach the master, but not each other, over {names} (waited {seconds:g} s): Gloo "
            "connects every pair of ranks at ports the system chooses, so firewalls between the hosts must "
            "let all ports pass; if this is the wrong interface, name another"
        ) from None


def _form(store: Store, rank: int, topology: Topology, interfaces: tuple[str, str], host: str) -> Groups:
    owns_default = not dist.is_initialized()
    everyone, workers = list(range(topology.num_ranks)), list(range(topology.num_workers))
    made: list[ProcessGroup] = []
    try:
        with bound_to(interfaces[0]):
            moves = _first_group(store, rank, everyone, owns_default)
            made.append(moves)
        with bound_to(interfaces[1]):
            dense = _new_group(workers)
            made += [dense] if rank in workers else []
            control = _new_group(everyone)
            made.append(control)
            data = _new_group(everyone)
            made.append(data)
        return Groups(
            moves=connect_pairs(moves, host),
            dense=connect_pairs(dense, host) if rank in workers else None,
            control=connect_pairs(control, host),
            data=connect_pairs(data, host),
            made=made,
            owns_default=owns_default,
        )
    except BaseException:
        _destroy(made, owns_default)
        raise


def _first_group(store: Store, rank: int, everyone: list[int], owns_default: bool) -> ProcessGroup:
    if not owns_default:
        if (dist.get_rank(), dist.get_world_size()) != (rank, len(everyone)):
            raise ClusterError(
                f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but the environment says rank {rank} of {len(everyone)}"
            )
        return _new_group(everyone)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(everyone), timeout=_OPERATION)
    world = dist.group.WORLD
    assert world is not None
    return world


def _new_group(ranks: list[int]) -> ProcessGroup:
    """On ranks outside it, a placeholder that is not a group."""
    group: ProcessGroup = dist.new_group(ranks, timeout=_OPERATION, backend="gloo")
    return group


def _destroy(made: list[ProcessGroup], owns_default: bool) -> None:
    if not owns_default:
        for group in reversed(made):
            dist.destroy_process_group(group)
    elif dist.is_initialized():
        dist.destroy_process_group()
