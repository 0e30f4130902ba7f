"""Which rank knows where the row of a key is."""

from __future__ import annotations

from numba import uint64

from rowhaul._kernels import kernel
from rowhaul.store.kernels import mix


@kernel
def find_owners(keys, num_ranks, owners):
    """Low bits of a hash of each key, modulo the number of ranks.

    Of a second hash: the index on a rank takes its shards and slots from the first one, and would put keys
    that agree in its low bits into few of its slots.
    """
    for i in range(len(keys)):
        hashed = mix(mix(keys[i]) ^ uint64(0x9E3779B97F4A7C15))
        owners[i] = (hashed & uint64(0xFFFFFFFF)) % uint64(num_ranks)
