"""Who stores and who trains: the ranks, and where each row is at home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule.id_kernels import home_shard, home_shards

MAX_WORKERS = 64  # a set of workers is one 64-bit mask


@dataclass(frozen=True)
class Topology:
    """The ranks of a cluster.

    Workers are ranks 0 .. num_workers-1. Dedicated stores follow; with ``colocated`` every worker
    also stores a shard, so that there are no other ranks.
    """

    num_workers: int
    num_stores: int = 1  # dedicated stores; not used when colocated
    colocated: bool = False
    peer_to_peer: bool = False
    tables_per_row: int = 1  # so many tables in succession hold parts of the same rows, at one home

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"the number of workers must be 1 to {MAX_WORKERS}; got {self.num_workers}")
        if not self.colocated and self.num_stores < 1:
            raise ConfigError(
                f"the number of stores must be at least 1; got {self.num_stores} "
                "(let workers store the rows themselves with colocated=True)"
            )

    @property
    def num_ranks(self) -> int:
        """Workers and dedicated stores."""
        return self.num_workers + (0 if self.colocated else self.num_stores)

    @property
    def first_store(self) -> int:
        """The rank of the first store."""
        return 0 if self.colocated else self.num_workers

    @property
    def num_shards(self) -> int:
        """How many ranks share the rows; row x is at home on first_store + hash(x) mod num_shards."""
        return self.num_workers if self.colocated else self.num_stores

    @property
    def sharding(self) -> int:
        """How rows find their homes, for kernels: shards; from bit 16 on, the other tables of a row."""
        return self.num_shards | (self.tables_per_row - 1) << 16


def home_of(table: int, key: int, topology: Topology) -> int:
    """The rank that stores a row."""
    return topology.first_store + int(home_shard(np.int32(table), np.int64(key), topology.sharding))


def homes_of(tables: npt.ArrayLike, keys: npt.ArrayLike, topology: Topology) -> npt.NDArray[np.int16]:
    """The rank that stores each row."""
    tables, keys = np.asarray(tables, np.int32), np.asarray(keys, np.int64)
    if tables.ndim != 1 or tables.shape != keys.shape:
        raise DataError(f"one table for each key is needed; got {tables.shape} tables and {keys.shape} keys")
    homes: npt.NDArray[np.int16] = home_shards(tables, keys, topology.first_store, topology.sharding)
    return homes
