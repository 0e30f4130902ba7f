"""Saving and resuming on a cluster when something is wrong: missing ranks, full disks, damage, kill -9."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from checkpointed_ranks import (
    CLUSTER,
    CONFIG,
    STEPS,
    Session,
    contents,
    largest_difference,
    on_threads,
    same_bits,
)
from click_logs import click_log
from rowhaul.checkpoint import ShardWriter, latest_checkpoint
from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.cluster import launch
from rowhaul.errors import CheckpointError, ClusterError, ConfigError, DataError
from rowhaul.train.config import ModelConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.run_folder import CHECKPOINTS, begin_folder, check_same_run, drop_old_checkpoints
from rowhaul.train.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


@pytest.mark.parametrize(
    ("callers", "missing"), [([0], "rank 1 .*rank 2 .*rank 3"), ([1, 3], "rank 0 .*rank 2")]
)
def test_a_save_on_some_ranks_only_names_the_others(callers, missing, session, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "_PRESENT_SECONDS", 1.0)
    done = []

    def work(cluster):
        if cluster.rank in callers:
            trainer = Trainer(session.config, session.schema)
            try:
                checkpointing.save(cluster, None, trainer, tmp_path / "c")
            except ClusterError as error:
                done.append(str(error))

    on_threads(session.cluster.topology(), work)
    assert len(done) == len(callers)
    for message in done:
        assert "did not join in 'save'" in message
        assert re.search(missing, message)
    assert finished_checkpoints(tmp_path / "c") == []


def test_ranks_that_save_different_steps_are_told(session, tmp_path):
    def work(cluster):
        trainer = Trainer(session.config, session.schema)
        trainer.step = 5 + (cluster.rank == 2)
        checkpointing.save(cluster, None, trainer, tmp_path)

    with pytest.raises(ClusterError, match=r"save different steps: \[5, 5, 6, 5\]"):
        on_threads(session.cluster.topology(), work)


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_rank_that_cannot_write_leaves_the_checkpoint_before(victim, session, tmp_path, monkeypatch):
    whole = ShardWriter.arrays

    def fails(self, name, arrays):
        if "step-000000009" in str(self._folder) and self._label == f"r{victim:04d}-":
            raise OSError(28, "No space left on device")
        return whole(self, name, arrays)

    monkeypatch.setattr(ShardWriter, "arrays", fails)
    chosen = replace(session, save_at=[5, 9, STEPS])
    with pytest.raises(CheckpointError, match=rf"no checkpoint of step 9: rank {victim} .*No space left"):
        chosen.on_threads(tmp_path / "a")
    monkeypatch.undo()
    names = [path.name for path in (tmp_path / "a" / CHECKPOINTS).iterdir()]
    assert names == ["step-000000005"]
    replace(chosen, resume=True).on_threads(tmp_path / "a")
    session.on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))


@pytest.mark.parametrize("name", ["layout-r0001-00000", "schedule", "rows-0001-r0003-00000", "tensors-model"])
def test_damage_is_named(name, session, tmp_path):
    replace(session, save_at=[5], pauses=[5]).on_threads(tmp_path / "a")
    path = tmp_path / "a" / CHECKPOINTS / "step-000000005" / f"{name}.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}.safetensors is damaged"):
        replace(session, resume=True).on_threads(tmp_path / "a")


@pytest.mark.parametrize("name", ["layout-r0001-00000", "rows-0001-r0003-00000", "tensors-model", "manifest"])
def test_all_ranks_pass_over_a_damaged_checkpoint(name, session, tmp_path):
    replace(session, save_at=[5, 9], pauses=[5, 9]).on_threads(tmp_path / "a")
    path = tmp_path / "a" / CHECKPOINTS / "step-000000009" / f"{name}.safetensors"
    path = path.with_name("manifest.json") if name == "manifest" else path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    def work(cluster):
        saved = checkpointing.find(
            cluster, tmp_path / "a" / CHECKPOINTS, Trainer(session.config, session.schema)
        )
        return saved.start.iteration, saved.chosen.notes

    found = on_threads(session.cluster.topology(), work)
    assert all(one == found[0] for one in found)
    assert found[0][0] == 5
    assert re.match(rf"step-000000009 is damaged and not used: .*{path.name}", found[0][1][0])
    replace(session, resume=True).on_threads(tmp_path / "a")
    session.on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))


def test_what_another_cluster_does_not_need_may_be_damaged(session, tmp_path):
    replace(session, save_at=[5], pauses=[5]).on_threads(tmp_path / "a")
    for path in (tmp_path / "a" / CHECKPOINTS / "step-000000005").glob("layout-*"):
        path.unlink()
    replace(session, resume=True, cluster=replace(CLUSTER, workers=2)).on_threads(tmp_path / "a")
    session.on_threads(tmp_path / "b")
    assert largest_difference(contents(tmp_path / "a"), contents(tmp_path / "b")) < 1e-9


def test_a_checkpoint_of_another_model_changes_nothing(session, tmp_path):
    replace(session, save_at=[5], pauses=[5]).on_threads(tmp_path / "a")
    other = replace(CONFIG, model=ModelConfig(embedding_dim=6))

    def work(cluster):
        trainer = Trainer(other, session.schema)
        before = [tensor.clone() for tensor in trainer.model.parameters()]
        with pytest.raises(CheckpointError, match=r"of another model .*dim 4.* there and dim 6"):
            checkpointing.find(cluster, tmp_path / "a" / "checkpoints", trainer)
        after = list(trainer.model.parameters())
        return trainer.step == 0 and all((x == y).all() for x, y in zip(before, after, strict=True))

    assert all(on_threads(session.cluster.topology(), work))


def test_other_data_is_refused(session, tmp_path):
    replace(session, save_at=[5], pauses=[5]).on_threads(tmp_path / "a")
    (tmp_path / "log").mkdir()
    pq.write_table(click_log(2000, 1), tmp_path / "log" / "part-0.parquet", row_group_size=700)
    with pytest.raises((CheckpointError, DataError), match="other files"):
        replace(session, data=tmp_path / "log", resume=True).on_threads(tmp_path / "a")


def test_a_run_without_a_checkpoint_begins_at_the_beginning(session, tmp_path):
    replace(session, resume=True).on_threads(tmp_path / "a")
    session.on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))


def test_only_the_newest_stay_and_nothing_half_written(session, tmp_path):
    checkpoints = tmp_path / CHECKPOINTS
    for step in (1, 5, 20):
        (checkpoints / f"step-{step:09d}").mkdir(parents=True)
        (checkpoints / f"step-{step:09d}" / "manifest.json").write_text("{}")
    (checkpoints / "step-000000030.unfinished").mkdir()
    drop_old_checkpoints(checkpoints, 2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000005", "step-000000020"]


def test_the_cluster_may_change_when_a_run_is_resumed(session, tmp_path):
    begin_folder(tmp_path, session.config, session.schema, session.data, None)
    check_same_run(tmp_path, None, replace(session.config, cluster=CLUSTER), session.schema)
    with pytest.raises(ConfigError, match="seed = 0, now it is 3"):
        check_same_run(tmp_path, None, replace(session.config, seed=3), session.schema)


# Ranks that are processes


PROGRAM = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from checkpointed_ranks import Session
from rowhaul.cluster import join
from rowhaul.data.schema import Schema
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import cluster_snapshot
from rowhaul.train.distributed.cluster_snapshot import ClusterSnapshot

folder, data = Path({folder!r}), Path({data!r})
session = Session(Schema.read(folder / "schema.yaml"), data, **{session})
rank = int(os.environ["RANK"])

def dies(*arguments):
    if any({doomed_step!r} in str(one) for one in arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    return completes(*arguments)

owner = {doomed_owner}
completes = owner.{doomed_function}
if rank == {doomed_rank}:
    owner.{doomed_function} = dies
with join(session.cluster.stores, session.cluster.colocated, session.cluster.peer_to_peer) as cluster:
    session.run(cluster, folder)
"""


def run_processes(session, folder, given, cluster, doomed=(-1, 0, "cluster_snapshot._complete")):
    """Run a session as processes; one of them is killed when it calls a function for a step."""
    folder.mkdir(exist_ok=True)
    session.schema.write(folder / "schema.yaml")
    here = Path(__file__).parent
    owner, _, function = doomed[2].rpartition(".")
    program = PROGRAM.format(
        paths=[str(here), str(here.parent)],
        folder=str(folder),
        data=str(session.data),
        session=f"dict(cluster=ClusterConfig(**{asdict(cluster)!r}), **{given!r})",
        doomed_rank=doomed[0],
        doomed_step=f"step-{doomed[1]:09d}",
        doomed_owner=owner,
        doomed_function=function,
    )
    script = folder.parent / "rank.py"
    script.write_text(program)
    launch(
        [],
        cluster.workers,
        cluster.stores,
        cluster.colocated,
        command=[sys.executable, str(script)],
        environment={"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("cluster", "rank", "function", "beside"),
    [
        (replace(CLUSTER, workers=2), 0, "cluster_snapshot._complete", False),
        (replace(CLUSTER, workers=2, colocated=True), 1, "ClusterSnapshot._write_part", False),
        (replace(CLUSTER, workers=2), 0, "cluster_snapshot._complete", True),
        (replace(CLUSTER, workers=2, colocated=True), 1, "ClusterSnapshot._write_part", True),
    ],
    ids=["before the manifest", "while writing", "before the manifest, beside", "while writing, beside"],
)
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    cluster, rank, function, beside, session, tmp_path
):
    """And processes resume from it to the bits of threads."""
    folder = tmp_path / "a"
    given = {"save_at": [5, 9, STEPS]}
    if beside:
        given = {"save_at": [STEPS], "beside": [5, 9]}
    with pytest.raises(ClusterError, match=rf"rank {rank} .*SIGKILL"):
        run_processes(session, folder, given, cluster, doomed=(rank, 9, function))
    checkpoints = folder / CHECKPOINTS
    assert latest_checkpoint(checkpoints).name == "step-000000005"
    assert rank != 0 or (checkpoints / "step-000000009.unfinished").exists()
    run_processes(session, folder, {**given, "resume": True}, cluster)
    replace(session, cluster=cluster).on_threads(tmp_path / "b")
    assert same_bits(contents(folder), contents(tmp_path / "b"))
    assert not (checkpoints / "step-000000009.unfinished").exists()
