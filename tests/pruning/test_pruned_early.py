"""Pruned rows that are looked up in another thread, some batches before they are read: the same bits."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from embedding_cases import jagged, torch_threads
from rowhaul import optim
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.pruning import PruneSettings

# Rows come in every batch and are forgotten in most prunings.
PRUNING = PruneSettings(ratio=0.8, chunks=2, period=3, decay=0.3, enforcement=0.0)


def make(pruning=PRUNING):
    tables = [EmbeddingBagConfig(embedding_dim=6, name=name, feature_names=[name]) for name in "abc"]
    return EmbeddingBagCollection(tables, pruning=pruning, seed=3, optimizer=optim.RowwiseAdagrad(lr=0.1))


def batches(count, samples=60):
    random = np.random.default_rng(4)
    for number in range(count):
        bags = {
            name: [(random.zipf(1.3, size=random.integers(0, 4)) % 500 + 10 * number).tolist()] * 2
            + [(random.zipf(1.3, size=1) % 500).tolist() for _ in range(samples)]
            for name in "abc"
        }
        yield jagged(bags)


def train(collection, coming, rows):
    seen = []
    for batch in coming:
        pooled = collection(batch).values()
        (pooled**2 + pooled).sum().backward()
        rows.step()
        seen.append(pooled.detach().numpy().tobytes())
    return seen


def state_of(collection):
    return {name: tensor.numpy().tobytes() for name, tensor in collection.state_dict().items()}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_batches_located_ahead_in_another_thread_are_read_and_learned_alike(num_threads):
    with torch_threads(num_threads):
        plain, early = make(), make()
        expected = train(plain, batches(24), RowOptimizer(plain))
        coming = list(batches(24))
        rows, found = RowOptimizer(early), []
        with ThreadPoolExecutor(1) as loader:
            located = [loader.submit(early.locate_early, batch) for batch in coming[:4]]
            for number, batch in enumerate(coming):
                located[number].result()
                if number + 4 < len(coming):
                    located.append(loader.submit(early.locate_early, coming[number + 4]))
                found += train(early, [batch], rows)
        assert found == expected
        assert state_of(early) == state_of(plain)
        assert len(early.source._early) == 0
        assert len(early.source.tables[0].map.latest.decision.forget)  # entries did leave


def test_what_was_found_is_for_one_batch_and_one_reading():
    collection = make()
    first, second = batches(2)
    collection.locate_early(first)
    collection.locate_early(second)
    assert len(collection.source._early) == 2
    collection(first)
    assert len(collection.source._early) == 1
    again = collection(first).values()  # looked up anew
    assert torch.equal(again, collection(first).values())
    del second
    gc.collect()
    assert len(collection.source._early) == 0


def test_rows_may_be_cleared_loaded_and_copied_in_between():
    collection, other = make(), make()
    train(collection, batches(6), RowOptimizer(collection))
    (batch,) = batches(1)
    collection.eval()
    expected = collection(batch).values()
    other.locate_early(batch)
    other.load_state_dict(collection.state_dict())
    other.eval()
    assert torch.equal(other(batch).values(), expected)
    other.locate_early(batch)
    twin = copy.deepcopy(other)
    assert len(twin.source._early) == 0
    assert torch.equal(twin(batch).values(), expected)
    other.clear()
    assert not other(batch).values().any()


def test_without_pruning_nothing_is_looked_up():
    collection = make(None)
    (batch,) = batches(1)
    collection.locate_early(batch)
    assert collection.num_rows("a") == 0
