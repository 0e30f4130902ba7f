"""Checkpoints are the same files, byte for byte, whatever secret decides where rows are in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointed_ranks import CONFIG, STEPS, Session
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import train_run
from rowhaul.train.cluster_config import ClusterConfig
from secrets_of_positions import secret

FORGETFUL = {"default": {"admit_after": 2, "ttl": 3}, "item": {"max_rows": 30, "evict": "lfu"}}
ALONE = {
    "rows for ever": CONFIG,
    "rows that are forgotten": replace(CONFIG, tables=FORGETFUL),
    "pruned rows": replace(
        CONFIG, precision="float32", prune=PruneConfig(ratio="60%", chunks=2, period=3, cold_start=3)
    ),
}
TIGHT = ClusterConfig(workers=3, cache="60", dispatcher="random")
CLUSTERS: dict[str, dict[str, object]] = {
    "hot rows, co-located": {
        "cluster": ClusterConfig(3, colocated=True, cache="70"),
        "hot": [0, 7919, 10**9],
    },
    "two stores, lfu": {"cluster": replace(TIGHT, stores=2, cache_policy="lfu")},
    "rows that are forgotten": {
        "cluster": replace(TIGHT, peer_to_peer=True),
        "config": replace(CONFIG, tables=FORGETFUL),
    },
}


def files_of(run: Callable[[Path], object], folder: Path, number: int) -> dict[str, bytes]:
    """Train under a secret; all files of the checkpoints."""
    out = folder / str(number)
    with secret(number):
        run(out)
    checkpoints = out / "checkpoints"
    return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.rglob("*.*")}


def check(run: Callable[[Path], object], folder: Path) -> None:
    first, second = (files_of(run, folder, number) for number in (1, 2))
    assert first.keys() == second.keys()
    assert any("rows-" in name for name in first)
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize("name", ALONE)
def test_one_process_writes_the_same_files(name, tmp_path, log_schema, log_folder):
    check(lambda out: train_run(ALONE[name], log_schema, log_folder, out=out), tmp_path)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_writes_the_same_files(name, tmp_path, log_schema):
    log = tmp_path / "log"
    log.mkdir()
    session = replace(Session.on_log(log, log_schema), save_at=(4, STEPS), **CLUSTERS[name])
    check(session.on_threads, tmp_path)
