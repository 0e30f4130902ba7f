"""A process's place among the ranks, from the environment that ``torchrun`` or our launcher sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rowhaul.errors import ClusterError, RankLostError

STORE_VARIABLE = "ROWHAUL_STORE"  # set by our launcher: where it hosts the rendezvous store
EXIT_PEER_ENDED = 75  # of a rank that leaves it to our launcher to say which other one has ended, and how

if TYPE_CHECKING:
    from rowhaul.schedule.topology import Topology


def launcher_tells(error: RankLostError) -> bool:
    """Whether our launcher, which sees processes end, will say the same, and more."""
    from rowhaul.cluster.watchdog.losses import ENDED

    return STORE_VARIABLE in os.environ and error.reason == ENDED


def require_linux() -> None:
    """Raise an error on systems other than Linux: ranks share memory and event counters in its ways."""
    if sys.platform != "linux":
        raise ClusterError(
            f"training on several ranks needs Linux, and this is {sys.platform}; here, train in one process "
            "(leave out --workers), or see what a cluster would do with `rowhaul simulate`"
        )


@dataclass(frozen=True)
class Place:
    """The variables that torchrun sets for every process it starts."""

    rank: int
    world_size: int
    master_address: str
    master_port: int
    launcher_keeps_store: bool = False  # our launcher hosts the rendezvous store at the master's address
    agent_keeps_store: bool = False  # torchrun's agent has a store of its own there, open to all
    is_one_host: bool = False  # one agent has started all ranks

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read the variables; name those that are missing or not a number."""
        missing = [
            name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)
        ]
        if missing:
            raise ClusterError(
                f"{', '.join(missing)} not set in the environment: start the ranks with torchrun, or on "
                "this machine with `rowhaul ... --workers N`"
            )
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ClusterError(
                f"RANK must be 0 to WORLD_SIZE - 1; got RANK={rank} and WORLD_SIZE={world_size}"
            )
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise ClusterError(f"MASTER_PORT must be 1 to 65535; got {port}")
        if environment.get(STORE_VARIABLE):
            address, _, own_port = environment[STORE_VARIABLE].rpartition(":")
            return cls(rank, world_size, address, int(own_port), launcher_keeps_store=True)
        return cls(
            rank=rank,
            world_size=world_size,
            master_address=environment["MASTER_ADDR"],
            master_port=port,
            agent_keeps_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            is_one_host=environment.get("LOCAL_WORLD_SIZE") == str(world_size),
        )

    @property
    def keeps_store(self) -> bool:
        """Whether this process hosts the rendezvous store."""
        return self.rank == 0 and not self.launcher_keeps_store

    @property
    def master(self) -> str:
        """The master's address and port."""
        return address_text(self.master_address, self.master_port)


def address_text(host: str, port: int) -> str:
    """Write an address as people do: ``10.0.0.1:29500``, ``[fd00::1]:29500``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank started by torchrun or by `launch`."""
    return bool(environment.get("RANK")) and bool(environment.get("WORLD_SIZE"))


def topology_of(world_size: int, num_stores: int, colocated: bool, peer_to_peer: bool) -> Topology:
    """Divide the ranks into workers and stores."""
    from rowhaul.schedule.topology import Topology  # compiles kernels: not for a launcher

    if colocated:
        return Topology(world_size, num_stores=1, colocated=True, peer_to_peer=peer_to_peer)
    if num_stores >= world_size:
        raise ClusterError(
            f"{world_size} rank{'s' if world_size > 1 else ''} cannot hold {num_stores} store"
            f"{'s' if num_stores != 1 else ''} and a worker: start at least {num_stores + 1} ranks "
            "(workers + stores), or store the rows on the workers (colocated)"
        )
    return Topology(world_size - num_stores, num_stores=num_stores, peer_to_peer=peer_to_peer)


def roles_of(num_ranks: int, num_workers: int) -> tuple[str, ...]:
    """Return the role of each rank: ``worker 3`` or ``store 0``."""
    return tuple(
        f"worker {rank}" if rank < num_workers else f"store {rank - num_workers}" for rank in range(num_ranks)
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name} must be a whole number; got {text!r}") from None
