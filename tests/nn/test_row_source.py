"""A row source is one class: a collection reads, trains and saves any that keeps the protocol."""

import numpy as np
import pytest
import torch

from embedding_cases import jagged, one_table, values_of
from rowhaul import optim
from rowhaul.nn import RowOptimizer
from rowhaul.nn.local_rows import LocalRows


class FrozenRows(LocalRows):
    """Rows that are created and read, and never learn: nothing outside this class knows of them."""

    def step(self, lr, number):
        self.drop_gradients()


def train(collection, batches):
    rows = RowOptimizer(collection)
    for batch in batches:
        (collection(batch).values() ** 2).sum().backward()
        rows.step()


def test_another_source_needs_no_change_elsewhere():
    collection, plain = one_table(optimizer=optim.SGD(lr=0.5)), one_table(optimizer=optim.SGD(lr=0.5))
    collection.read_from(FrozenRows(collection.feature_groups, collection.optimizer, collection.seed))
    batches = [jagged({"f": [[1, 2], [3]]}), jagged({"f": [[3], [4]]})]
    train(collection, batches)
    train(plain, batches)
    fresh = one_table(optimizer=optim.SGD(lr=0.5))
    fresh(jagged({"f": [[1, 2], [3, 4]]}))
    assert values_of(collection, "t").keys() == values_of(plain, "t").keys() == values_of(fresh, "t").keys()
    for key, values in values_of(collection, "t").items():
        assert np.array_equal(values, values_of(fresh, "t")[key])
        assert not np.array_equal(values, values_of(plain, "t")[key])


def test_a_saved_source_is_loaded_into_another():
    trained, frozen = one_table(), one_table()
    train(trained, [jagged({"f": [[1], [2]]})])
    frozen.read_from(FrozenRows(frozen.feature_groups, frozen.optimizer, frozen.seed))
    frozen.load_state_dict(trained.state_dict())
    assert torch.equal(
        frozen(jagged({"f": [[1], [2]]})).values(), trained(jagged({"f": [[1], [2]]})).values()
    )


def test_reading_elsewhere_for_a_while_leaves_the_source_and_its_gradients_alone():
    collection, twin = one_table(), one_table()
    batch = jagged({"f": [[1], [2]]})
    elsewhere = FrozenRows(collection.feature_groups, collection.optimizer, seed=99)
    for one in (collection, twin):
        (one(batch).values() ** 2).sum().backward()
    usual = collection(batch).values().detach()
    with collection.reading(elsewhere):
        assert not torch.equal(collection(batch).values(), usual)
    assert torch.equal(collection(batch).values(), usual)
    RowOptimizer(collection).step()
    RowOptimizer(twin).step()
    assert all(map(np.array_equal, values_of(collection, "t").values(), values_of(twin, "t").values()))


def test_a_source_that_is_replaced_drops_its_gradients():
    collection = one_table()
    old = collection.source
    (collection(jagged({"f": [[1]]})).values() ** 2).sum().backward()
    collection.read_from(FrozenRows(collection.feature_groups, collection.optimizer, collection.seed))
    assert not any(old.pending)
    with pytest.raises(KeyError):
        values_of(collection, "t")[1]
