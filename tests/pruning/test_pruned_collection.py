"""Collections whose rows are pruned: what they read, what they learn, and that they keep to their room."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from embedding_cases import jagged, torch_threads
from rowhaul import optim
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.pruning import PruneSettings

FEATURES = ("a", "b", "c", "d")


def make(pruning, dim=6, weighted=False, dtype=torch.float32, **options):
    """Three tables, one read by two features and one pooled by its mean."""
    tables = [
        EmbeddingBagConfig(embedding_dim=dim, name="t", feature_names=["a", "b"], data_type=dtype),
        EmbeddingBagConfig(embedding_dim=dim, name="u", feature_names=["c"], pooling="MEAN", data_type=dtype),
        EmbeddingBagConfig(
            embedding_dim=options.pop("last_dim", dim), name="v", feature_names=["d"], data_type=dtype
        ),
    ]
    options.setdefault("optimizer", optim.RowwiseAdagrad(lr=0.1))
    return EmbeddingBagCollection(tables, is_weighted=weighted, pruning=pruning, seed=3, **options)


def random_batch(random, samples=40, num_keys=60, weighted=False):
    bags = {
        name: [(random.zipf(1.4, size=random.integers(0, 4)) % num_keys).tolist() for _ in range(samples)]
        for name in FEATURES
    }
    batch = jagged(bags)
    if not weighted:
        return batch
    weights = torch.from_numpy(random.random(len(batch.values())).astype(np.float32)).requires_grad_()
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, batch.lengths())


def train(collection, steps, seed=0, rows=None, weighted=False):
    rows = rows or RowOptimizer(collection)
    random = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        batch = random_batch(random, weighted=weighted)
        pooled = collection(batch).values()
        target = torch.from_numpy(random.normal(size=pooled.shape)).to(pooled.dtype)
        (pooled * target + pooled**2).sum().backward()
        rows.step()
        seen.append(pooled.detach().clone())
        if weighted:
            seen.append(batch.weights().grad.clone())
    return seen, rows


def rows_of(collection):
    return {
        (config.name, int(key)): row.tobytes()
        for config in collection.embedding_bag_configs()
        for keys, rows in collection.rows(config.name)
        for key, row in zip(keys, rows[:, : config.embedding_dim], strict=True)
    }


def state_bytes(collection):
    """Everything that counts, whatever order it is kept in."""
    found = {}
    state = {name: tensor.numpy() for name, tensor in collection.state_dict().items()}
    for table in "tuv":
        ends = np.cumsum(state[f"{table}.present"].sum(axis=1))
        parts = np.split(state[f"{table}.chunks"], ends[:-1])
        for i, key in enumerate(state[f"{table}.keys"].tolist()):
            rest = [state[f"{table}.{part}"][i].tobytes() for part in ("present", "utilities", "touched")]
            found[table, key] = (parts[i].tobytes(), *rest)
    return found, {name: array.tobytes() for name, array in state.items() if name.startswith("pruning.")}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", [optim.SGD(lr=0.1), optim.RowwiseAdagrad(lr=0.1), optim.Adam(lr=0.01)])
def test_one_chunk_and_nothing_pruned_learns_the_same_bits_as_without_pruning(rule, weighted):
    plain = make(None, optimizer=rule, weighted=weighted)
    pruned = make(PruneSettings(chunks=1, period=2), optimizer=rule, weighted=weighted)
    expected, _ = train(plain, 6, weighted=weighted)
    found, _ = train(pruned, 6, weighted=weighted)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert rows_of(pruned) == rows_of(plain)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dims", [0, 4])
def test_vectors_are_pooled_from_whole_rows_with_zeros_where_pruned(weighted, dims):
    settings = PruneSettings(ratio=0.6, chunks=3, period=3, dims=dims, cold_start=2)
    collection = make(settings, weighted=weighted, last_dim=7, dtype=torch.float64)
    train(collection, 7, weighted=weighted)
    rows = {
        (config.name, int(key)): row
        for config in collection.embedding_bag_configs()
        for keys, some in collection.rows(config.name)
        for key, row in zip(keys, some, strict=True)
    }
    kept = np.array([np.count_nonzero(row) for row in rows.values()])
    assert 0 < np.count_nonzero(kept == 0) < len(kept)
    assert kept.max() == (dims or 7)
    batch = random_batch(np.random.default_rng(9), weighted=weighted)
    collection.eval()
    pooled = collection(batch)
    for table, feature in (("t", "a"), ("t", "b"), ("u", "c"), ("v", "d")):
        bags, found = batch[feature], pooled[feature].detach().numpy()
        offsets, keys = bags.offsets().tolist(), bags.values().tolist()
        weights = bags.weights().tolist() if weighted else [1.0] * len(keys)
        for sample in range(len(found)):
            ids = range(offsets[sample], offsets[sample + 1])
            nothing = np.zeros(found.shape[1])
            expected = sum((weights[i] * rows.get((table, keys[i]), nothing) for i in ids), nothing)
            if table == "u" and len(ids) > 1:
                expected = expected / len(ids)
            np.testing.assert_allclose(found[sample], expected, rtol=1e-12, atol=1e-15)


def test_threads_change_nothing():
    states = []
    for number in (1, 3):
        with torch_threads(number):
            collection = make(PruneSettings(ratio=0.7, chunks=2, period=3, dims=5, cold_start=4))
            assert len(collection.feature_groups) == number
            train(collection, 9)
            states.append(state_bytes(collection))
    assert states[0] == states[1]


def test_several_backward_passes_are_one_step():
    whole, parts = (
        make(PruneSettings(ratio=0.5, chunks=2, period=100, utility="gradient"), dtype=torch.float64)
        for _ in range(2)
    )
    random = np.random.default_rng(1)
    first = random_batch(random)
    for collection in (whole, parts):
        collection(first)  # both know the same rows, and gave them the same chunks
    weight = torch.from_numpy(random.normal(size=(40, 24)))
    (whole(first).values() * weight * 3).sum().backward()
    (parts(first).values() * weight).sum().backward()
    (parts(first).values() * weight * 2).sum().backward()
    for collection in (whole, parts):
        RowOptimizer(collection).step()
    expected = state_bytes(whole)[0]
    found = state_bytes(parts)[0]
    for name, (chunks, present, utilities, _) in found.items():
        one, other = (np.frombuffer(some, np.float64) for some in (chunks, expected[name][0]))
        np.testing.assert_allclose(one, other, rtol=1e-12)
        assert present == expected[name][1]
        # Each row was read twice as often, with the same gradient in all.
        one, other = (np.frombuffer(some, np.float32) for some in (utilities, expected[name][2]))
        np.testing.assert_allclose(one, 2 * other, rtol=1e-6)


@pytest.mark.parametrize("settings", [{"ratio": 0.9}, {"budget": 40_000}])
def test_the_pool_is_never_exceeded(settings):
    collection = make(PruneSettings(chunks=3, period=4, **settings))
    (tables,) = collection.source.tables
    rows = RowOptimizer(collection)
    random = np.random.default_rng(2)
    fullest = 0
    for _ in range(20):
        batch = random_batch(random, num_keys=4000)
        pooled = collection(batch).values()
        assert tables.map.num_held <= tables.map.room.num_chunks
        pooled.sum().backward()
        rows.step()
        room, num_held, num_entries = tables.map.room, tables.map.num_held, tables.map.num_entries
        assert tables.arena.num_records == num_held <= room.num_chunks
        assert num_entries <= room.num_entries
        if "budget" in settings:
            used = num_held * tables.map.sizes.chunk + num_entries * tables.map.sizes.entry
            assert used <= settings["budget"]
        else:
            assert room.num_chunks == int(0.1 * 3 * tables.map.num_rows + 1e-6)
        fullest = max(fullest, num_held / max(1, room.num_chunks))
    assert fullest > 0.9


def test_a_state_dict_continues_with_the_same_bits():
    settings = PruneSettings(ratio=0.8, chunks=2, period=3, dims=5, cold_start=5)
    straight = make(settings)
    train(straight, 10)
    for cut in (3, 4, 8):  # before and after columns are chosen
        random_state = make(settings)
        _, rows = train(random_state, cut)
        loaded = make(settings)
        train(loaded, 2, seed=8)  # forgotten by the load
        loaded.load_state_dict(random_state.state_dict())
        assert state_bytes(loaded) == state_bytes(random_state)
        more = RowOptimizer(loaded)
        more.load_state_dict(rows.state_dict())
        random = np.random.default_rng(0)
        for step in range(10):
            batch = random_batch(random)
            target = torch.from_numpy(random.normal(size=(40, 24))).to(torch.float32)
            if step < cut:
                continue
            pooled = loaded(batch).values()
            (pooled * target + pooled**2).sum().backward()
            more.step()
        assert state_bytes(loaded) == state_bytes(straight)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("now", [0, 3, 5])
def test_columns_that_were_chosen_stay_whatever_the_settings_say_now(before, now):
    settings = PruneSettings(ratio=0.2, chunks=2, period=3, cold_start=4)
    trained, other = make(replace(settings, dims=before)), make(replace(settings, dims=now))
    train(trained, 6)
    train(other, 2, seed=8)  # forgotten by the load
    other.load_state_dict(trained.state_dict())
    assert rows_of(other) == rows_of(trained)
    assert state_bytes(other) == state_bytes(trained)
    train(other, 6)
    assert [tables.columns.shape[1] for tables in other.source.tables] == [before or 6]


def test_a_state_dict_of_another_kind_is_refused():
    four, two = make(PruneSettings(ratio=0.5, chunks=3)), make(PruneSettings(ratio=0.5, chunks=2))
    train(four, 2)
    train(two, 2)
    before = state_bytes(two)
    with pytest.raises(CheckpointError, match="was pruned with 3 chunks a row, here rows have 2"):
        two.load_state_dict(four.state_dict())
    adam = make(PruneSettings(ratio=0.5, chunks=2), optimizer=optim.Adam(lr=0.1))
    with pytest.raises(CheckpointError, match="needs 9 elements a chunk"):
        adam.load_state_dict(two.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*pruning\.0\.registers"):
        two.load_state_dict(make(None).state_dict())
    assert state_bytes(two) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_rows_of_its_own(duplicate):
    original = make(PruneSettings(ratio=0.5, chunks=2, period=3))
    train(original, 4)
    before = state_bytes(original)
    copied = duplicate(original)
    assert state_bytes(copied) == before
    train(copied, 3, seed=5)
    assert state_bytes(original) == before
    assert state_bytes(copied) != before


def test_serving_reads_the_same_without_utilities_and_state():
    collection = make(PruneSettings(ratio=0.5, chunks=2, period=3), optimizer=optim.Adam(lr=0.1))
    train(collection, 5)
    collection.eval()
    batch = random_batch(np.random.default_rng(4))
    expected = collection(batch).values()
    (tables,) = collection.source.tables
    entry_bytes, chunk_bytes = tables.map.entries.arena.record_bytes, tables.arena.record_bytes
    collection.source.serve()
    assert torch.equal(collection(batch).values(), expected)
    assert tables.map.entries.arena.record_bytes == entry_bytes - 8
    assert tables.arena.record_bytes == chunk_bytes // 3
    collection.train()
    with pytest.raises(ConfigError, match="only serves"):
        collection(batch)


def test_evaluation_inserts_nothing_and_reads_unknown_keys_as_zeros():
    collection = make(PruneSettings(ratio=0.5, chunks=2))
    train(collection, 2)
    before = state_bytes(collection)
    collection.eval()
    pooled = collection(jagged({name: [[10**12]] for name in FEATURES})).values()
    assert not pooled.any()
    assert state_bytes(collection) == before


def test_a_pruning_between_forward_and_backward_is_noticed():
    collection = make(PruneSettings(ratio=0.5, chunks=2, period=1))
    rows = RowOptimizer(collection)
    batch = random_batch(np.random.default_rng(0))
    late = collection(batch).values().sum()
    collection(batch).values().sum().backward()
    rows.step()
    with pytest.raises(ConfigError, match="between forward and backward"):
        late.backward()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunks": 7, "ratio": 0.5}, "prune.chunks is 7, but rows of table 't' have 6 values"),
        ({"ratio": 1.0}, "prune.ratio must be .* below 1"),
        ({"ratio": -0.1}, "prune.ratio must be"),
        ({"ratio": 0.5, "budget": 100}, "cannot both be kept"),
        ({"period": 0}, "prune.period must be at least 1, got 0"),
        ({"decay": -0.1}, "prune.decay must be above 0"),
        ({"utility": "age"}, "prune.utility must be one of access, gradient, got 'age'"),
        ({"ratios": "cubic"}, "prune.ratios must be one of adaptive, linear, power"),
        ({"dims": 3, "chunks": 4}, "fewer than its 4 chunks"),
        ({"dims": 8, "chunks": 4}, "keeps 8 values of a row, but rows of table 't' have 6"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(PruneSettings(**settings))


@pytest.mark.parametrize(("num_bytes", "last_dim"), [(1000, 6), (1, 64)])  # of one byte some tables get none
def test_a_budget_without_a_chunk_for_each_row_of_a_batch_is_refused(num_bytes, last_dim):
    collection = make(PruneSettings(budget=num_bytes, chunks=2), last_dim=last_dim)
    with pytest.raises(
        ConfigError, match=r"one batch reads \d+ different rows, which take at least [\d,]+ with"
    ):
        collection(jagged({name: [list(range(20))] for name in FEATURES}))
    assert collection.num_rows("t") == 0


def test_what_pruning_cannot_answer_is_refused():
    with pytest.raises(ConfigError, match="on_unknown='error' does not go with pruning"):
        make(PruneSettings(ratio=0.5), on_unknown="error")
    collection = make(PruneSettings(ratio=0.5))
    with pytest.raises(ConfigError, match="table 't' is pruned"):
        collection.load_rows("t", np.arange(3), np.zeros((3, 7)))


def test_the_report_counts_what_is_held():
    collection = make(PruneSettings(ratio=0.75, chunks=3, period=3))
    train(collection, 6)
    report = collection.source.report()
    held = [np.count_nonzero(row) for _, rows in rows_by_table(collection) for row in rows]
    assert report.num_chunks * 2 == sum(held)  # chunks of two values, none of which happens to be zero
    assert report.value_bytes == 4 * sum(held)
    assert sum(report.rows_by_chunks) == report.num_rows >= len(held)
    assert report.rows_by_chunks[1:] == tuple(held.count(2 * chunks) for chunks in (1, 2, 3))
    assert report.ratio == pytest.approx(0.75, abs=0.02)
    assert report.allocated_bytes == collection.allocated_bytes
    for (_, rows), table in zip(rows_by_table(collection), report.tables, strict=True):
        assert table.mean_dims == pytest.approx(np.count_nonzero(rows) / len(rows))


def rows_by_table(collection):
    for name in "tuv":
        blocks = list(collection.rows(name))
        yield name, np.concatenate([rows for _, rows in blocks])
