"""Save and resume training in your own loop, without a `Trainer`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rowhaul.checkpoint import Place
from rowhaul.cluster.cluster import Cluster
from rowhaul.nn import TableCollection
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.tables import only_collection
from rowhaul.train.distributed.training import DistributedTraining


@dataclass
class LoopState:
    """A model, the optimizer of its dense weights, and how far they have come."""

    model: nn.Module
    dense: torch.optim.Optimizer
    step: int = 0
    samples: int = 0
    key_kinds: dict[str, str] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def collection(self) -> TableCollection:
        """The embedding tables."""
        return only_collection(self.model)

    def count_row_steps(self, steps: int) -> None:
        """Nothing: rows step with every iteration, and stores count those."""


def save_checkpoint(
    cluster: Cluster,
    training: DistributedTraining,
    optimizer: torch.optim.Optimizer,
    folder: str | Place,
    facts: Mapping[str, Any] | None = None,
) -> Place:
    """Save rows, dense weights and optimizer to a URL, or a folder that all ranks share; returns where.

    A collective call between two segments: every rank makes it, stores too. ``facts`` are plain values of
    your own to keep with it.
    """
    training.runtime.require_rest()
    state = LoopState(training.model, optimizer, training.iteration, training.samples)
    return checkpointing.save(cluster, training, state, folder, facts)


def find_checkpoint(
    cluster: Cluster, folder: str | Place, model: nn.Module, optimizer: torch.optim.Optimizer
) -> checkpointing.Saved | None:
    """Load dense weights and optimizer from the newest intact checkpoint; rows follow in `distribute`.

    A collective call. Give what it returns to ``distribute(saved=...)``, and let the data begin at its
    ``samples``. None where there is no checkpoint yet. Newer ones that are damaged are passed over with a
    warning, and removed by the next save.
    """
    saved = checkpointing.find(cluster, folder, LoopState(model, optimizer))
    if saved is not None and saved.chosen.damaged and cluster.rank == 0:
        warnings.warn("; ".join(saved.chosen.notes), stacklevel=2)
        saved.chosen.set_damaged_aside()
    return saved
