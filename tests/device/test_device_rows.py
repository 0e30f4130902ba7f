"""A collection whose rows are on a card against one whose rows are in this process."""

import copy
import pickle

import numpy as np
import pytest
import torch

from rowhaul.errors import ConfigError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.nn.config import PoolingType
from rowhaul.optim import Adagrad, RowwiseAdagrad
from slow_cases import mostly_slow

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.launch import runs_interpreted
from rowhaul.device.rows import DeviceRows, rows_on

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")


def collections(weighted=False, rule=None):
    rule = rule or RowwiseAdagrad(0.1)
    tables = [
        EmbeddingBagConfig(embedding_dim=4, name="a", feature_names=["x", "y"], data_type=torch.float64),
        EmbeddingBagConfig(
            embedding_dim=6, name="b", feature_names=["z"], pooling=PoolingType.MEAN, data_type=torch.float64
        ),
        EmbeddingBagConfig(
            embedding_dim=4, name="c", feature_names=["w"], pooling=PoolingType.MEAN, data_type=torch.float64
        ),
    ]
    here = EmbeddingBagCollection(tables, weighted, optimizer=rule, seed=5)
    there = EmbeddingBagCollection(tables, weighted, optimizer=rule, seed=5)
    there.read_from(DeviceRows(there.feature_groups, rule, 5, DEVICE))
    return here, there


def batch(random, weighted=False, one_each=False):
    names, samples = ["w", "z", "x", "y"], 9
    lengths = np.ones(4 * samples, np.int64) if one_each else random.integers(0, 4, 4 * samples)
    values = random.integers(-6, 6, lengths.sum())
    weights = torch.from_numpy(random.normal(size=len(values))) if weighted else None
    if weights is not None:
        weights.requires_grad_()
    return KeyedJaggedTensor(names, torch.from_numpy(values), weights, lengths=torch.from_numpy(lengths))


@pytest.mark.parametrize("one_each", mostly_slow([True, False], False))
@pytest.mark.parametrize("weighted", [True, False])
def test_vectors_gradients_and_rows_are_those_of_this_process(weighted, one_each):
    here, there = collections(weighted)
    random = np.random.default_rng(1)
    for number in range(1, 4):
        for _ in range(number):  # several backward passes before a step
            ids = batch(random, weighted, one_each)
            other = copy.deepcopy(ids)
            one, two = here(ids).values(), there(other).values()
            torch.testing.assert_close(two.cpu(), one, rtol=1e-12, atol=1e-12)
            gradients = torch.from_numpy(random.normal(size=one.shape))
            one.backward(gradients)
            two.backward(gradients.to(two.device))
            if weighted:
                torch.testing.assert_close(
                    other.weights().grad.cpu(), ids.weights().grad, rtol=1e-10, atol=1e-10
                )
        here.apply_gradients(0.1, number)
        there.apply_gradients(0.1, number)
    for name, array in here.state_dict().items():
        if name.endswith(".keys"):
            order = np.argsort(array)
            found = there.state_dict()
            np.testing.assert_array_equal(found[name], array[order])
            records = name.replace(".keys", ".records")
            torch.testing.assert_close(
                found[records], here.state_dict()[records][order], rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("on_unknown", ["init", "default"])
def test_unknown_keys_read_as_in_this_process_and_are_not_added(on_unknown):
    here, there = collections(rule=Adagrad(0.1))
    random = np.random.default_rng(2)
    known = batch(random)
    for one in (here, there):
        one.on_unknown = on_unknown
        one(known)
        one.eval()
    rows = there.num_rows("a")
    ids = KeyedJaggedTensor(
        ["x", "y", "z", "w"], torch.arange(40) - 20, lengths=torch.full((8,), 5, dtype=torch.int64)
    )
    torch.testing.assert_close(there(ids).values().cpu(), here(ids).values(), rtol=0, atol=0)
    assert there.num_rows("a") == rows == here.num_rows("a")


def test_rows_move_between_memories():
    here, _ = collections()
    here(batch(np.random.default_rng(3)))
    before = {name: array.clone() for name, array in here.state_dict().items()}
    there = here.source.copied_into(DeviceRows(here.feature_groups, here.optimizer, 5, DEVICE))
    assert there.num_rows("b") == here.num_rows("b")
    here.read_from(there.moved_to(torch.device("cpu"), here.feature_groups, here.optimizer, 5))
    for name, array in here.state_dict().items():
        if name.endswith(".keys"):
            order = np.argsort(before[name])
            np.testing.assert_array_equal(array[np.argsort(array)], before[name][order])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_rows_of_its_own(duplicate, monkeypatch):
    monkeypatch.setattr("rowhaul.device.arena.shift_of", lambda record_bytes: 4)  # many chunks
    _, there = collections()

    def step(rows, first, number):
        ids = KeyedJaggedTensor(
            ["x", "y", "z", "w"], torch.arange(first, first + 80), lengths=torch.ones(80, dtype=torch.int64)
        )
        rows(ids).values().sum().backward()
        rows.apply_gradients(0.1, number)

    def state(rows):
        return {name: array.clone() for name, array in rows.state_dict().items()}

    step(there, 0, 1)
    before, copied = state(there), duplicate(there)
    torch.testing.assert_close(state(copied), before, rtol=0, atol=0)
    step(copied, 40, 2)
    torch.testing.assert_close(state(there), before, rtol=0, atol=0)
    step(there, 40, 2)
    torch.testing.assert_close(state(copied), state(there), rtol=0, atol=0)


def test_rows_on_a_card_that_is_not_the_threads_own_are_refused(monkeypatch):
    here, _ = collections()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r'call torch.cuda.set_device\("cuda:1"\)'):
        rows_on(torch.device("cuda", 1), here.feature_groups, here.optimizer, 5, 0)


def test_two_runs_give_the_same_bits():
    found = []
    for _ in range(2):
        _, there = collections()
        random = np.random.default_rng(4)
        for number in range(1, 3):
            out = there(batch(random, one_each=True)).values()
            out.backward(torch.from_numpy(random.normal(size=out.shape)).to(out.device))
            there.apply_gradients(0.1, number)
        found.append(there.state_dict())
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])
