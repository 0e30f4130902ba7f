"""The process groups of a distributed database, and the check that all ranks mean the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from rowhaul.database.distributed.ring import Ring
from rowhaul.database.settings import DatabaseSettings
from rowhaul.errors import ClusterError, ConfigError
from rowhaul.transport.base import Links
from rowhaul.transport.gloo import GlooLinks, connect_group

NUM_SEQUENCES = 3  # index, rows, snapshots: each is used by a thread of its own


def form_links(
    group: dist.ProcessGroup | None, timeout_seconds: float
) -> tuple[list[GlooLinks], Callable[[], None]]:
    """Links between the ranks of a group, and what ends them."""
    if not dist.is_initialized():
        raise ConfigError(
            "a distributed database needs torch.distributed: call init_process_group('gloo') first, "
            "or use rowhaul.store.EmbeddingDatabase in one process"
        )
    ranks = None if group is None else dist.get_process_group_ranks(group)
    groups = [
        dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout_seconds),
            backend="gloo",
            use_local_synchronization=ranks is not None,
        )
        for _ in range(NUM_SEQUENCES)
    ]

    sequences = [connect_group(one, timeout=timeout_seconds) for one in groups]

    def destroy() -> None:
        for links, one in zip(sequences, groups, strict=True):
            links.close()
            dist.destroy_process_group(one)

    return sequences, destroy


def check_equal(links: Links, settings: DatabaseSettings) -> None:
    """Refuse ranks whose tables, optimizer, type or seed differ."""
    text = f"{settings.tables} {settings.optimizer} {settings.dtype} {settings.seed}"
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.int64)
    heard = Ring(links, 1).tell(np.tile(digest, (links.num_ranks, 1)))
    different = np.flatnonzero(heard[:, 0] != digest[0])
    if len(different):
        raise ClusterError(
            f"rank {different[0]} has other tables, optimizer, lr, dtype or seed than rank {links.rank}, "
            f"which has {text}; give all ranks the same"
        )
