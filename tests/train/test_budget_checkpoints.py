"""Checkpoints within a budget: the same ranks go on with the same bits, others with the same model."""

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
BUDGET = replace(CONFIG, prune=PruneConfig(budget="6KiB", shared=0.2))
PACKED = replace(BUDGET, precision="float32", row_dtype="int8")

# Rows change hands after each of the first ten steps, then after every second one.
CASES = {
    "co-located, peers": ({"cluster": replace(TIGHT, colocated=True, peer_to_peer=True)}, 11),
    "two stores, hot rows": ({"cluster": replace(TIGHT, stores=2), "hot": [-1, -2, -3, 0, 5]}, 3),
    "full, packed": ({"cluster": replace(TIGHT, sync="full"), "config": PACKED}, 11),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return replace(Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema), config=BUDGET)


def everything(folder, step=STEPS):
    """Rows, and who has them."""
    reader = CheckpointReader(folder / CHECKPOINTS / f"step-{step:09d}")
    return {**contents(folder, step), **reader.arrays(reader.facts["budget"]["file"])}


def num_slots(found):
    """Rows of their own that ids have."""
    return sum(1 for name in found if "/" in name and name.partition("/")[2].isdecimal())


@pytest.mark.parametrize("case", mostly_slow(CASES, *list(CASES)[:2]))
def test_the_same_cluster_goes_on_with_the_same_bits(case, session, tmp_path):
    options, saved = CASES[case]
    chosen = replace(session, **options)
    replace(chosen, save_at=[2, 5, STEPS]).on_threads(tmp_path / "a")  # saving changes nothing
    chosen.interrupted(tmp_path / "b", at=saved)
    one, other = everything(tmp_path / "a"), everything(tmp_path / "b")
    assert same_bits(one, other)
    assert num_slots(one) > 10


def test_a_checkpoint_written_beside_training_is_that_of_its_step(session, tmp_path):
    """Rows change hands before it is written."""
    chosen = replace(session, **CASES["co-located, peers"][0])
    replace(chosen, save_at=[4, STEPS]).on_threads(tmp_path / "a")
    replace(chosen, beside=[4]).on_threads(tmp_path / "b")
    assert same_bits(everything(tmp_path / "a", 4), everything(tmp_path / "b", 4))
    assert same_bits(everything(tmp_path / "a"), everything(tmp_path / "b"))
    (tmp_path / "b" / CHECKPOINTS / f"step-{STEPS:09d}").rename(tmp_path / "last")
    replace(chosen, resume=True).on_threads(tmp_path / "b")
    assert same_bits(everything(tmp_path / "a"), everything(tmp_path / "b"))


def test_another_cluster_goes_on_with_the_same_model(session, tmp_path):
    chosen = replace(session, cluster=replace(TIGHT, colocated=True))
    chosen.on_threads(tmp_path / "a")
    other = ClusterConfig(workers=4, stores=2, peer_to_peer=True, cache="1000")
    chosen.interrupted(tmp_path / "b", at=5, cluster=other)
    assert_equal_models(everything(tmp_path / "a"), everything(tmp_path / "b"))


def test_one_process_and_a_cluster_take_over_from_each_other(session, tmp_path):
    config = replace(BUDGET, checkpoint_every=5)
    chosen = replace(session, config=config, cluster=TIGHT)
    chosen.on_threads(tmp_path / "a")

    def run(folder, **more):
        train_run(config, session.schema, session.data, out=folder, **more)

    replace(chosen, save_at=[5], pauses=[5]).on_threads(tmp_path / "b")
    run(tmp_path / "b", resume=True)
    run(tmp_path / "c")
    one = everything(tmp_path / "a")
    for alone in ("b", "c"):
        assert_equal_models(one, everything(tmp_path / alone))
    (tmp_path / "c" / CHECKPOINTS / f"step-{STEPS:09d}").rename(tmp_path / "gone")
    replace(chosen, resume=True).on_threads(tmp_path / "c")
    assert_equal_models(one, everything(tmp_path / "c"))


def assert_equal_models(one, other):
    """The same rows have the same owners, and numbers differ by rounding."""
    maps = {name for name in one if name[0].isdecimal()}
    assert maps
    assert all(np.array_equal(one[name], other[name]) for name in maps)
    rows = [{name: array for name, array in found.items() if name not in maps} for found in (one, other)]
    assert largest_difference(*rows) < 1e-9


def test_another_budget_is_refused(session, tmp_path):
    replace(session, save_at=[4], pauses=[4]).on_threads(tmp_path / "a")
    other = replace(BUDGET, prune=replace(BUDGET.prune, budget="8KiB"))
    with pytest.raises(CheckpointError, match="cannot become larger or smaller"):
        replace(session, config=other, resume=True).on_threads(tmp_path / "a")
