"""Checkpoints of pruned rows: the same ranks go on with the same bits, others with the same model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checkpointed_ranks import CONFIG, STEPS, Session, contents, largest_difference, same_bits
from rowhaul.checkpoint import CheckpointReader
from rowhaul.errors import CheckpointError
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import train_run
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.run_folder import CHECKPOINTS
from slow_cases import mostly_slow

pytestmark = pytest.mark.slow

TIGHT = ClusterConfig(workers=3, cache="70", dispatcher="random")
PRUNED = replace(CONFIG, prune=PruneConfig(ratio="60%", chunks=3, period=3, decay=0.9))
# Accesses, and their sums while they halve, are exact: the decision is the same wherever they are added up.
COUNTED = replace(CONFIG, prune=PruneConfig(ratio="60%", chunks=2, period=3, decay=0.5, utility="access"))

NARROW = replace(CONFIG, prune=PruneConfig(ratio="50%", chunks=2, period=4, dims=3, cold_start=5))

# Saved between two prunings, right after one, and before and after columns are chosen.
CASES = {
    "two stores, lfu": (replace(TIGHT, stores=2, cache_policy="lfu"), PRUNED, 4),
    "co-located, peers": (replace(TIGHT, colocated=True, peer_to_peer=True), PRUNED, 6),
    "all columns": (replace(TIGHT, stores=2), NARROW, 3),
    "fewer columns": (replace(TIGHT, stores=2), NARROW, 6),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return replace(Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema), config=PRUNED)


def everything(folder, step=STEPS):
    """Rows, and all that is known of them."""
    reader = CheckpointReader(folder / CHECKPOINTS / f"step-{step:09d}")
    found = contents(folder, step)
    for table in reader.tables:
        for parts in reader.blocks(table):
            first = 0
            for row, key in enumerate(parts["keys"].tolist()):
                count = int(parts["present"][row].sum())
                found[f"{table}/{key} present"] = parts["present"][row]
                found[f"{table}/{key} utilities"] = parts["utilities"][row]
                found[f"{table}/{key} chunks"] = parts["chunks"][first : first + count]
                first += count
    return found


@pytest.mark.parametrize("case", mostly_slow(CASES, "co-located, peers", "fewer columns"))
def test_the_same_cluster_goes_on_with_the_same_bits(case, session, tmp_path):
    cluster, config, saved = CASES[case]
    chosen = replace(session, cluster=cluster, config=config)
    replace(chosen, save_at=[2, 5, STEPS]).on_threads(tmp_path / "a")  # saving changes nothing
    chosen.interrupted(tmp_path / "b", at=saved)
    one, other = everything(tmp_path / "a"), everything(tmp_path / "b")
    assert same_bits(one, other)
    held = [array for name, array in one.items() if name.endswith("present")]
    assert 0 < np.sum(held) <= (1 - config.prune.settings().ratio) * np.size(held) + 1
    assert not np.all(np.any(held, axis=1)), "no row is kept without chunks here"


@pytest.mark.parametrize("case", ["co-located, peers", "fewer columns"])
def test_a_checkpoint_written_beside_training_is_that_of_its_step(case, session, tmp_path):
    """Prunings, and narrower rows, come before it is written."""
    cluster, config, _ = CASES[case]
    chosen = replace(session, cluster=cluster, config=config)
    replace(chosen, save_at=[4, STEPS]).on_threads(tmp_path / "a")
    replace(chosen, beside=[4]).on_threads(tmp_path / "b")
    assert same_bits(everything(tmp_path / "a", 4), everything(tmp_path / "b", 4))
    assert same_bits(everything(tmp_path / "a"), everything(tmp_path / "b"))
    (tmp_path / "b" / CHECKPOINTS / f"step-{STEPS:09d}").rename(tmp_path / "last")
    replace(chosen, resume=True).on_threads(tmp_path / "b")
    assert same_bits(everything(tmp_path / "a"), everything(tmp_path / "b"))


def test_another_cluster_goes_on_with_the_same_model(session, tmp_path):
    chosen = replace(session, config=COUNTED, cluster=replace(TIGHT, colocated=True))
    chosen.on_threads(tmp_path / "a")
    other = ClusterConfig(workers=4, stores=2, peer_to_peer=True, cache="1000")
    chosen.interrupted(tmp_path / "b", at=5, cluster=other)
    one, other = everything(tmp_path / "a"), everything(tmp_path / "b")
    assert largest_difference(_plain(one), _plain(other)) < 1e-9
    for name in (name for name in one if name.endswith("present")):
        assert np.array_equal(one[name], other[name])


def test_one_process_and_a_cluster_take_over_from_each_other(session, tmp_path):
    """Where utilities are exact, all of them end with the same rows, chunk by chunk."""
    config = replace(COUNTED, checkpoint_every=5)
    chosen = replace(session, config=config, cluster=TIGHT)
    chosen.on_threads(tmp_path / "a")
    run = lambda folder, **more: train_run(  # noqa: E731  # a one-line helper
        config, session.schema, session.data, out=folder, **more
    )
    replace(chosen, save_at=[5], pauses=[5]).on_threads(tmp_path / "b")
    run(tmp_path / "b", resume=True)
    run(tmp_path / "c")
    for alone in ("b", "c"):
        one, other = everything(tmp_path / "a"), everything(tmp_path / alone)
        assert largest_difference(_plain(one), _plain(other)) < 1e-9
        assert all(np.array_equal(one[name], other[name]) for name in one if name.endswith("present"))
    (tmp_path / "c" / CHECKPOINTS / f"step-{STEPS:09d}").rename(tmp_path / "gone")
    replace(chosen, resume=True).on_threads(tmp_path / "c")
    one, other = everything(tmp_path / "a"), everything(tmp_path / "c")
    assert largest_difference(_plain(one), _plain(other)) < 1e-9


def test_other_chunks_are_refused(session, tmp_path):
    replace(session, save_at=[4], pauses=[4]).on_threads(tmp_path / "a")
    other = replace(PRUNED, prune=replace(PRUNED.prune, chunks=2))
    with pytest.raises(CheckpointError, match="pruned with 3 chunks a row"):
        replace(session, config=other, resume=True).on_threads(tmp_path / "a")


def _plain(found):
    return {name: array for name, array in found.items() if "utilities" not in name and "present" not in name}
