"""What a run trains: a small model, its data, and everything that decides how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rowhaul.data.samples import Samples
from rowhaul.nn import Batch, EmbeddingBagCollection, EmbeddingBagConfig, RowPrecision
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning import PruneSettings
from rowhaul.schedule import HotRows, IdBatch, Plan, RowSizes, Scheduler, ScheduleSettings
from rowhaul.schedule.control import Value
from rowhaul.store.packing import RowPacking

Row = tuple[int, int]  # table, key
Rows = dict[Row, np.ndarray]  # records
FIRST = -1  # decided before the first segment


class TinyModel(torch.nn.Module):
    """Tables and two dense layers: quick to make, and every part has a gradient."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        tables, dtype = case.tables, case.dtype
        self.rows = EmbeddingBagCollection(
            [replace(table, data_type=dtype) for table in tables],
            optimizer=case.optimizer,
            seed=case.seed,
            row_settings=case.pruning or RowPrecision(case.row_dtype),
        )
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        width += case.batches[0].dense.shape[1]
        generator = torch.Generator().manual_seed(case.seed)
        self.first = torch.nn.Parameter(torch.randn(width, 3, generator=generator, dtype=dtype))
        self.last = torch.nn.Parameter(torch.randn(3, generator=generator, dtype=dtype))

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled = self.rows(batch.ids).values()
        inputs = torch.cat([pooled, batch.dense.to(pooled.dtype)], dim=1)
        return torch.tanh(inputs @ self.first) @ self.last


def per_sample_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    assert batch.labels is not None
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch.labels.to(logits.dtype), reduction="none"
    )


@dataclass(frozen=True)
class Case:
    """Everything that determines a run."""

    tables: tuple[EmbeddingBagConfig, ...]
    optimizer: RowOptimizerRule
    settings: ScheduleSettings
    batches: tuple[Samples, ...]
    dtype: torch.dtype = torch.float64
    rates: Callable[[int], float] = lambda iteration: 0.1
    segments: tuple[int | None, ...] = (None,)
    # Control records, by the iteration before whose training rank 0 decides them; see `FIRST`.
    decisions: Mapping[int, tuple[tuple[str, Value], ...]] = field(default_factory=dict)
    # Rows that are replicated instead of those before, after each segment; None where they stay.
    replicated: tuple[HotRows | None, ...] = ()
    dense_lr: float = 0.05
    seed: int = 0
    pruning: PruneSettings | None = None
    row_dtype: str = "float32"
    early: bool = True  # rows at rest move beside the training of the iteration before

    def hot_after(self, segment: int) -> HotRows | None:
        """The rows that replace the replicated ones after a segment, if any do."""
        return self.replicated[segment] if segment < len(self.replicated) else None

    def model(self) -> TinyModel:
        return TinyModel(self)

    def plans(self) -> list[Plan]:
        """What a scheduler by itself makes of the case, decisions aside."""
        scheduler = Scheduler(self.settings, self.id_batches())
        plans: list[Plan] = []
        for segment, count in enumerate(self.segments):
            end = None if count is None else len(plans) + count
            while len(plans) != end and scheduler.fill():
                plans.append(scheduler.plan())
            if (hot := self.hot_after(segment)) is not None:
                scheduler.replicate(hot)
        return plans

    def id_batches(self) -> Iterator[IdBatch]:
        table_of = {name: number for number, table in enumerate(self.tables) for name in table.feature_names}
        for samples in self.batches:
            tables = [table_of[name] for name in samples.features]
            yield IdBatch.from_features(tables, samples.values, samples.lengths)


def row_sizes(
    tables: tuple[EmbeddingBagConfig, ...],
    optimizer: RowOptimizerRule,
    dtype: torch.dtype,
    row_dtype: str = "float32",
) -> RowSizes:
    dims = [table.embedding_dim for table in tables]
    whole = tuple(dim * dtype.itemsize for dim in dims)
    state = tuple(optimizer.state_width(dim) * dtype.itemsize for dim in dims)
    if row_dtype == "float32":
        return RowSizes(whole, state)
    return RowSizes(tuple(RowPacking(row_dtype, dim, 0).value_bytes for dim in dims), state, whole)
