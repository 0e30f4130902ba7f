"""What a sample takes to train on this machine, for `rowhaul simulate` without `--compute`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from rowhaul.cli.simulate.data import IdFiles
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.train.config import ModelConfig, TrainConfig
from rowhaul.train.trainer import Trainer

_STEPS = 5  # after one that compiles kernels


@dataclass(frozen=True)
class Measured:
    """A model like the user's, trained a little on one core."""

    model: str
    seconds: float  # per sample
    dense_bytes: int

    @property
    def note(self) -> str:
        """What was measured, for readers of the results."""
        return (
            f"Compute was measured on this machine: {self.seconds * 1e6:,.0f} us a sample, {self.model} with "
            f"rows of this size on one core, and a dense model of {self.dense_bytes / 1e6:,.1f} MB to sum. "
            "Give --compute and --dense-bytes for a model or a machine of your own."
        )


def measure_compute(ids: IdFiles, dim: int, batch_size: int) -> Measured:
    """Train a default model on the first batches, one thread; the least processor time counts."""
    name = "dlrm" if len(ids.schema.ids) > 1 else "wide_deep"
    limit = batch_size * (_STEPS + 1)
    stream = SampleStream(ids.files, ids.schema, batch_size, limit=limit, require_label=False)
    batches = [_labelled(Batch.from_samples(one)) for one in stream]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Trainer(TrainConfig(model=ModelConfig(name=name, embedding_dim=dim)), ids.schema)
        times = [_seconds_of(trainer, batch) / len(batch) for batch in (batches[0], *batches)]
    finally:
        torch.set_num_threads(threads)
    dense_bytes = sum(one.numel() * one.element_size() for one in trainer.model.parameters())
    return Measured(name, min(times[1:]), dense_bytes)


def _labelled(batch: Batch) -> Batch:
    """The batch with made-up labels: the time does not depend on them."""
    labels = np.arange(len(batch)) % 2
    return replace(batch, labels=torch.from_numpy(labels.astype(np.float32)))


def _seconds_of(trainer: Trainer, batch: Batch) -> float:
    begin = time.process_time()
    trainer.train_step(batch)
    return time.process_time() - begin
