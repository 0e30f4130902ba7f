"""That pruning gives memory back: measured bytes of everything rows take, sampled at every step."""

import numpy as np
import torch

from rowhaul import optim
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.pruning import PruneSettings


def make(pruning):
    tables = [EmbeddingBagConfig(embedding_dim=32, name=name, feature_names=[name]) for name in ("a", "b")]
    collection = EmbeddingBagCollection(tables, optimizer=optim.RowwiseAdagrad(lr=0.1), pruning=pruning)
    return collection, RowOptimizer(collection)


def batches(num_steps, samples=16_000):
    """Half of the ids are new in every batch; the others are drawn from a hundred that come back."""
    random = np.random.default_rng(0)
    lengths = torch.ones(2 * samples, dtype=torch.int64)
    for step in range(num_steps):
        keys = np.arange(2 * samples) + 2 * samples * step + 1000
        old = random.random(2 * samples) < 0.5
        keys[old] = random.integers(0, 100, int(old.sum()))
        yield KeyedJaggedTensor(["a", "b"], torch.from_numpy(keys), lengths=lengths)


def train_step(collection, rows, batch):
    collection(batch).values().sum().backward()
    rows.step()


def test_at_99_percent_everything_takes_at_most_a_tenth():
    plain, plain_rows = make(None)
    pruned, pruned_rows = make(PruneSettings(ratio=0.99, chunks=4, period=4))
    for step, batch in enumerate(batches(12)):
        train_step(plain, plain_rows, batch)
        train_step(pruned, pruned_rows, batch)
        if step >= 5:  # by then the smallest blocks are small beside the whole
            assert pruned.allocated_bytes <= 0.1 * plain.allocated_bytes
    report = pruned.source.report()
    assert report.ratio >= 0.99
    assert abs(report.num_rows - sum(plain.num_rows(name) for name in "ab")) <= 0.03 * report.num_rows
    popular = {int(key): row for keys, rows in pruned.rows("a") for key, row in zip(keys, rows, strict=True)}
    assert all(np.count_nonzero(popular[key]) == 32 for key in range(100))  # what comes back is kept whole


def test_a_budget_is_kept_at_every_step():
    budget = 6 << 20
    collection, rows = make(PruneSettings(budget=budget, chunks=4, period=4))
    fullest = 0
    for batch in batches(12):
        collection(batch).values().sum().backward()
        assert collection.allocated_bytes <= budget
        rows.step()
        assert collection.allocated_bytes <= budget
        fullest = max(fullest, collection.allocated_bytes)
    assert fullest > 0.6 * budget
