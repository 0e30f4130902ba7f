"""Rows as state: saving, loading, copies, threads and forked processes."""

import copy
import os
import pickle
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from embedding_cases import jagged, one_table, torch_threads, values_of
from rowhaul import optim
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowOptimizer,
)


def test_state_dict_round_trip_continues_with_the_same_bits():
    straight, saved = one_table(optimizer=optim.Adam(lr=0.1)), one_table(optimizer=optim.Adam(lr=0.1))
    batches = [jagged({"f": [[k % 3], [k]]}) for k in range(6)]

    def train(collection, rows, some):
        for batch in some:
            (collection(batch).values() ** 2).sum().backward()
            rows.step()

    rows = RowOptimizer(straight)
    train(straight, rows, batches)
    rows_a = RowOptimizer(saved)
    train(saved, rows_a, batches[:3])
    loaded = one_table(optimizer=optim.Adam(lr=0.1))
    loaded(jagged({"f": [[999]]}))  # forgotten by the load
    loaded.load_state_dict(saved.state_dict())
    rows_b = RowOptimizer(loaded)
    rows_b.load_state_dict(rows_a.state_dict())
    train(loaded, rows_b, batches[3:])
    expected = values_of(straight, "t")
    found = values_of(loaded, "t")
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in expected.items()}


def test_a_state_dict_of_another_optimizer_is_refused():
    adam, sgd = one_table(optimizer=optim.Adam(lr=0.1)), one_table(optimizer=optim.SGD(lr=0.1))
    adam(jagged({"f": [[1]]}))
    with pytest.raises(CheckpointError, match="needs 4 elements a record"):
        sgd.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_rows_of_its_own(duplicate):
    original = one_table(optimizer=optim.SGD(lr=1.0))
    original(jagged({"f": [[1], [2]]}))
    copied = duplicate(original)
    before = {key: row.tobytes() for key, row in values_of(original, "t").items()}
    assert {key: row.tobytes() for key, row in values_of(copied, "t").items()} == before
    copied(jagged({"f": [[1], [3]]})).values().sum().backward()
    RowOptimizer(copied).step()
    assert {key: row.tobytes() for key, row in values_of(original, "t").items()} == before
    assert copied.num_rows("t") == 3


def test_loading_between_backward_and_step_drops_the_gradients():
    source, target = one_table(optimizer=optim.SGD(lr=1.0)), one_table(optimizer=optim.SGD(lr=1.0))
    source(jagged({"f": [[1], [2]]}))
    target(jagged({"f": [[5], [6], [7]]})).values().sum().backward()
    target.load_state_dict(source.state_dict())
    RowOptimizer(target).step()
    expected = {key: row.tobytes() for key, row in values_of(source, "t").items()}
    assert {key: row.tobytes() for key, row in values_of(target, "t").items()} == expected


@pytest.mark.parametrize("is_weighted", [False, True])
def test_clearing_between_forward_and_backward_is_refused(is_weighted):
    collection = one_table(is_weighted=is_weighted)
    weights = torch.ones(2, requires_grad=True) if is_weighted else None
    pooled = collection(jagged({"f": [[1], [2]]}, weights)).values()
    collection.clear()
    with pytest.raises(ConfigError, match="run forward again"):
        pooled.sum().backward()


def test_a_state_dict_that_does_not_fit_changes_nothing():
    tables = [EmbeddingBagConfig(embedding_dim=4, name=n, feature_names=[n]) for n in "ab"]
    collection = EmbeddingBagCollection(tables)
    collection(jagged({"a": [[1]], "b": [[2]]}))
    wrong = collection.state_dict()
    wrong["b.records"] = wrong["b.records"][:, :3]
    with pytest.raises(CheckpointError, match="table 'b'"):
        collection.load_state_dict(wrong)
    collection.load_state_dict({}, strict=False)
    assert collection.num_rows("a") == collection.num_rows("b") == 1


@pytest.mark.parametrize("keys", [np.array([1.0, 2.0]), np.array([3, 3]), np.array([[1], [2]])])
def test_keys_to_load_must_be_different_integers(keys):
    collection = one_table(dim=2, optimizer=optim.SGD(lr=1))
    with pytest.raises(CheckpointError, match="keys must be different int64"):
        collection.load_rows("t", keys, np.zeros((2, 2), np.float32))
    assert collection.num_rows("t") == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_bits_do_not_depend_on_the_number_of_threads(name):
    """Batches large enough that the groups really run side by side."""
    tables = [EmbeddingBagConfig(embedding_dim=d, name=f"t{n}", feature_names=[f"f{n}"])
              for n, d in enumerate([16, 16, 16, 8, 8])]  # fmt: skip
    random = np.random.default_rng(0)
    batches = [
        jagged({f"f{n}": random.zipf(1.3, (3000, 1)).clip(max=900).tolist() for n in range(5)})
        for _ in range(3)
    ]
    direction = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for num_threads in (1, 2, 4):
        with torch_threads(num_threads):
            collection = EmbeddingBagCollection(tables, optimizer=optim.row_optimizer(name, lr=0.1))
        rows = RowOptimizer(collection)
        for batch in batches:
            collection(batch).values().backward(direction)
            rows.step()
        found.append([
            {k: v.tobytes() for k, v in values_of(collection, config.name).items()} for config in tables
        ])  # fmt: skip
    assert found[0] == found[1] == found[2]


def test_several_threads_may_score_at_once():
    collection = one_table(dim=8)
    collection(jagged({"f": [[key] for key in range(500)]}))
    collection.eval()
    batches = [jagged({"f": [[key * step % 700] for key in range(3000)]}) for step in range(1, 9)]
    expected = [collection(batch).values() for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(collection, batches), expected, strict=True):
                assert torch.equal(found.values(), right)


def in_forked_child(check):
    """Run ``check`` in a forked process; True if it returned in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it hangs
        check()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_process_can_read_with_threads():
    with torch_threads(2):
        tables = [EmbeddingBagConfig(embedding_dim=64, name=n, feature_names=[n]) for n in "ab"]
        collection = EmbeddingBagCollection(tables)
    many = jagged({name: [[key] for key in range(1000)] for name in "ab"})
    expected = collection(many).values().detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks in threaded programs
        assert in_forked_child(lambda: torch.testing.assert_close(collection.eval()(many).values(), expected))
