"""A cluster's checkpoint, merged into few files: the same model for one process and for other clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpointed_ranks import CLUSTER, STEPS, Session, contents, largest_difference, same_bits
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.describing import describe
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.cli.ckpt.merge import merge_into_folder
from rowhaul.train import train_run
from rowhaul.train.cluster_config import ClusterConfig

SAVED = 5


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    log = Session.on_log(tmp_path_factory.mktemp("merged-log"), log_schema)
    return replace(log, cluster=ClusterConfig(workers=2, colocated=True, cache="190"))


@pytest.fixture(scope="module")
def saved(session, tmp_path_factory):
    """A run of two ranks that both store rows, saved in the middle and at its end."""
    folder = tmp_path_factory.mktemp("merged-runs") / "cluster"
    replace(session, save_at=[SAVED, STEPS]).on_threads(folder)
    return folder


def merged(saved, to):
    reader = CheckpointReader(saved / "checkpoints" / f"step-{SAVED:09d}")
    merge_into_folder([reader], to, lambda done, total: None)
    return reader, open_checkpoint(to)


def test_the_files_of_ranks_become_one_a_table_with_the_same_rows(saved, tmp_path):
    before, after = merged(saved, tmp_path / "run")
    assert min(len(table.files) for table in before.tables.values()) >= 2  # of homes, and of workers
    assert {len(table.files) for table in after.tables.values()} == {1}
    assert describe(before).layout
    assert not describe(after).layout
    assert same_bits(contents(saved, SAVED), contents(tmp_path / "run", SAVED))


def test_one_process_goes_on_from_it(session, saved, tmp_path):
    merged(saved, tmp_path / "run")
    one = replace(session.config, cluster=replace(CLUSTER, workers=0))
    result = train_run(one, session.schema, session.data, out=tmp_path / "run", resume=True)
    assert result.step == STEPS
    assert largest_difference(contents(saved), contents(tmp_path / "run")) < 1e-9


def test_another_cluster_goes_on_from_it(session, saved, tmp_path):
    merged(saved, tmp_path / "run")
    other = ClusterConfig(workers=3, stores=2, cache="190")
    replace(session, cluster=other, resume=True).on_threads(tmp_path / "run")
    assert largest_difference(contents(saved), contents(tmp_path / "run")) < 1e-9


def test_two_steps_of_one_run_merge_to_the_later(saved, tmp_path):
    early, late = (CheckpointReader(saved / "checkpoints" / f"step-{step:09d}") for step in (SAVED, STEPS))
    made = merge_into_folder([early, late], tmp_path / "run", lambda done, total: None)
    assert all(table.rows_from[0] == 0 for table in made.tables)  # rows never vanish in training
    assert same_bits(contents(saved), contents(tmp_path / "run"))
