"""Checkpoints that are written while training goes on are those of a run that stops to save."""

import threading
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from test_trainer import state_bytes

from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, load_trained, snapshot, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig, PruneConfig
from rowhaul.train.save_thread import Pacer, SaveCancelledError, SaveThread
from rowhaul.train.trainer import Trainer
from save_threads import wait_for_saves
from slow_cases import mostly_slow

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4, options={"dropout": 0.2}),
    rows=OptimizerConfig("adam", 0.01),
    dense=OptimizerConfig("Adam", 0.01),
    batch_size=256,
    shuffle_rows=1000,
)
CONFIGS = {
    "whole": CONFIG,
    "rows that come and go": replace(
        CONFIG, tables={"default": {"ttl": 2, "admit_after": 2}, "item": {"max_rows": 200, "evict": "lfu"}}
    ),
    "pruned": replace(CONFIG, prune=PruneConfig(ratio="50%", chunks=2, period=3, cold_start=4)),
}


def everything(path):
    """All that a checkpoint holds: rows by key, tensors and arrays by name, facts."""
    reader = CheckpointReader(path)
    reader.verify()
    found = {f"fact {name}": value for name, value in reader.facts.items() if name != "run_config"}
    for group in reader.groups:
        found |= {f"{group}/{name}": one.numpy().tobytes() for name, one in reader.tensors(group).items()}
    row_files = {name for table in reader.tables.values() for name in table.files}
    for name in reader.file_bytes.keys() - row_files:
        if not name.startswith("tensors-"):
            found |= {f"{name}/{key}": one.tobytes() for key, one in reader.arrays(name).items()}
    for table, entry in reader.tables.items():
        rows = {}
        for keys, records in reader.rows(table):
            rows |= {int(key): row.tobytes() for key, row in zip(keys, records, strict=True)}
        assert len(rows) == entry.num_rows
        found[f"rows {table}"] = rows
    return found


def batches(trainer, data, schema, count):
    stream = SampleStream(
        data, schema, trainer.config.batch_size, epochs=3, shuffle_rows=1000, start=trainer.samples
    )
    return (Batch.from_samples(one) for one in islice(stream, count))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_snapshot_is_the_checkpoint_of_its_step(name, tmp_path, log_schema, log_folder):
    trainers = [Trainer(CONFIGS[name], log_schema) for _ in range(2)]
    for trainer in trainers:
        for batch in batches(trainer, log_folder, log_schema, 9):
            trainer.train_step(batch)
    trainer, undisturbed = trainers
    snapshot.save(trainer, tmp_path / "stopped", {"mine": 1})
    taken = snapshot.Snapshot(trainer, {"mine": 1})
    following = batches(trainer, log_folder, log_schema, 12)

    def train():
        for batch in islice(following, 2):
            trainer.train_step(batch)

    train()
    taken.write(tmp_path / "beside", train)
    taken.close()
    assert trainer.step > 12, "nothing was trained between two tables"
    assert everything(tmp_path / "beside") == everything(tmp_path / "stopped")
    for batch in batches(undisturbed, log_folder, log_schema, trainer.step - 9):
        undisturbed.train_step(batch)
    assert state_bytes(trainer) == state_bytes(undisturbed)


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "rows that come and go"))
def test_a_run_that_saves_beside_training_learns_the_same(name, tmp_path, log_schema, log_folder):
    """And resumes from any of its checkpoints to the same bits."""
    config = replace(CONFIGS[name], max_steps=20, keep_checkpoints=100)
    train_run(config, log_schema, log_folder, out=tmp_path / "a")
    train_run(replace(config, checkpoint_every=3), log_schema, log_folder, out=tmp_path / "b")
    expected = everything(tmp_path / "a" / "checkpoints" / "step-000000020")
    assert everything(tmp_path / "b" / "checkpoints" / "step-000000020") == expected
    saved = finished_checkpoints(tmp_path / "b" / "checkpoints")
    assert len(saved) > 1
    for path in saved[1:]:
        if path != saved[0]:
            path.rename(tmp_path / path.name)
    train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True)
    assert everything(tmp_path / "b" / "checkpoints" / "step-000000020") == expected
    assert not any(thread.name == "rowhaul-save" for thread in threading.enumerate())


class Listener:
    """Follows a run, waiting for the save that is under way after every step, so that none is left out."""

    def __init__(self):
        self.notes = []

    started = evaluating = evaluated = lambda self, *_: None

    def noted(self, text):
        self.notes.append(text)

    def stepped(self, samples, loss):
        wait_for_saves()


def test_a_save_that_fails_is_told_and_the_next_one_tries_again(
    tmp_path, log_schema, log_folder, monkeypatch
):
    config = replace(CONFIG, max_steps=20, checkpoint_every=5, keep_checkpoints=100)
    write, failing = snapshot.Snapshot.write, [1, 3]
    calls = iter(range(1, 100))

    def on_full_disk(self, path, pace):
        if next(calls) in failing:
            blocked = path.with_name(path.name + ".unfinished")
            blocked.parent.mkdir(parents=True, exist_ok=True)
            blocked.write_text("in the way")
        write(self, path, pace)

    monkeypatch.setattr(snapshot.Snapshot, "write", on_full_disk)
    listener = Listener()
    train_run(config, log_schema, log_folder, out=tmp_path / "a", listener=listener)
    names = [path.name for path in finished_checkpoints(tmp_path / "a" / "checkpoints")]
    assert names == ["step-000000010", "step-000000020"]
    first, second = listener.notes
    assert first.startswith("the checkpoint of step 5 failed, training goes on: ")
    assert "there is none yet" in first
    assert second.startswith("the checkpoint of step 15 failed, training goes on: ")
    assert "the newest is of step 10" in second


def test_the_save_at_the_end_raises(tmp_path, log_schema, log_folder):
    (tmp_path / "a").mkdir()

    class InTheWay(Listener):
        def stepped(self, samples, loss):
            path = tmp_path / "a" / "checkpoints"
            if not path.exists():
                path.write_text("a file")

    config = replace(CONFIG, max_steps=4, checkpoint_every=2)
    with pytest.raises((CheckpointError, OSError)):
        train_run(config, log_schema, log_folder, out=tmp_path / "a", listener=InTheWay())


def test_a_user_who_leaves_at_once_leaves_nothing_half_written(tmp_path, log_schema, log_folder, monkeypatch):
    begun, write = threading.Event(), snapshot.Snapshot.write

    def slowly(self, path, pace):
        def wait():
            begun.set()
            while True:
                pace()

        write(self, path, wait)

    monkeypatch.setattr(snapshot.Snapshot, "write", slowly)

    class Leaves(Listener):
        def stepped(self, samples, loss):
            if begun.is_set():
                raise KeyboardInterrupt

    config = replace(CONFIG, epochs=1000, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        train_run(config, log_schema, log_folder, out=tmp_path / "a", listener=Leaves())
    assert list((tmp_path / "a" / "checkpoints").iterdir()) == []
    assert not any(thread.name == "rowhaul-save" for thread in threading.enumerate())


def test_an_error_in_training_lets_the_save_complete(tmp_path, log_schema, log_folder):
    class Fails(Listener):
        steps = 0

        def stepped(self, samples, loss):
            self.steps += 1
            if self.steps > 2:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train_run(
            replace(CONFIG, checkpoint_every=2), log_schema, log_folder, out=tmp_path / "a", listener=Fails()
        )
    assert load_trained(tmp_path / "a").step == 2


def test_the_pacer_bounds_a_thread_and_ends_it():
    pacer, ended = Pacer(), threading.Event()

    def work(pace):
        try:
            while True:
                np.ones(1 << 16).sum()
                pace()
        finally:
            ended.set()

    saving = SaveThread()
    saving.start(work, lambda error: pytest.fail(str(error)))  # not called where a save is cancelled
    assert saving.is_busy
    saving.close()
    assert ended.is_set()
    assert not saving.is_busy
    pacer.end()
    with pytest.raises(SaveCancelledError):
        pacer()


@pytest.mark.parametrize("name", ["whole", "rows that come and go"])
def test_a_snapshot_knows_the_rows_that_have_changed(name, tmp_path, log_schema, log_folder):
    """Those that differ between two checkpoints; also rows that came and went in between."""
    trainer = Trainer(replace(CONFIGS[name], precision="float64"), log_schema)
    trainer.collection.source.track_changes()
    saved, snapshots = {0: {}}, {}
    for step, batch in enumerate(batches(trainer, log_folder, log_schema, 8), 1):
        trainer.train_step(batch)
        if step in (3, 5, 8):
            snapshots[step] = snapshot.Snapshot(trainer)
            snapshot.save(trainer, tmp_path / str(step))
            snapshots[step].close()
            found = everything(tmp_path / str(step))
            rows = (
                (table.partition(" ")[2], some) for table, some in found.items() if table.startswith("rows ")
            )
            saved[step] = {(table, key): row for table, some in rows for key, row in some.items()}
    for step, taken in snapshots.items():
        for before in (one for one in saved if one < step):
            found = {(table, key) for table, keys in taken.changed_since(before) for key in keys.tolist()}
            every = saved[step].keys() | saved[before].keys()
            differs = {row for row in every if saved[step].get(row) != saved[before].get(row)}
            assert found & every == differs
            assert (found == differs) or name != "whole"
            assert len(differs) > 10
