"""Rows that policies admit and drop: on a card the same ones, with the same values, as in host memory."""

import numpy as np
import pytest
import torch

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.optim import Adagrad
from rowhaul.schedule import RowPolicy
from rowhaul.train.row_lifecycle import RowLifecycle

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.launch import runs_interpreted

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
POLICIES = (RowPolicy(admit_after=2, ttl=3), RowPolicy(max_rows=4, evict="lfu"))


def collection(card):
    tables = [
        EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=[name], data_type=torch.float64)
        for name, dim in (("a", 4), ("b", 3))
    ]
    made = EmbeddingBagCollection(tables, optimizer=Adagrad(0.1), seed=5)
    rows = RowLifecycle(made, POLICIES, card)
    made.read_from(rows)
    return made, rows


def contents(made):
    state = made.state_dict()
    return {
        (name, key): record
        for name in ("a", "b")
        for key, record in zip(state[f"{name}.keys"].tolist(), state[f"{name}.records"].numpy(), strict=True)
    }


@pytest.mark.slow
def test_policies_admit_and_drop_the_same_rows_on_a_card():
    both, random = [collection(None), collection(DEVICE)], np.random.default_rng(0)
    for iteration in range(8):
        passes = [random.integers(0, 3, 24) for _ in range(1 + iteration % 2)]  # lengths of bags
        batches = [
            KeyedJaggedTensor(
                ["a", "b"], torch.from_numpy(random.integers(0, 9, one.sum())), lengths=torch.from_numpy(one)
            )
            for one in passes
        ]
        gradients = [torch.from_numpy(random.normal(size=(12, 7))) for _ in passes]
        for made, rows in both:
            rows.begin(iteration, batches[0])
            for ids, gradient in zip(batches, gradients, strict=True):
                out = made(ids).values()
                out.backward(gradient.to(out.device))
            made.apply_gradients(0.1, iteration + 1)
            rows.end(iteration)
        expected, found = (contents(made) for made, _ in both)
        assert expected.keys() == found.keys()
        for row, record in expected.items():
            np.testing.assert_array_equal(found[row], record)
    assert both[0][1].counts == both[1][1].counts
    assert both[0][1].counts.expired > 0
    assert both[0][1].counts.over_limit > 0


def test_what_is_saved_is_what_was_there_at_its_moment():
    made, rows = collection(DEVICE)
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 1, 2, 7]), lengths=torch.ones(4, dtype=torch.int64))
    rows.begin(0, ids)
    snapshot, before = rows.tables[1].snapshot(), contents(made)
    out = made(ids).values()
    out.backward(torch.ones_like(out))
    made.apply_gradients(0.1, 1)
    kept = {
        ("b", key): record
        for keys, some in snapshot.blocks(0)
        for key, record in zip(keys, some, strict=True)
    }
    assert kept.keys() == {("b", 2), ("b", 7)}
    for row, record in kept.items():
        np.testing.assert_array_equal(record, before[row])
        assert not np.array_equal(contents(made)[row], record)
