"""Rows within a budget in one process: against dictionaries, PyTorch, and themselves in other orders."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from slot_oracle import SlowBudget

from embedding_cases import jagged, torch_threads
from rowhaul import optim
from rowhaul.budget import BudgetSettings
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.store import TableSpec
from slow_cases import mostly_slow

# Few rows for many ids, so that rows change hands in most stops.
SMALL = BudgetSettings(6000, shared=0.2, period=4, decay=0.9)
DIMS = {"a": 4, "b": 6, "c": 4}
FEATURES = {"a": ["a"], "b": ["b"], "c": ["c", "d"]}


PACKED = [replace(SMALL, row_dtype=one) for one in ("bfloat16", "int8")]


def make(settings=SMALL, optimizer=None, data_type=torch.float32):
    tables = [
        EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=FEATURES[name], data_type=data_type)
        for name, dim in DIMS.items()
    ]
    return EmbeddingBagCollection(tables, pruning=settings, seed=3, optimizer=optimizer or optim.SGD(lr=0.5))


def bags(number, samples=20, below=200):
    random = np.random.default_rng([4, number])
    return {
        feature: [
            (random.zipf(1.2, size=random.integers(0, 4)) % below + 3 * number).tolist()
            for _ in range(samples)
        ]
        for feature in "abcd"
    }


def train(collection, batches, rows):
    """Train; returns the vectors of each batch."""
    seen = []
    for batch in batches:
        pooled = collection(batch).values()
        (pooled**2 + pooled).sum().backward()
        rows.step()
        seen.append(pooled.detach().numpy().tobytes())
    return seen


def state_of(collection):
    return {name: tensor.numpy().tobytes() for name, tensor in collection.state_dict().items()}


def handed_over(collection):
    """Whether ids took rows of others."""
    return any(tables.map.num_taken == tables.map.room.num_slots for tables in collection.source.tables)


def test_only_rows_that_the_map_knows_are_loaded():
    collection = make()
    train(collection, [jagged(bags(number)) for number in range(9)], RowOptimizer(collection))
    for tables in collection.source.tables:
        every = np.arange(-9, tables.map.room.num_slots + 3)
        for table in range(len(tables.tables)):
            known = tables.names(table)
            records = tables.arena.read(tables.locate(np.full(len(known), table), known))
            tables.load_stored(table, known[::-1], records[::-1])
            for wrong in np.setdiff1d(every, known)[:40]:
                with pytest.raises(CheckpointError, match=f"has no row {wrong}, and 1 such rows are given"):
                    tables.load_stored(table, np.append(known[:3], wrong), records[:4])
            assert np.array_equal(tables.names(table), known)


@pytest.mark.parametrize("num_threads", mostly_slow([1, 3], 3))
@pytest.mark.parametrize("data_type", mostly_slow([torch.float32, torch.float64], torch.float32))
@pytest.mark.parametrize("rule", [optim.SGD, optim.Adagrad])
def test_rows_are_those_of_a_dictionary(rule, data_type, num_threads):
    """All vectors of 30 batches, then all rows with their optimizer's state, to the bit."""
    lr = 0.25
    with torch_threads(num_threads):
        collection = make(optimizer=rule(lr=lr), data_type=data_type)
    dtype = str(data_type).removeprefix("torch.")
    specs = [
        TableSpec(config.name, config.embedding_dim, *config.initial_range)
        for config in collection.embedding_bag_configs()
    ]
    slow = SlowBudget(specs, collection.optimizer, dtype, 3, SMALL)
    table_of = {feature: list(DIMS).index(name) for name in DIMS for feature in FEATURES[name]}
    rows, num_shared = RowOptimizer(collection), 0
    for number in range(1, 31):
        batch = bags(number)
        slow.count([(table_of[one], key) for one in batch for bag in batch[one] for key in bag])
        pooled = collection(jagged(batch))
        gradients = {}
        for feature, some in batch.items():
            vectors, table = pooled[feature].detach().numpy(), table_of[feature]
            for sample, bag in enumerate(some):
                expected = np.zeros(specs[table].dim, dtype)
                for key in bag:
                    expected = expected + slow.values(table, key)
                np.testing.assert_array_equal(vectors[sample], expected)
                for key in bag:
                    name = table, slow.name_of(table, key)
                    num_shared += name[1] < 0
                    before = gradients.get(name, np.zeros(specs[table].dim, dtype))
                    gradients[name] = before + (2 * expected + 1)
        every = pooled.values()
        (every**2 + every).sum().backward()
        rows.step()
        slow.step(gradients, lr, number)
    assert num_shared > 200
    assert handed_over(collection)
    found = {}
    for table, name in enumerate(DIMS):
        for names, records in collection.rows(name):
            assert (np.diff(names) > 0).all()
            dim = specs[table].dim
            found |= {
                (table, int(one)): (record[:dim].tobytes(), record[dim:].tobytes())
                for one, record in zip(names, records, strict=True)
            }
        assert collection.num_rows(name) == sum(one == table for one, _ in slow.rows)
    assert found == {name: (values.tobytes(), state.tobytes()) for name, (values, state) in slow.rows.items()}


def test_rows_of_their_own_learn_as_those_of_pytorch():
    """With a budget for all ids, from the first stop on: nothing is shared."""
    collection = make(BudgetSettings(1 << 20))
    batch = bags(1, below=50)
    rows = RowOptimizer(collection)
    collection(jagged(batch)).values().sum().backward()
    rows.step()
    plain, first_column = {}, 0
    for name, dim in DIMS.items():
        keys = sorted({key for feature in FEATURES[name] for bag in batch[feature] for key in bag})
        each = collection.eval()(jagged({one: [[key] for key in keys] for one in "abcd"})).values().detach()
        plain[name] = torch.nn.EmbeddingBag(
            len(keys), dim, mode="sum", _weight=each[:, first_column:][:, :dim].clone()
        )
        plain[name].numbers = {key: number for number, key in enumerate(keys)}
        first_column += dim * len(FEATURES[name])
    collection.train()
    steps = torch.optim.SGD([one.weight for one in plain.values()], lr=0.5)
    for _ in range(10):
        found = collection(jagged(batch))
        expected = []
        for name, one in plain.items():
            for feature in FEATURES[name]:
                values = [one.numbers[key] for bag in batch[feature] for key in bag]
                offsets = np.cumsum([0, *(len(bag) for bag in batch[feature])])[:-1]
                expected.append(one(torch.tensor(values), torch.tensor(offsets)))
                torch.testing.assert_close(found[feature], expected[-1])
        steps.zero_grad()
        (torch.cat(expected, 1) ** 2).mean().backward()
        steps.step()
        (found.values() ** 2).mean().backward()
        rows.step()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_located_ahead_in_another_thread_are_learned_alike(num_threads):
    with torch_threads(num_threads):
        plain, early = make(), make()
    coming = [jagged(bags(number)) for number in range(24)]
    expected = train(plain, coming, RowOptimizer(plain))
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


def test_a_batch_read_in_parts_is_counted_as_a_whole():
    whole, parts = make(optimizer=optim.SGD(lr=0.25)), make(optimizer=optim.SGD(lr=0.25))
    in_whole, in_parts = RowOptimizer(whole), RowOptimizer(parts)
    for number in range(12):
        batch = bags(number)
        whole(jagged(batch)).values().sum().backward()
        in_whole.step()
        parts.announce(jagged(batch))
        for some in (slice(7), slice(7, None)):
            part = {feature: every[some] for feature, every in batch.items()}
            parts(jagged(part)).values().sum().backward()
        in_parts.step()
    # Sums of ones are exact, however they are parted.
    assert state_of(whole) == state_of(parts)


def test_groups_of_any_number_of_threads_hold_the_same():
    states = []
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            collection = make()
        train(collection, [jagged(bags(number)) for number in range(20)], RowOptimizer(collection))
        states.append(state_of(collection))
    assert states[0] == states[1] == states[2]


def test_no_id_is_an_error():
    tables = [EmbeddingBagConfig(embedding_dim=4, name="a", feature_names=["a"])]
    with pytest.raises(ConfigError, match="on_unknown='error' does not go with a memory budget"):
        EmbeddingBagCollection(tables, row_settings=SMALL, on_unknown="error")


def test_evaluation_changes_nothing_and_knows_every_id():
    collection = make()
    train(collection, [jagged(bags(number)) for number in range(9)], RowOptimizer(collection))
    before = state_of(collection)
    collection.eval()
    never = collection(jagged({feature: [[10**12 + 1]] for feature in "abcd"})).values()
    assert (never != 0).all()
    assert state_of(collection) == before


@pytest.mark.parametrize("budget", [SMALL, *PACKED])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_learn_the_same_without_touching_the_original(duplicate, budget):
    one = make(budget, optim.Adam(lr=0.1))
    train(one, [jagged(bags(number)) for number in range(13)], RowOptimizer(one))
    before, other = state_of(one), duplicate(one)
    later = [jagged(bags(number)) for number in range(13, 30)]
    learned = train(other, later, RowOptimizer(other))
    assert state_of(one) == before
    assert train(one, later, RowOptimizer(one)) == learned
    assert state_of(one) == state_of(other) != before


@pytest.mark.parametrize("budget", [SMALL, *PACKED])
def test_a_state_goes_on_where_it_was(budget):
    one, other, new = (make(budget, optim.Adagrad(lr=0.1)) for _ in range(3))
    rows = RowOptimizer(one)
    train(one, [jagged(bags(number)) for number in range(13)], rows)
    kept = copy.deepcopy(one)
    other.load_state_dict(one.state_dict())
    resumed = RowOptimizer(other)
    resumed.load_state_dict(rows.state_dict())
    later = [jagged(bags(number)) for number in range(13, 30)]
    assert train(one, later, rows) == train(other, later, resumed)
    assert state_of(one) == state_of(other)
    assert state_of(kept) != state_of(one)
    kept.load_state_dict(one.state_dict())
    assert state_of(kept) == state_of(one)
    kept.clear()
    assert state_of(kept) == state_of(new)


def test_states_of_other_budgets_and_rows_are_refused():
    one = make()
    before = state_of(one)
    with pytest.raises(CheckpointError, match=r"same tables, row size and prune\.budget"):
        one.load_state_dict(make(BudgetSettings(8000, shared=0.2)).state_dict())
    with pytest.raises(CheckpointError, match="this model needs float32"):
        one.load_state_dict(make(BudgetSettings(12000), optim.Adagrad(lr=1)).state_dict())
    assert state_of(one) == before
    with pytest.raises(ConfigError, match="come from a checkpoint or a state_dict"):
        one.load_rows("a", np.zeros(0, np.int64), np.zeros((0, 4), np.float32))
    pooled = one(jagged(bags(0))).values()
    one.clear()
    with pytest.raises(ConfigError, match="run forward again"):
        pooled.sum().backward()


@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_bytes", [1 << 20, 5_000_000, 4 << 20])
def test_a_budget_is_kept_and_used(num_bytes, row_dtype):
    collection = make(BudgetSettings(num_bytes, row_dtype=row_dtype), optim.Adagrad(lr=0.1))
    assert 0.9 * num_bytes <= collection.allocated_bytes <= num_bytes
    report = collection.source.report()
    assert report.allocated_bytes == collection.allocated_bytes
    train(collection, [jagged(bags(1))], RowOptimizer(collection))
    assert collection.allocated_bytes == report.allocated_bytes
    (note,) = collection.source.notes()
    assert note.values["rows"] == collection.source.report().num_own > 0
    assert collection.source.notes() == []
    assert "have a row of their own" in dict(collection.source.report().lines())["own rows"]


@pytest.mark.parametrize("budget", PACKED)
def test_rows_in_fewer_bits_learn_and_there_are_more_of_them(budget):
    plain, packed = (make(one, optim.Adagrad(lr=0.1)) for one in (SMALL, budget))
    slots = [sum(one.map.room.num_slots for one in each.source.tables) for each in (plain, packed)]
    assert slots[1] > 1.15 * slots[0]  # state is not packed
    errors = []
    for collection in (plain, packed):
        rows, batch = RowOptimizer(collection), jagged(bags(0, below=20))
        for _ in range(60):
            error = ((collection(batch).values() - 0.25) ** 2).mean()
            error.backward()
            rows.step()
        errors.append(error.item())
    assert errors[1] < errors[0] + 0.005
