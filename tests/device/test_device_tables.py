"""Tables on a card against those of this process: the same rows, the same steps."""

import numpy as np
import pytest
import torch

from rowhaul.errors import ConfigError
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store import TableGroup, TableSpec

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.launch import runs_interpreted
from rowhaul.device.tables import Bags, DeviceTables

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
RULES = [SGD(0.1), Adagrad(0.1), RowwiseAdagrad(0.1, weight_decay=0.01), Adam(0.1)]


def tables_of(rule, dim, dtype):
    specs = [TableSpec("a", dim, -0.5, 0.5), TableSpec("b", dim, 0.0, 2.0)]
    here = DeviceTables(specs, rule, getattr(torch, dtype), 3, DEVICE)
    return here, TableGroup(specs, rule, dtype, 3)


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rows_begin_and_step_as_in_this_process(rule, dtype):
    dim, num_samples = 5, 40
    here, there = tables_of(rule, dim, dtype)
    random = np.random.default_rng(0)
    columns, is_mean = device(np.array([0, dim])), device(np.array([0, 0], np.int32))
    for number in range(1, 5):
        keys = random.zipf(1.5, (2, num_samples)) % 97 - 50
        flat = keys.reshape(-1).astype(np.int64)
        of_id = np.repeat(np.arange(2), num_samples)
        records = here.find_or_make(device(flat), device(of_id.astype(np.int32)))
        starts = np.array([0, num_samples, 2 * num_samples])
        lookup = there.lookup(flat, starts, np.arange(2), insert=True)
        bags = Bags(num_samples, len(flat), None, None, columns, is_mean)
        out = torch.empty((num_samples, 2 * dim), dtype=here.dtype, device=DEVICE)
        here.pool(records, bags, None, out)
        expected = there.arena.read(lookup.locations)[lookup.inverse, :dim]
        expected = np.concatenate([expected[:num_samples], expected[num_samples:]], axis=1)
        if number == 1:
            np.testing.assert_array_equal(out.cpu().numpy(), expected)  # to the bit
        gradients = random.normal(size=(num_samples, 2 * dim)).astype(dtype)
        here.step(records, bags, device(gradients), 0.1, number)
        summed = np.zeros((len(lookup.keys), dim), dtype)
        rows = np.concatenate([gradients[:, :dim], gradients[:, dim:]])
        np.add.at(summed, lookup.inverse, rows)
        there.update(lookup.locations, summed, 0.1, number)
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    for table in range(2):
        found = [np.concatenate(parts) for parts in zip(*here.blocks(table), strict=True)]
        expected = [np.concatenate(parts) for parts in zip(*there.blocks(table), strict=True)]
        order = np.argsort(expected[0])
        np.testing.assert_array_equal(found[0], expected[0][order])
        np.testing.assert_allclose(found[1], expected[1][order], rtol=tolerance, atol=tolerance)


def test_rows_read_often_are_summed_in_pieces():
    """Some rows with more ids than a piece, some with more than a program adds at once, and single ones."""
    dim, num_samples = 3, 700
    here, there = tables_of(SGD(1.0), dim, "float64")
    keys = np.concatenate([np.zeros(600), np.ones(40), np.arange(2, 62), np.full(660, 5), np.arange(6, 46)])
    flat, of_id = keys.astype(np.int64), np.repeat(np.arange(2), num_samples)
    random = np.random.default_rng(0)
    flat = np.concatenate([random.permutation(flat[:num_samples]), random.permutation(flat[num_samples:])])
    records = here.find_or_make(device(flat), device(of_id.astype(np.int32)))
    lookup = there.lookup(flat, np.array([0, num_samples, 2 * num_samples]), np.arange(2), insert=True)
    columns, is_mean = device(np.array([0, dim])), device(np.array([0, 0], np.int32))
    gradients = random.normal(size=(num_samples, 2 * dim))
    bags = Bags(num_samples, len(flat), None, None, columns, is_mean)
    here.step(records, bags, device(gradients), 1.0, 1)
    summed = np.zeros((len(lookup.keys), dim))
    np.add.at(summed, lookup.inverse, np.concatenate([gradients[:, :dim], gradients[:, dim:]]))
    there.update(lookup.locations, summed, 1.0, 1)
    for table in range(2):
        found = [np.concatenate(parts) for parts in zip(*here.blocks(table), strict=True)]
        expected = [np.concatenate(parts) for parts in zip(*there.blocks(table), strict=True)]
        order = np.argsort(expected[0])
        np.testing.assert_allclose(found[1], expected[1][order], rtol=1e-9, atol=1e-9)


def test_a_row_optimizer_of_ones_own_is_refused():
    class Mine(SGD):
        pass

    with pytest.raises(ConfigError, match=r"Mine does not step rows on a card.*take one of SGD, Adagrad"):
        tables_of(Mine(0.1), 4, "float32")
