"""State dicts of a cluster, through torch.distributed.checkpoint: the bits of a checkpoint, on any ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointed_layouts import LAYOUTS
from checkpointed_ranks import CLUSTER, STEPS, Session, contents, on_threads, same_bits
from rowhaul.checkpoint.dcp import DcpReader
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.dcp import find_dcp, load_dcp
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.trainer import Trainer
from slow_cases import mostly_slow

SOME = ("store", "peer to peer, lru, adam", "hot rows, co-located", "bounded:2", "admission")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed")  # these ranks are threads


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


def trained_states(session, folder, monkeypatch):
    """The state dict of every rank at the end, where a checkpoint is saved, too."""
    states, save = {}, checkpointing.save

    def save_both(cluster, training, trainer, *more):
        states[cluster.rank] = training.state_dict(trainer.dense)
        return save(cluster, training, trainer, *more)

    monkeypatch.setattr(checkpointing, "save", save_both)
    session.on_threads(folder)
    return [states[rank] for rank in sorted(states)]


def save_all(states, path):
    """As ranks do it together; no two have tensors of one name, but for what all know alike."""
    together = {}
    for state in states:
        assert {"lifetimes"} >= together.keys() & state.keys()
        together |= state
    dcp.save(together, checkpoint_id=path)
    return path


def read(path):
    """As `contents` of a checkpoint."""
    reader = DcpReader(path)
    found = {
        f"{group}/{name}": tensor.numpy()
        for group in ("model", "dense-optimizer")
        for name, tensor in reader.tensors(group).items()
    }
    for table, entry in reader.tables.items():
        rows = [
            one for keys, records in reader.rows(table) for one in zip(keys.tolist(), records, strict=True)
        ]
        assert len(rows) == entry.num_rows == sum(map(len, reader.keys(table)))
        found |= {f"{table}/{key}": record for key, record in rows}
    return found


def states_after_loading(session, path):
    def work(cluster):
        trainer = Trainer(session.config, session.schema)
        saved = find_dcp(cluster, path, trainer.model, trainer.dense)
        stream = SampleStream(session.data, session.schema, 64, start=saved.samples)
        settings = layout_of(trainer.collection).schedule_settings(
            session.cluster, cluster.topology, policies=trainer.policies
        )
        training = distribute(
            cluster, trainer.model, stream, settings=settings, saved=saved, optimizer=trainer.dense
        )
        try:
            assert (training.iteration, training.samples) == (STEPS, STEPS * 64)
            return training.state_dict()
        finally:
            training.close()

    return on_threads(session.cluster.topology(), work)


@pytest.mark.parametrize("layout", mostly_slow(SOME, "peer to peer, lru, adam"))
def test_a_state_dict_has_the_bits_of_a_checkpoint_and_keeps_them_on_other_ranks(
    layout, session, tmp_path, monkeypatch
):
    chosen = replace(session, **LAYOUTS[layout])
    states = trained_states(chosen, tmp_path / "run", monkeypatch)
    expected = contents(tmp_path / "run")
    path = save_all(states, tmp_path / "first")
    assert same_bits(read(path), expected)
    other = replace(chosen, cluster=replace(CLUSTER, workers=2, colocated=True))
    again = save_all(states_after_loading(other, path), tmp_path / "second")
    assert same_bits(read(again), expected)
    assert DcpReader(path).groups == DcpReader(again).groups


@pytest.mark.slow
def test_one_process_loads_the_state_of_a_cluster(session, tmp_path, monkeypatch):
    path = save_all(trained_states(session, tmp_path / "run", monkeypatch), tmp_path / "saved")
    trainer = Trainer(session.config, session.schema)
    assert load_dcp(path, trainer.model, trainer.dense)["step"] == STEPS
    expected = contents(tmp_path / "run")
    for table in DcpReader(path).tables:
        for keys, records in trainer.collection.rows(table):
            for key, record in zip(keys.tolist(), records, strict=True):
                assert expected.pop(f"{table}/{key}").tobytes() == record.tobytes()
    assert not [name for name in expected if not name.startswith(("model/", "dense-optimizer/"))]


def test_folders_without_a_state_of_ours_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        DcpReader(tmp_path / "nothing")
    dcp.save({"weights": torch.ones(2)}, checkpoint_id=tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"save what training\.state_dict\(\) returns"):
        DcpReader(tmp_path / "other")
    cut = next((tmp_path / "other").glob("*.distcp"))
    cut.write_bytes(b"")
    with pytest.raises(CheckpointError):
        DcpReader(tmp_path / "other")


@pytest.mark.slow
def test_a_state_dict_is_refused_within_an_iteration_and_without_an_optimizer(session):
    def work(cluster):
        trainer = Trainer(session.config, session.schema)
        stream = SampleStream(session.data, session.schema, 64)
        training = distribute(cluster, trainer.model, stream)
        try:
            with pytest.raises(ConfigError, match="needs the optimizer"):
                training.state_dict()
            for batch in training.batches(1):
                with pytest.raises(ConfigError, match="between two calls of batches"):
                    training.state_dict(trainer.dense)
                loss = batch.loss(trainer.model(batch) * 0)
                loss.backward()
                training.step(loss)
        finally:
            training.close()

    on_threads(session.cluster.topology(), work)


SCRIPT = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import binary_cross_entropy_with_logits
from rowhaul import EmbeddingBagCollection, SampleStream, Schema, build_model, distribute, find_dcp
from rowhaul import save_checkpoint
from rowhaul.cluster import join

before, after, steps, stores = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
schema = Schema.read("schema.yaml")
model = build_model(
    "dcnv2", tables=schema.tables, num_dense=len(schema.dense), embedding_dim=4,
    make_collection=EmbeddingBagCollection, seed=0,
)
dense = torch.optim.Adam(model.parameters())
with join(num_stores=stores, colocated=not stores) as cluster:
    saved = None if before == "none" else find_dcp(cluster, before, model, dense)
    batches = SampleStream("*.parquet", schema, batch_size=64, start=saved.samples if saved else 0)
    training = distribute(cluster, model, batches, saved=saved, optimizer=dense)
    for batch in training.batches(steps):
        loss = batch.loss(binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none"))
        loss.backward()
        training.step(loss)
        dense.step(), dense.zero_grad()
    dcp.save(training.state_dict(), checkpoint_id=after)
    if before == "none":
        save_checkpoint(cluster, training, dense, "checkpoints")
    training.close()
"""


@pytest.mark.slow
def test_two_processes_save_and_three_load(session, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    session.schema.write(tmp_path / "schema.yaml")
    for file in Path(session.data).glob("*.parquet"):
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def run(ranks, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        done = subprocess.run(
            [*command, str(ranks), "script.py", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return read(tmp_path / arguments[1])

    first = run(2, "none", "first", 5, 0)
    assert same_bits(first, contents(tmp_path, 5))
    assert same_bits(first, run(3, "first", "second", 0, 1))
