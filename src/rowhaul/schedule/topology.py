"""Who stores and who trains: the ranks, and where each row is at home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.errors import ConfigError, DataError

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
    tables_per_row: int = 1  # successive tables that hold parts of the same rows, at one home

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"the number of workers must be 1 to {MAX_WORKERS}; got {self.num_workers}")
        if not self.colocated and self.num_stores < 1:
            raise ConfigError(
                f"the number of stores must be at least 1; got {self.num_stores} "
                "(use colocated=True to store rows on the workers)"
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


@kernel
def row_hash(table, key):
    """A well-mixed 64-bit hash of a row's name (the finisher of SplitMix64)."""
    h = np.uint64(key) + np.uint64(table + 1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@kernel
def home_shard(table, key, sharding):
    """Which of the shards stores a row; ``sharding`` as of `Topology`."""
    num_shards = sharding & 0xFFFF
    if num_shards == 1:
        return 0
    others = sharding >> 16
    if others > 0:
        table = table // (others + 1)
    return np.int64((row_hash(table, key) >> np.uint64(32)) % np.uint64(num_shards))


@kernel
def home_shards(tables, keys, first_store, sharding):
    """The ranks that store these rows."""
    homes = np.empty(len(keys), np.int16)
    for r in range(len(keys)):
        homes[r] = first_store + home_shard(tables[r], keys[r], sharding)
    return homes
