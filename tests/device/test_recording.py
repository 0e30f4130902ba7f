"""What recording a step leaves behind; here the graph is a stand-in, `test_card.py` has real ones."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from test_card import SCHEMA, config, samples

from rowhaul.train.recording import StepRecorder
from rowhaul.train.trainer import Trainer

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.launch import runs_interpreted
from rowhaul.device.rows import rows_on


def trainer_with_rows_there():
    trainer = Trainer(config("cpu", precision="float64"), SCHEMA)
    groups, rule = trainer.collection.feature_groups, trainer.collection.optimizer
    trainer.collection.read_from(rows_on(torch.device("cpu"), groups, rule, 3, 0))
    return trainer


@pytest.mark.skipif(not runs_interpreted(), reason="a graph of a card does not run while it is recorded")
def test_an_ordinary_step_after_recording_learns_from_its_own_batch_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    # The step is taken while it is recorded.
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    first, short = next(samples(1, size=8)), next(samples(1, seed=1, size=3))
    plain, recording = trainer_with_rows_there(), trainer_with_rows_there()
    plain.train_step(plain.prepare(first))

    recorder, batch = StepRecorder(recording, recording._backward), recording.prepare(first)
    recording.set_rates()
    assert recording.collection.source.can_record(batch.ids)
    recorder._record(batch)
    recording.collection.source.replayed(recorder._batch.ids)
    recording.step += 1
    recording.count_row_steps(1)

    for one in (plain, recording):
        one.train_step(one.prepare(short))
    for one, other in zip(plain.model.parameters(), recording.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_with_weights_is_not_replayed_with_those_of_another():
    trainer = trainer_with_rows_there()
    recorder, batch = StepRecorder(trainer, trainer._backward), trainer.prepare(next(samples(1, size=8)))
    weighted = replace(batch, weights=torch.arange(8.0))
    assert trainer.collection.source.can_record(batch.ids)
    assert [recorder.step(weighted) for _ in range(9)] == [None] * 9
