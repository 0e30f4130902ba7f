"""What Adagrad's sums of rows begin with within a memory budget: rows of rare ids should learn little noise.

Adagrad divides a gradient by the root of the squares so far. The first step of a row is then as large as the
learning rate, however small its gradient: an id that is read once learns that one label by heart. A sum that
begins as if the row had been read some times before makes its first steps small, and later ones hardly
smaller. How large squares are depends on the model, its loss and the batch size, so a few steps are tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rowhaul.data.schema import Schema
from rowhaul.optim import Adagrad
from rowhaul.pruning.config import UNPRUNED
from rowhaul.train.config import AUTO, TrainConfig

if TYPE_CHECKING:
    from rowhaul.nn import Batch

STEPS = 20  # that are tried
_READS = 10  # that a row seems to have had before its first
NAME = "initial_accumulator_value"  # of the optimizer's options


def with_first_sums(config: TrainConfig, schema: Schema, batches: Iterable[Batch]) -> TrainConfig:
    """Return a configuration that says what sums begin with, unless it does or the rows' optimizer has none.

    Args:
        config: of a run with a budget.
        schema: of the data.
        batches: the first `STEPS`, which whole rows are trained on in this process, and forgotten.
    """
    if NAME in config.rows.options or not isinstance(config.row_rule(), Adagrad):
        return config
    square = typical_square(config, schema, batches)
    return _beginning_with(config, float(f"{_READS * square:.2g}")) if square > 0 else config


def as_tried(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """Return a configuration with what sums began with when its run did, where it leaves that open."""
    begun = before.rows.options.get(NAME)
    if begun is None or NAME in config.rows.options or config.rows.name != before.rows.name:
        return config
    return _beginning_with(config, begun)


def _beginning_with(config: TrainConfig, value: float) -> TrainConfig:
    return replace(config, rows=replace(config.rows, options={**config.rows.options, NAME: value}))


def typical_square(config: TrainConfig, schema: Schema, batches: Iterable[Batch]) -> float:
    """Return the median of the rows' sums, each the mean of its columns; most rows are read once."""
    from rowhaul.train.trainer import Trainer  # which needs torch, unlike everything else here

    rates = replace(config.rates, decay="constant")  # these are the first steps, of how many is not known
    whole = replace(config, prune=UNPRUNED, row_dtype=AUTO, device="cpu", device_memory="", rates=rates)
    trainer = Trainer(whole, schema)
    for batch in batches:
        trainer.train_step(batch)
    sums = [np.zeros(0)]
    for table in trainer.collection.table_configs():
        for _, records in trainer.collection.rows(table.name):
            sums.append(records[:, table.embedding_dim :].mean(axis=1))
    every = np.concatenate(sums)
    return float(np.median(every)) if len(every) else 0.0
