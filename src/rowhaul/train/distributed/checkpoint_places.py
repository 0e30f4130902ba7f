"""Whether all ranks of a cluster can write checkpoints, and whether one is intact; collective calls."""

from __future__ import annotations

import json
from functools import partial

from rowhaul.checkpoint import MANIFEST_FILE, Place
from rowhaul.checkpoint.choosing import damage
from rowhaul.checkpoint.location import storage_of
from rowhaul.cluster.checks import check_shared_folder, gather_texts, wait_until_all_know
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import ranks_text, until
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train.run_folder import PROBE

_STORAGE_SECONDS = 24 * 3600.0  # a rank that dies meanwhile is noticed by its heartbeat
_SEEN_SECONDS = 10.0  # network file systems show a new file with a delay


def check_place(cluster: Cluster, checkpoints: Place) -> None:
    """Check that all ranks can write checkpoints to one place, before anything is trained; collective."""
    storage = storage_of(checkpoints)
    if not storage.is_shared:
        if len(cluster.hosts) > 1:
            instead = "mount one folder (NFS, for instance) on every host, or give --checkpoints a URL"
            check_shared_folder(cluster, str(checkpoints.parent), "the run", instead)
        return
    trouble = ""
    try:
        storage.check_writable(checkpoints, f"{PROBE}-r{cluster.rank:04d}")
    except (OSError, ConfigError) as error:
        trouble = str(error)
    texts = gather_texts(cluster, "looking for checkpoints", trouble, _STORAGE_SECONDS)
    for rank, text in enumerate(texts):
        if text:
            wait_until_all_know(cluster)
            raise CheckpointError(f"{ranks_text([rank], cluster.roles)} cannot write checkpoints: {text}")


def damage_seen_by_all(cluster: Cluster, path: Place) -> str:
    """Say how a checkpoint is damaged, after every rank has read a part of it; a collective call."""
    until(partial(storage_of(path).is_file, path / MANIFEST_FILE), _SEEN_SECONDS, cluster.failure.check)
    found, trouble = "", ""
    try:
        found = damage(path, cluster.rank, cluster.num_ranks, is_cluster=True)
    except (CheckpointError, OSError) as error:
        trouble = str(error)
    text = json.dumps([found, trouble])
    texts = gather_texts(cluster, "comparing checksums", text, _STORAGE_SECONDS)
    said = [json.loads(one) for one in texts]
    for rank, (_, trouble) in enumerate(said):
        if trouble:
            wait_until_all_know(cluster)
            raise CheckpointError(f"{ranks_text([rank], cluster.roles)} cannot read {path}: {trouble}")
    return next((found for found, _ in said if found), "")
