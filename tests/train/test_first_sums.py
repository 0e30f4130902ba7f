"""Adagrad's sums within a budget begin with the squares of some reads, as a few steps show them."""

from dataclasses import replace

import numpy as np
import pytest

from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.nn import Batch
from rowhaul.pruning.config import PruneConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.first_sums import NAME, as_tried, typical_square, with_first_sums
from rowhaul.train.trainer import Trainer

SCHEMA = Schema.from_dict({"label": "click", "ids": ["user", "item"]})
CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4),
    rows=OptimizerConfig("rowwise_adagrad", 0.02),
    prune=PruneConfig(budget="64KiB"),
    batch_size=50,
)


def batches(count=1, size=50):
    """Ids that are read once each."""
    random = np.random.default_rng(0)
    for number in range(count):
        ids = np.arange(2 * size) + 2 * size * number
        labels = random.integers(0, 2, size).astype(np.float32)
        lengths, index = np.ones((2, size), np.int32), np.arange(size) + size * number
        dense = np.zeros((size, 0), np.float32)
        yield Batch.from_samples(Samples(("user", "item"), ids, lengths, dense, labels, index))


def values_after(lr, batch):
    """All rows after a step of plain gradient descent."""
    trainer = Trainer(replace(CONFIG, rows=OptimizerConfig("sgd", lr), prune=PruneConfig()), SCHEMA)
    trainer.train_step(batch)
    blocks = [block for table in ("user", "item") for block in trainer.collection.rows(table)]
    keys = np.concatenate([keys for keys, _ in blocks])
    return np.concatenate([records for _, records in blocks])[np.argsort(keys)]


def test_a_typical_square_is_that_of_the_median_row():
    gradients = values_after(1.0, next(batches())) - values_after(2.0, next(batches()))
    expected = np.median((gradients.astype(np.float64) ** 2).mean(axis=1))
    assert typical_square(CONFIG, SCHEMA, batches()) == pytest.approx(expected, rel=1e-3)
    both = replace(CONFIG, rows=OptimizerConfig("adagrad", 0.02))
    assert typical_square(both, SCHEMA, batches()) == pytest.approx(expected, rel=1e-3)


def test_sums_begin_with_ten_reads_where_nothing_else_is_said():
    found = with_first_sums(CONFIG, SCHEMA, batches(3))
    square = typical_square(CONFIG, SCHEMA, batches(3))
    assert found.row_rule().initial_state == pytest.approx(10 * square, rel=0.05)
    assert replace(found, rows=CONFIG.rows) == CONFIG
    assert TrainConfig.from_dict(found.to_dict()) == found
    assert as_tried(CONFIG, found) == found
    assert with_first_sums(CONFIG, SCHEMA, ()) == CONFIG  # nothing to try it on


@pytest.mark.parametrize(
    "rows", [OptimizerConfig("sgd", 0.1), OptimizerConfig("rowwise_adagrad", 0.1, {NAME: 0.5})]
)
def test_sums_that_are_given_or_not_there_stay(rows):
    config = replace(CONFIG, rows=rows)
    assert with_first_sums(config, SCHEMA, batches()) == config
    assert as_tried(config, with_first_sums(CONFIG, SCHEMA, batches())) == config
