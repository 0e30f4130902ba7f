"""Steps on a card, recorded once and replayed: to start many small kernels takes longer than they do."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowhaul.nn import Batch
from rowhaul.nn.row_source import GraphableRows
from rowhaul.train.finite import ADVICE, DivergedError

if TYPE_CHECKING:
    from rowhaul.train.trainer import Trainer

_ORDINARY_STEPS = 3  # that prepare the memory of optimizers and libraries


class StepRecorder:
    """Records a step as a CUDA graph, and replays it for batches of the same shape.

    A batch qualifies if each sample has one id a feature, and if there is room for its rows however many are
    new; all others take an ordinary step. When rows get other memory, the next step is recorded anew.
    """

    def __init__(self, trainer: Trainer, backward: Callable[[Batch], Tensor]) -> None:
        self._trainer, self._backward = trainer, backward
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None  # what the graph reads
        self._result: Tensor | None = None  # its loss, and a number that is finite if all gradients are
        self._heard = torch.empty(
            2, dtype=getattr(torch, trainer.config.precision), pin_memory=trainer.device.type == "cuda"
        )
        self._version: Any = None
        self._scores: tuple[Tensor, Tensor] | None = None  # labels and logits, for progressive validation
        self._num_alike = 0  # ordinary steps with batches of one shape
        self._shape: Any = None

    @classmethod
    def of(cls, trainer: Trainer, backward: Callable[[Batch], Tensor]) -> StepRecorder | None:
        """Make one where steps can be recorded; ``backward`` runs a batch's forward and backward pass."""
        if trainer.device.type != "cuda" or not isinstance(trainer.collection.source, GraphableRows):
            return None
        recordable = all(isinstance(group["lr"], Tensor) for group in trainer.dense.param_groups)
        return cls(trainer, backward) if recordable else None

    def step(self, batch: Batch) -> float | None:
        """Take a step, and return its loss; None: take an ordinary one."""
        trainer, rows = self._trainer, self._trainer.collection.source
        assert isinstance(rows, GraphableRows)
        if batch.totals is not None or batch.weights is not None:
            return None  # what its losses are multiplied and divided by changes from batch to batch
        shape = len(batch), batch.global_size
        if shape != self._shape:
            self._shape, self._num_alike, self._graph = shape, 0, None
        if trainer.lifecycle is not None or not rows.can_record(batch.ids):
            return None
        if self._num_alike < _ORDINARY_STEPS:
            self._num_alike += 1
            return None
        trainer.model.train()
        trainer.set_rates()
        rows.set_rates(trainer.rows.param_groups[0]["lr"], trainer.step + 1)
        if self._graph is None or self._version != rows.memory_version:
            self._record(batch)
        assert self._graph is not None
        assert self._batch is not None
        assert self._result is not None
        rows.put(batch.ids, self._batch.ids)
        for name in ("dense", "labels", "index"):
            getattr(self._batch, name).copy_(getattr(batch, name), non_blocking=True)
        self._graph.replay()
        if trainer.progressive is not None and self._scores is not None:
            # The next replay writes to the same memory.
            trainer.progressive.add(*(one.clone() for one in self._scores))
        rows.replayed(self._batch.ids)
        self._heard.copy_(self._result, non_blocking=True)
        # To wait for memory that is not pinned would keep other threads from starting kernels.
        torch.cuda.current_stream().record_event().synchronize()
        loss, check = self._heard.tolist()
        if not (math.isfinite(loss) and math.isfinite(check)):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"a gradient is not finite ({check})"
            raise DivergedError(f"{what} at step {trainer.step + 1:,}: {ADVICE}")
        trainer.count_row_steps(trainer.collection.steps + 1)
        trainer.step += 1
        trainer.samples += len(batch)
        return float(loss)

    def _record(self, batch: Batch) -> None:
        trainer, rows = self._trainer, self._trainer.collection.source
        assert isinstance(rows, GraphableRows)
        self._graph = None
        self._batch = replace(
            batch,
            dense=batch.dense.clone(),
            labels=None if batch.labels is None else batch.labels.clone(),
            index=batch.index.clone(),
            ids=rows.static_copy(batch.ids),
            losses=[],
        )
        trainer.dense.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on loading batches; what Python would free meanwhile must not be freed on the card.
        with (
            _nothing_collected(),
            rows.recording(self._batch.ids),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            loss = self._backward(self._batch)
            self._scores = trainer.progressive.recorded() if trainer.progressive is not None else None
            gradients = [one.grad for one in trainer.model.parameters() if one.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients, 1))
            self._result = torch.stack([loss, norms.sum().to(loss.dtype)])
            rows.step(trainer.rows.param_groups[0]["lr"], trainer.step + 1)
            trainer.dense.step()
        # An ordinary step adds to the gradients it finds. Replays need none here: the graph keeps its memory.
        trainer.dense.zero_grad(set_to_none=True)
        self._graph, self._version = graph, rows.memory_version


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python from collecting garbage for a while; first collect what there is."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
