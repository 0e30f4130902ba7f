"""Runs that prune: resuming to the same bits, serving, the log, and what they refuse."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import TrainConfig, load_trained, snapshot, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig
from rowhaul.train.trainer import Trainer

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=7),
    rows=OptimizerConfig("adam", 0.01),
    batch_size=256,
    epochs=2,
    checkpoint_every=7,
    prune=PruneConfig(ratio="70%", chunks=3, period=5, dims=6, cold_start=9),
)


def stop_after(num_steps):
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= num_steps


def state_of(run, schema):
    """Rows, utilities and what the pruner knows in a run's latest checkpoint, in no particular order."""
    reader = CheckpointReader(latest_checkpoint(run / "checkpoints"))
    found = {name: array.tobytes() for name, array in reader.arrays(reader.facts["pruning"]["file"]).items()}
    for table in reader.tables:
        for arrays in reader.blocks(table):
            ends = np.cumsum(arrays["present"].sum(axis=1))
            chunks = np.split(arrays["chunks"], ends[:-1])
            for i, key in enumerate(arrays["keys"].tolist()):
                rest = [arrays[part][i].tobytes() for part in ("present", "utilities", "touched")]
                found[table, key] = (chunks[i].tobytes(), *rest)
    trainer = Trainer(TrainConfig.read(run / "config.yaml"), schema)
    snapshot.restore(trainer, reader.path)
    found["dense"] = b"".join(one.detach().numpy().tobytes() for one in trainer.model.parameters())
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory, log_schema, log_folder):
    run = tmp_path_factory.mktemp("pruned") / "run"
    return run, train_run(CONFIG, log_schema, log_folder, out=run, eval_data=log_folder / "test")


@pytest.mark.parametrize("stop_at", [8, 30])  # before and after columns are chosen
def test_a_stopped_run_resumes_to_the_same_bits(stop_at, straight, tmp_path, log_schema, log_folder):
    run, result = straight
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b", should_stop=stop_after(stop_at))
    resumed = train_run(
        CONFIG, log_schema, log_folder, out=tmp_path / "b", resume=True, eval_data=log_folder / "test"
    )
    assert resumed.metrics == result.metrics
    assert replace(resumed.pruning, index_bytes=0) == replace(result.pruning, index_bytes=0)
    assert state_of(tmp_path / "b", log_schema) == state_of(run, log_schema)


def test_a_checkpoint_holds_only_what_exists_and_serves_the_same_scores(straight, log_schema, log_folder):
    run, result = straight
    assert 0.7 <= result.pruning.ratio < 0.8
    reader = CheckpointReader(latest_checkpoint(run / "checkpoints"))
    num_chunks = sum(len(arrays["chunks"]) for table in reader.tables for arrays in reader.blocks(table))
    assert num_chunks == result.pruning.num_chunks
    served = load_trained(run)
    assert served.evaluate(SampleStream(log_folder / "test", log_schema, 8192)) == result.metrics
    assert not served.collection.source.tables[0].map.entries.for_training
    for table in reader.tables:  # readers of plain rows get whole ones, with zeros
        expected = {
            int(k): row for ks, rs in served.collection.rows(table) for k, row in zip(ks, rs, strict=True)
        }
        for keys, rows in reader.rows(table):
            for key, row in zip(keys.tolist(), rows, strict=True):
                assert (row == expected.pop(key)).all()
        assert not expected


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_an_export_serves_the_same_scores(kind, straight, tmp_path, log_schema, log_folder):
    run, result = straight
    made = export(open_checkpoint(run), tmp_path / "x", format=kind)
    served = load_trained(made.path)
    assert served.evaluate(SampleStream(log_folder / "test", log_schema, 8192)) == result.metrics
    assert (served.step, served.samples) == (result.step, result.samples)
    loaded = load_trained(run)
    assert served.collection.allocated_bytes <= loaded.collection.allocated_bytes
    whole = export(open_checkpoint(run), tmp_path / "whole", whole_rows=True)
    with pytest.raises(
        CheckpointError, match="values in float32, whole; its model needs 7 in float32, chunked"
    ):
        load_trained(whole.path)
    some = export(open_checkpoint(run), tmp_path / "some", tables=["user"])
    with pytest.raises(CheckpointError, match="lacks table 'item'"):
        load_trained(some.path)


def test_the_log_and_the_summary_tell_what_was_kept(straight):
    run, result = straight
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "prune"]
    assert [line["step"] for line in told] == list(range(5, 49, 5))
    assert all(sum(line["rows_by_chunks"]) == line["rows"] for line in told)
    assert 0 < told[-1]["dims/user"] <= 6
    summary = dict(result.pruning.lines())
    assert summary["pruned"].startswith(f"{result.pruning.ratio:.1%} of the values")
    assert f"{result.pruning.rows_by_chunks[3]:,} with 3" in summary["rows by chunks"]


def test_a_checkpoint_that_was_pruned_otherwise_is_refused(straight, tmp_path, log_schema, log_folder):
    run, _ = straight
    path = latest_checkpoint(run / "checkpoints")
    other = Trainer(replace(CONFIG, prune=replace(CONFIG.prune, chunks=2)), log_schema)
    with pytest.raises(CheckpointError, match=r"pruned with 3 chunks a row, here prune\.chunks is 2"):
        snapshot.restore(other, path)
    with pytest.raises(CheckpointError, match="has chunked rows, and this model whole ones"):
        snapshot.restore(Trainer(replace(CONFIG, prune=PruneConfig()), log_schema), path)
    with pytest.raises(ConfigError, match="was trained with prune = "):
        train_run(other.config, log_schema, log_folder, out=run, resume=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prune": {"ratio": "120%"}}, "prune.ratio must be a share"),
        ({"prune": {"ratio": "much"}}, "prune.ratio must be a share such as 90% or 0.9, got 'much'"),
        ({"prune": {"budget": "2 parsecs"}}, "prune.budget"),
        ({"prune": {"ratio": 0.9, "budget": "1GiB"}}, "cannot both be kept"),
        ({"prune": {"chunk": 3}}, "did you mean prune.chunks"),
        ({"prune": {"ratio": 0.9}, "tables": {"default": {"ttl": 5}}}, "prune decides itself"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(given)


def test_ratios_and_budgets_are_read_as_people_write_them():
    settings = TrainConfig.from_dict({"prune": {"ratio": "87.5%", "period": 50}}).prune.settings()
    assert (settings.ratio, settings.period) == (0.875, 50)
    assert TrainConfig.from_dict({"prune": {"budget": "2GiB"}}).prune.settings().bytes == 2 << 30
    zeros = TrainConfig.from_dict({"prune": {"budget": "2GiB", "tail": "zeros"}})
    assert zeros.prune.settings().budget == 2 << 30
    assert TrainConfig().prune.settings() is None
