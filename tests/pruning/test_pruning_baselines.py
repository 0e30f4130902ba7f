"""The methods that pruning is compared with do what they say, or the comparison would be worth nothing."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pruning_methods.runs as runs
from pruning_methods.growing import GrowingCollection
from pruning_methods.hashing import WHOLE, HashedRows, hashed_bytes, hashed_rows
from pruning_methods.methods import METHODS, UNPRUNED, Case
from pruning_methods.mixed import MixedDimensions, popularity_dims
from pruning_methods.sampler import check_room
from pruning_methods.tables import Estimate, lines_of
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.optim import SGD, RowwiseAdagrad
from rowhaul.pruning import PruneSettings

DIM = 8
NAMES = ["user", "tags"]


def tables():
    return [EmbeddingBagConfig(embedding_dim=DIM, name=name, feature_names=[name]) for name in NAMES]


def batch_of(bags):
    """One list of ids for each sample of each feature."""
    ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
    return KeyedJaggedTensor(NAMES, ids, lengths=torch.tensor([len(bag) for bag in bags]))


def random_bags(random, samples=6, num_keys=9):
    users = [[int(random.integers(num_keys))] for _ in range(samples)]
    tags = [random.integers(num_keys, size=random.integers(4)).tolist() for _ in range(samples)]
    return users + tags


class DenseReference:
    """Every row a parameter, every vector a sum of rows times a projection: slow and obvious."""

    def __init__(self, rows, projections, lr):
        self.rows = {key: torch.tensor(row, requires_grad=True) for key, row in rows.items()}
        self.projections = projections  # by table name
        self.lr = lr

    def forward(self, bags):
        samples = len(bags) // len(NAMES)
        columns = []
        for place, name in enumerate(NAMES):
            vectors = [torch.zeros(DIM) for _ in range(samples)]
            for sample in range(samples):
                for key in bags[place * samples + sample]:
                    vectors[sample] = vectors[sample] + self.rows[name, key] @ self.projections[name]
            columns.append(torch.stack(vectors))
        return torch.cat(columns, dim=1)

    def step(self):
        for row in self.rows.values():
            if row.grad is not None:
                row.data -= self.lr * row.grad
                row.grad = None


def loss_of(vectors):
    """Different for every column, not linear in any."""
    weights = torch.linspace(-1, 1, vectors.shape[1])
    return ((vectors * weights).sum(dim=1) - 1).square().sum()


def stored_rows(collection):
    return {
        (name, int(key)): record[: group_dim(collection, name)].copy()
        for name in NAMES
        for keys, records in collection.rows(name)
        for key, record in zip(keys, records, strict=True)
    }


def group_dim(collection, name):
    return next(one.embedding_dim for one in collection.embedding_bag_configs() if one.name == name)


def grown_rows(collection):
    store = collection.store
    rows = {}
    for table, name in enumerate(NAMES):
        for keys, entries in store.index.blocks(table):
            for key, (level, record, *_) in zip(keys, store.arena.read(entries), strict=True):
                values = store.arenas[level].read(np.array([record]))[0, : store.sizes[level]]
                rows[name, int(key)] = (int(level), values)
    return rows


def test_mixed_dimensions_are_rows_times_projections():
    mixed = MixedDimensions(tables(), [3, DIM], SGD(lr=0.1), seed=1)
    assert list(mixed.projections) == ["user"]  # whole rows need none
    random = np.random.default_rng(0)
    mixed(batch_of([[key] for key in range(9)] * 2))  # every row is there
    projections = {"user": mixed.projections["user"].detach(), "tags": torch.eye(DIM)}
    reference = DenseReference(stored_rows(mixed.rows), projections, lr=0.1)
    optimizer = RowOptimizer(mixed)
    optimizer.zero_grad()
    for _ in range(5):
        bags = random_bags(random)
        vectors = mixed(batch_of(bags)).values()
        expected = reference.forward(bags)
        torch.testing.assert_close(vectors, expected)
        loss_of(vectors).backward()
        loss_of(expected).backward()
        optimizer.step()
        reference.step()
    for key, row in stored_rows(mixed.rows).items():
        torch.testing.assert_close(torch.from_numpy(row), reference.rows[key].detach())
    assert mixed.projections["user"].grad is not None  # the dense optimizer trains it


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125, 0.0625])
def test_popular_tables_have_wider_rows_within_the_share(share):
    num_rows, num_reads = np.array([4, 1000, 30_000, 300]), np.full(4, 60_000)
    dims = popularity_dims(num_rows, num_reads, 32, share)
    assert np.dot(dims, num_rows) <= share * 32 * num_rows.sum()
    assert min(dims) >= 1
    by_popularity = [dims[place] for place in np.argsort(num_rows)]
    assert by_popularity == sorted(by_popularity, reverse=True)
    assert dims[0] == 32


@pytest.mark.parametrize("budget", [30_000, 100_000, 10**6, 10**9])
def test_hashed_tables_take_what_the_budget_allows_and_small_ones_are_whole(budget):
    num_ids, record_bytes = np.array([4, 1000, 30_000, 300]), 20
    rows = hashed_rows(num_ids, record_bytes, budget)
    assert hashed_bytes(rows, num_ids, record_bytes) <= budget
    assert [size == WHOLE for size in rows] == [True, False, False, True]
    assert all(size <= 8 * ids for size, ids in zip(rows, num_ids, strict=True))
    more = [size if size in (WHOLE, 8 * ids) else size + 1 for size, ids in zip(rows, num_ids, strict=True)]
    assert more == rows or hashed_bytes(more, num_ids, record_bytes) > budget


def test_ids_of_one_hash_share_a_row_and_its_training():
    hashed = HashedRows(tables(), [3, WHOLE], np.array([1000, 5]), SGD(lr=0.1), seed=1)
    rows = RowOptimizer(hashed)
    bags = [[key] for key in range(50)] + [[key % 5] for key in range(50)]
    numbers = hashed.hashed(batch_of(bags)).values().numpy()
    assert set(numbers[:50]) == {0, 1, 2}
    assert numbers[50:].tolist() == [key % 5 for key in range(50)]
    vectors = hashed(batch_of(bags)).values()
    loss_of(vectors).backward()
    rows.step()
    hashed.eval()
    vectors = hashed(batch_of(bags)).values()[:, :DIM]
    for number in range(3):
        shared = vectors[np.flatnonzero(numbers[:50] == number)]
        torch.testing.assert_close(shared, shared[:1].expand_as(shared), rtol=0, atol=0)
    assert len(torch.unique(vectors, dim=0)) == 3
    assert hashed.allocated_bytes == (3 + 5) * 4 * DIM + 5 * 47


def test_growing_rows_are_rows_times_projections():
    growing = GrowingCollection(tables(), optimizer=SGD(lr=0.1), seed=1, share=1.0, period=10**6)
    random = np.random.default_rng(0)
    growing(batch_of([[key] for key in range(9)] * 2))
    growing.drop_gradients()
    projections = {name: growing.projections[0][table].detach() for table, name in enumerate(NAMES)}
    reference = DenseReference({key: row for key, (_, row) in grown_rows(growing).items()}, projections, 0.1)
    optimizer = RowOptimizer(growing)
    for _ in range(5):
        bags = random_bags(random)
        vectors, expected = growing(batch_of(bags)).values(), reference.forward(bags)
        torch.testing.assert_close(vectors, expected)
        loss_of(vectors).backward()
        loss_of(expected).backward()
        optimizer.step()
        reference.step()
    for key, (_, row) in grown_rows(growing).items():
        torch.testing.assert_close(torch.from_numpy(row), reference.rows[key].detach())


def train_growing(share, steps=30, num_keys=40):
    growing = GrowingCollection(tables(), optimizer=RowwiseAdagrad(lr=0.1), seed=1, share=share, period=5)
    rows = RowOptimizer(growing)
    random = np.random.default_rng(0)
    for _ in range(steps):
        loss_of(growing(batch_of(random_bags(random, num_keys=num_keys))).values()).backward()
        rows.step()
        assert growing.store.num_values <= growing.store.most_values
    return growing


def test_rows_grow_but_never_beyond_the_share():
    whole, some = (train_growing(share).store for share in (1.0, 0.4))
    assert sum(whole.rows_by_size()) == sum(some.rows_by_size()) == whole.index.num_keys.sum()
    assert whole.rows_by_size()[-1] > some.rows_by_size()[-1] > 0
    assert some.num_values > 0.8 * some.most_values


def test_a_row_that_grows_goes_on_from_where_it_was():
    growing = train_growing(1.0, steps=4, num_keys=6)
    every = batch_of([[key] for key in range(6)] * 2)
    growing.eval()
    before = growing(every).values()
    growing.store.grow(growing._widened)
    assert growing.store.rows_by_size()[1] > 0
    torch.testing.assert_close(growing(every).values(), before)


def test_ids_that_were_never_trained_read_as_zeros_and_stay_unknown():
    growing = train_growing(1.0, steps=2)
    num_rows = growing.store.index.num_keys.sum()
    growing.eval()
    assert not growing(batch_of([[10**9], [10**9, -5]])).values().any()
    assert growing.store.index.num_keys.sum() == num_rows


def test_a_pool_that_holds_too_much_is_noticed():
    collection = EmbeddingBagCollection(
        tables(), optimizer=SGD(lr=0.1), pruning=PruneSettings(ratio=0.5, chunks=2, period=5)
    )
    collection(batch_of([[key] for key in range(20)] * 2))
    (held,) = collection.source.tables
    check_room(held)
    held.arena.allocate(held.map.room.num_chunks)
    with pytest.raises(AssertionError, match="chunks"):
        check_room(held)


def test_intervals_are_students():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2
    assert estimate.half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(Estimate.of([1.0]).half)


@pytest.mark.slow
def test_results_are_kept_and_compared_with_the_unpruned_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    monkeypatch.setattr("pruning_methods.logs.CACHE", tmp_path / "data")
    wanted = [
        runs.Run("criteo", 3000, 0, Case(method, 0.0 if method == UNPRUNED else 0.875)) for method in METHODS
    ]
    results = dict(map(runs.train_and_keep, wanted))
    assert all(runs.known_result(run) == result for run, result in results.items())
    assert runs.known_result(runs.Run("criteo", 3000, 1, Case(UNPRUNED))) is None
    for result in results.values():
        assert result.value_bytes < result.used_bytes <= result.held_bytes
    lines = lines_of(results, "criteo")
    assert [line.case.method for line in lines] == list(METHODS)
    assert lines[0].value_reduction == 1
    for line in lines[1:]:
        assert line.value_reduction >= 7.9, line.case.method
        assert 0.5 < line.results[0].auc < 0.9
