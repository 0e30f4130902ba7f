"""What a model takes beside its rows: weights, gradients, optimizer, and the memory of a step.

Nothing is guessed from layers: the model is built, a few samples go through it while the tensors that the
backward pass needs are counted, and its optimizer takes a step on zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.nn import Batch
from rowhaul.train.config import TrainConfig
from rowhaul.train.trainer import Trainer

TRIED_SAMPLES = 64


@dataclass(frozen=True)
class ModelSize:
    """Bytes of the dense part on a rank that trains, and what its rows are like."""

    weights: int  # buffers included
    gradients: int
    optimizer: int
    per_sample: float  # kept from the forward to the backward pass
    row_width: int  # values of a row, at least the size of an embedding
    groups: tuple[tuple[str, ...], ...]  # tables whose rows lie together, in one process

    @property
    def dense(self) -> int:
        """The dense part, without what depends on the batch."""
        return self.weights + self.gradients + self.optimizer


def measure_model(config: TrainConfig, schema: Schema, samples: Samples) -> ModelSize:
    """Build the model and let ``samples`` go through it; nothing of it is kept."""
    # On a CPU: there may be no card here, and what is counted is the same.
    trainer = Trainer(replace(config, device="cpu", device_memory=""), schema)
    parameters = list(trainer.model.parameters())
    weights = sum(map(_bytes, [*parameters, *trainer.model.buffers()]))
    per_sample = _kept_bytes(trainer, Batch.from_samples(samples)) / max(len(samples), 1)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    trainer.dense.step()
    states = [value for state in trainer.dense.state.values() for value in state.values()]
    return ModelSize(
        weights=weights,
        gradients=sum(map(_bytes, parameters)),
        optimizer=sum(_bytes(value) for value in states if isinstance(value, Tensor)),
        per_sample=per_sample,
        row_width=trainer.collection.table_configs()[0].embedding_dim,
        groups=tuple(tuple(one.name for one in group.specs) for group in trainer.collection.feature_groups),
    )


def _kept_bytes(trainer: Trainer, batch: Batch) -> int:
    """Bytes of all tensors that a forward pass keeps, other than the model's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in trainer.model.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in trainer.model.buffers()}
    kept: dict[int, Tensor] = {}  # by address; held, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    trainer.model.train()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = trainer.model(batch)
    return sum(
        one.untyped_storage().nbytes() for address, one in kept.items() if address not in own
    ) + _bytes(logits)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
