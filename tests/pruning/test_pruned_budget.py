"""That a budget holds where it is hardest to keep: many small tables, whose index is mostly air."""

import numpy as np
import pytest
import torch

from rowhaul import optim
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.deciding.chunk_map import compacted
from rowhaul.pruning.deciding.room import Sizes, room_for
from rowhaul.store.index import KeyIndex

NAMES = [f"t{number}" for number in range(26)]


def drifting_batches(num_steps, samples=128):
    """Half of the tables get new ids for a third of the steps, then the others: sizes change places."""
    random = np.random.default_rng(0)
    lengths = torch.ones(len(NAMES) * samples, dtype=torch.int64)
    for step in range(num_steps):
        keys = random.integers(0, 50, (len(NAMES), samples))
        growing = (np.arange(len(NAMES)) + step // (num_steps // 3)) % 2 == 0
        fresh = np.arange(growing.sum() * samples) + 10**6 * (step + 1)
        keys[growing] = fresh.reshape(-1, samples)
        yield KeyedJaggedTensor(NAMES, torch.from_numpy(keys.reshape(-1)), lengths=lengths)


@pytest.mark.parametrize("mebibytes", [1.5, 2.0])
def test_many_small_tables_stay_within_a_budget_at_every_step(mebibytes):
    budget = int(mebibytes * 2**20)
    tables = [EmbeddingBagConfig(embedding_dim=32, name=name, feature_names=[name]) for name in NAMES]
    pruning = PruneSettings(budget=budget, chunks=4, period=5)
    collection = EmbeddingBagCollection(tables, optimizer=optim.RowwiseAdagrad(lr=0.1), pruning=pruning)
    rows = RowOptimizer(collection)
    fullest = 0
    for batch in drifting_batches(36):
        collection(batch).values().square().sum().backward()
        assert collection.allocated_bytes <= budget
        rows.step()
        assert collection.allocated_bytes <= budget
        fullest = max(fullest, collection.allocated_bytes)
    assert fullest > 0.6 * budget


def test_a_larger_budget_never_buys_fewer_chunks():
    sizes = Sizes(chunk=36, entry=36, num_chunks=4)
    budgets = np.linspace(1 << 20, 1 << 30, 500).astype(int)
    bought = [room_for(PruneSettings(budget=int(one)), int(one), sizes, 0).num_chunks for one in budgets]
    assert bought == sorted(bought)
    assert (
        bought[-1] * (36 + 36 + 23) > 0.85 * budgets[-1]
    )  # at 23 bytes in a large index, most of it is used


def test_a_compacted_index_knows_the_same_keys():
    index = KeyIndex(3)
    keys = np.random.default_rng(0).permutation(30_000)
    starts = np.array([0, 12_000, 12_000, 30_000])
    index.add(keys, starts, np.arange(len(keys)), keys * 2)
    gone = np.sort(np.random.default_rng(1).permutation(30_000)[:25_000])
    index.delete(keys[gone], np.searchsorted(gone, starts))
    smaller = compacted(index)
    assert np.array_equal(smaller.find(keys, starts)[0], index.find(keys, starts)[0])
    assert smaller.num_keys.tolist() == index.num_keys.tolist()
    assert smaller.allocated_bytes < 0.4 * index.allocated_bytes
