"""Training in one process: the plain loop, and the exact reference for every distributed one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rowhaul._activity import progressed
from rowhaul._id_kinds import HEX, INTEGER, TEXT, join_kinds
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.stream import SampleStream, check_schema
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    RowOptimizer,
    TableCollection,
)
from rowhaul.nn.key_counts import KeyCounts
from rowhaul.nn.local_rows import TableRows
from rowhaul.nn.losses import Losses, as_columns, per_sample_loss
from rowhaul.nn.models import RecommendationModel, build_model
from rowhaul.train.config import AUTO, RateSchedule, TrainConfig
from rowhaul.train.finite import check_step
from rowhaul.train.losses import TaskLosses
from rowhaul.train.metrics import MetricValues
from rowhaul.train.patience import Patience
from rowhaul.train.progressive import Progressive, scored_task
from rowhaul.train.recording import StepRecorder
from rowhaul.train.row_lifecycle import RowLifecycle
from rowhaul.train.task_metrics import EvaluationMetrics

Progress = Callable[[int, int], None]
"""Called with the samples done and all there are."""


_EVALUATED = "evaluated_step"  # a fact of a checkpoint
_TYPES = {INTEGER: "integer", TEXT: "string", HEX: "hex"}  # of a schema, by kind of ids


class Trainer:
    """A model, its optimizers and how far they have come.

    Example:
        >>> trainer = Trainer(TrainConfig(), schema)
        >>> for samples in SampleStream("data/*.parquet", schema, batch_size=2048):
        ...     loss = trainer.train_step(Batch.from_samples(samples))
        >>> trainer.evaluate(SampleStream("data/test/*.parquet", schema, batch_size=8192)).auc
    """

    def __init__(self, config: TrainConfig, schema: Schema, device: torch.device | str | None = None) -> None:
        check_schema(schema)
        self.config, self.schema = config, schema
        self.device = device if isinstance(device, torch.device) else own_device(device or config.device)
        self.model = make_model(config, schema).to(self.device)
        self._losses = TaskLosses(schema, config.loss, self.model)
        self.rows = RowOptimizer(self.model)
        self._parameters = list(self.model.parameters())
        self.dense = config.dense_optimizer(self._parameters)
        self.progressive: Progressive | None = None  # scores of the samples before they are learned from
        self.patience = Patience(config.patience)
        self.step = 0  # steps taken
        self.samples = 0  # samples consumed
        self.evaluated_step = 0  # the last that was evaluated
        self.total_steps = config.max_steps  # what the learning rates decay towards; 0: not known
        self.key_kinds: dict[str, str] = {}  # of the ids trained on, see `rowhaul._id_kinds`
        self.policies = config.row_policies([one.name for one in self.collection.table_configs()])
        self.lifecycle: RowLifecycle | None = None  # where policies admit and drop rows
        if not all(one.keeps_all for one in self.policies):
            card = self.device if self.device.type == "cuda" else None
            self.lifecycle = RowLifecycle(self.collection, self.policies, card)
            self.collection.read_from(self.lifecycle)
        self._recorder = StepRecorder.of(self, self._backward)

    @property
    def collection(self) -> TableCollection:
        """The model's embedding tables."""
        return self.rows.collections[0]

    @property
    def model_name(self) -> str:
        """What the model is called in messages."""
        return self.config.model.name

    def count_row_steps(self, steps: int) -> None:
        """Set how many steps rows have taken."""
        self.rows.count_from(steps)

    def prepare(self, samples: Samples) -> Batch:
        """A batch to train on; rows that can be are looked up already. May run in the loading thread."""
        batch = Batch.from_samples(samples)
        self.collection.locate_early(batch.ids)
        return self.moved(batch)

    def moved(self, batch: Batch) -> Batch:
        """Put a batch where the model is; its ids go by themselves, where rows are there."""
        return batch.beside(self.device)

    def train_step(self, batch: Batch) -> float:
        """One step on one global batch; returns its mean loss."""
        batch = self._losses.counted(batch)
        recorded = self._recorder.step(batch) if self._recorder is not None else None
        return self.train_parts(batch, [batch]) if recorded is None else recorded

    def train_parts(self, batch: Batch, parts: Sequence[Batch]) -> float:
        """One step on a global batch that is trained in parts, one after the other; returns its mean loss."""
        if self.lifecycle is not None:
            self.lifecycle.begin(self.step, batch.ids)
        if parts[0] is not batch:
            self.collection.announce(batch.ids)
        return self.learn(parts, len(batch), partial(self._step_rows, parts, batch.time))

    def learn(self, parts: Iterable[Batch], num_samples: int, step_rows: Callable[[Tensor], float]) -> float:
        """Take one step: forward and backward on the parts at hand, then rows, then dense weights.

        Args:
            parts: of a global batch, trained one after the other; may be none.
            num_samples: of the global batch.
            step_rows: steps rows, given the parts' loss; returns that of the global batch. On a cluster it
                also sums the dense gradients over the workers. Raises an error where any is not finite.
        """
        self.model.train()
        self.set_rates()
        total = torch.zeros((), dtype=getattr(torch, self.config.precision), device=self.device)
        for part in parts:
            total += self._backward(part)
        loss = step_rows(total)
        self.dense.step()
        self.dense.zero_grad()
        self.step += 1
        self.samples += num_samples
        return loss

    def _backward(self, part: Batch) -> Tensor:
        return backward(self.model, part, self.progressive, self._losses)

    def _step_rows(self, parts: Sequence[Batch], time: int, loss: Tensor) -> float:
        rows = self.collection.source.gradients()
        check_step(self.step + 1, self.model, self._parameters, parts, loss, rows)
        self.rows.step()
        if self.lifecycle is not None:
            self.lifecycle.end(self.step, time)
        return loss.item()

    def evaluate(self, stream: SampleStream, progress: Progress = lambda done, total: None) -> MetricValues:
        """Metrics over a stream; the state of training is left as it was, to the bit."""
        metrics = self.new_metrics()
        for batch, logits in self.score(stream, progress, metrics.keys):
            metrics.add(batch, logits)
        return metrics.compute()

    def new_metrics(self) -> EvaluationMetrics:
        """What an evaluation of this model measures."""
        return EvaluationMetrics(self.schema, self.config.metrics, self.model.targets)

    def score(
        self,
        stream: SampleStream,
        progress: Progress = lambda done, total: None,
        keys: KeyCounts | None = None,
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield (batch, logits) over a stream without learning anything from it.

        ``keys`` counts the ids read, and those never trained; pruned rows cannot be told from those.
        """
        self.check_keys(stream)
        was_training, done = self.model.training, 0
        self.model.eval()
        rows = self.collection.source
        if isinstance(rows, TableRows):
            rows.key_counts = keys
        try:
            with torch.no_grad():
                for samples in stream:
                    batch = self.moved(Batch.from_samples(samples))
                    yield batch, self.model(batch)
                    done += len(batch)
                    progressed()
                    progress(done, stream.num_samples)
        finally:
            self.model.train(was_training)
            if isinstance(rows, TableRows):
                rows.key_counts = None

    def check_keys(self, stream: SampleStream | LiveStream) -> None:
        """Refuse ids of another type than those trained on: they would all be unknown keys."""
        for name, kind in stream.key_kinds.items():
            trained = self.key_kinds.setdefault(name, kind)
            if join_kinds(kind, trained) is None:
                raise DataError(
                    f"{stream.files[0]}: id column {name!r} holds {kind} ids, but the model was trained on "
                    f"{trained} ids, which are different keys; write it with the type it had in training "
                    f"(from CSV: prepare it with `type: {_TYPES[trained]}` in the schema)"
                )

    def expect(self, stream: SampleStream | LiveStream, evaluation: SampleStream | None) -> None:
        """Train on this data to its end, or to ``max_steps``; refuse ids of another type than before.

        Raises:
            ConfigError: for settings that measure what this data, or its schema, does not have.
        """
        if self.config.patience and evaluation is None:
            raise ConfigError(
                f"patience is {self.config.patience}, but there are no samples to evaluate on: name some "
                "(--eval-data), or set patience to 0"
            )
        self.check_keys(stream)
        if evaluation is not None:
            self.check_keys(evaluation)
        self.total_steps = min(self.step + stream.num_batches, self.config.max_steps or sys.maxsize)
        self.progressive = self._progressive(self.config.scored_window(stream.is_live))

    def _progressive(self, window: int) -> Progressive | None:
        """Begin progressive validation, where it is on and there is something to measure."""
        task = scored_task(self.schema.tasks)
        if window and task is None and self.config.progressive_window != AUTO:
            raise ConfigError(
                f"progressive_window is {window}, but progressive validation measures labels of 0 and 1, and "
                f"all of the schema are numbers ({', '.join(one.name for one in self.schema.tasks)}); set it "
                "to 0"
            )
        return Progressive(window, self.samples, task) if window and task is not None else None

    def evaluation_facts(self) -> dict[str, Any]:
        """What a checkpoint says of the evaluations so far."""
        return {_EVALUATED: self.evaluated_step, **self.patience.facts()}

    def recall_evaluations(self, facts: Mapping[str, Any]) -> None:
        """Go on after the evaluations before a checkpoint; earlier versions did not note the last one."""
        self.evaluated_step = facts.get(_EVALUATED, self.step)
        self.patience.restore(facts)

    def set_rates(self) -> None:
        """Give both optimizers the learning rates of the step that comes next.

        Raises:
            ConfigError: they decay, but towards what is not known.
        """
        if not self.total_steps and self.config.rates.decay != "constant":
            raise ConfigError(
                f"rates.decay is {self.config.rates.decay}, but how many steps there will be is not known: "
                "set max_steps, or call expect() with the data before the first step"
            )
        factor = rate_factor(self.config.rates, self.step, self.total_steps)
        for group in self.rows.param_groups:
            group["lr"] = self.config.rows.lr * factor
        for group in self.dense.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.config.dense.lr * factor)
            else:
                group["lr"] = self.config.dense.lr * factor


def own_device(name: str) -> torch.device:
    """Return a device by its name, and make a card the thread's own, which Triton starts kernels on."""
    device = usable_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def usable_device(name: str) -> torch.device:
    """Return a device by its name; refuse a card that is not there, or that rows cannot be on."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= num_cards:
        found = f"{num_cards} cards" if num_cards else "no card"
        raise ConfigError(
            f"device is {name}, but PyTorch finds {found} here; set device to cpu, or see `rowhaul doctor`"
        )
    if find_spec("triton") is None:
        raise ConfigError(f"device is {name}, which needs Triton: pip install 'rowhaul[gpu]'")
    return torch.device("cuda", device.index or 0)


def make_model(config: TrainConfig, schema: Schema) -> RecommendationModel:
    """The model that a configuration describes, over the tables of a schema."""
    dtype = getattr(torch, config.precision)

    def make_collection(tables: list[Any]) -> TableCollection:
        typed = [replace(table, data_type=dtype) for table in tables]
        how: dict[str, Any] = {
            "optimizer": config.row_rule(),
            "seed": config.seed,
            "on_unknown": config.on_unknown,
            "row_settings": config.row_settings(),
        }
        if isinstance(typed[0], EmbeddingBagConfig):
            return EmbeddingBagCollection(typed, device_memory=config.device_bytes, **how)
        if config.device_bytes:
            raise ConfigError(
                f"device_memory is for rows on a card; the rows of {config.model.name}, read one by one, are "
                "in host memory: leave it out"
            )
        return EmbeddingCollection(typed, **how)

    model = build_model(
        config.model.name,
        tables=schema.tables,
        num_dense=len(schema.dense),
        embedding_dim=config.model.embedding_dim,
        make_collection=make_collection,
        seed=config.seed,
        options=config.model.options,
        num_tasks=max(1, len(schema.tasks)),
        histories=schema.histories,
        negatives={one.name: one.negatives_of for one in schema.negatives},
    )
    return model.to(dtype)


def backward(
    model: RecommendationModel,
    batch: Batch,
    progressive: Progressive | None = None,
    losses: Losses = per_sample_loss,
) -> Tensor:
    """Run forward and backward on one part of a global batch; returns its part of the mean loss.

    ``progressive`` is given the scores that the model had for it, of its label where there are several.
    """
    logits, per_sample = model.logits_and_losses(batch, losses)
    if progressive is not None:
        progressive.add(*_of_task(batch, logits, progressive.task))
    loss = batch.loss(per_sample)
    loss.backward()
    return loss.detach()


def _of_task(batch: Batch, logits: Tensor, task: int) -> tuple[Tensor, Tensor]:
    """Labels and logits of the samples that have a label."""
    assert batch.labels is not None
    if batch.labels.dim() == 1:
        return batch.labels, logits
    labels, logits = batch.labels[:, task], as_columns(logits, len(batch))[:, task]
    known = ~torch.isnan(labels)
    return labels[known], logits[known]


def rate_factor(rates: RateSchedule, step: int, total_steps: int) -> float:
    """What the learning rates are multiplied by in a step, counted from 0."""
    if step < rates.warmup_steps:
        return (step + 1) / rates.warmup_steps
    if rates.decay == "constant" or total_steps <= rates.warmup_steps:
        return 1.0
    passed = min(1.0, (step - rates.warmup_steps) / (total_steps - rates.warmup_steps))
    return 1 - passed if rates.decay == "linear" else 0.5 * (1 + math.cos(math.pi * passed))
