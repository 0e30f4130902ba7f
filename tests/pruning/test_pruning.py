"""Pruned tables against the slow and obvious version: the same rows, step for step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pruned_driver import Fast
from pruning_oracle import SlowPruning, norm, power

from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.deciding.entry_kernels import chunk_norms
from rowhaul.pruning.deciding.room import chunk_starts
from rowhaul.store import TableGroup

RULES = [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1, weight_decay=0.01), Adam(lr=0.01)]


def unpruned_first_values(specs, seed, dtype):
    group = TableGroup(specs, SGD(lr=1), dtype, seed)

    def first_values(table, key):
        starts = np.array([0, 1])
        found = group.lookup(np.array([key]), starts, np.array([table]), insert=False, on_unknown="init")
        return found.spare[0]

    return first_values


def slow_twin(fast, prune, optimizer, dtype, seed=5, least=4):
    def row_hash(table, key):
        return fast.map._hashes(np.array([table]), np.array([key]))[0]

    dim = fast.specs[0].dim
    first_values = unpruned_first_values(fast.specs, seed, dtype)
    return SlowPruning(prune, dim, optimizer, dtype, seed, least, first_values, row_hash, fast.num_tables)


def assert_same(fast, slow):
    rows = fast.rows()
    assert rows.keys() == slow.rows.keys()
    for name, (whole, present, utilities, touched, records) in rows.items():
        expected = slow.rows[name]
        assert present.tolist() == [chunk is not None for chunk in expected.chunks]
        if utilities.dtype == np.uint32:
            assert utilities.tolist() == [expected.count] * len(present)
        else:
            assert utilities.tolist() == [float(u) for u in expected.utilities]
        assert touched == expected.touched
        np.testing.assert_allclose(whole, slow.whole_row(name), rtol=1e-12, atol=1e-14)
        there = [chunk for chunk in expected.chunks if chunk is not None]
        for record, (values, state) in zip(records, there, strict=True):
            whole_chunk = np.concatenate([values, state])
            np.testing.assert_allclose(record[: len(whole_chunk)], whole_chunk, rtol=1e-12, atol=1e-14)


@st.composite
def cases(draw):
    chunks = draw(st.integers(1, 5))
    dim = draw(st.integers(chunks, 11))
    by_budget = draw(st.booleans())
    dims = draw(st.sampled_from([0, 0, draw(st.integers(chunks, dim))]))
    prune = PruneSettings(
        ratio=0.0 if by_budget else draw(st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9])),
        budget=draw(st.integers(9000, 40_000)) if by_budget else 0,
        chunks=chunks,
        period=draw(st.integers(1, 6)),
        decay=draw(st.sampled_from([0.5, 0.98, 1.0])),
        sample=draw(st.sampled_from([7, 1000])),
        enforcement=draw(st.sampled_from([0.0, 0.05, 0.3])),
        utility=draw(st.sampled_from(["gradient", "access"])),
        ratios=draw(st.sampled_from(["adaptive", "adaptive", "linear", "power"])),
        dims=dims,
        cold_start=draw(st.integers(1, 6)),
    )
    return prune, dim, draw(st.sampled_from(RULES)), draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 3))


@given(cases())
@settings(max_examples=25)
def test_the_fast_version_equals_the_slow_one_step_for_step(case):
    prune, dim, optimizer, seed, split = case
    fast = Fast(prune, dim, optimizer, split=split)
    slow = slow_twin(fast, prune, optimizer, np.float64)
    random = np.random.default_rng(seed)
    for number in range(1, 11):
        popular = np.minimum(random.geometric(0.15, size=random.integers(1, 25)), 40) + number // 5
        batch = [(int(random.integers(0, 3)), int(key)) for key in popular]
        counts = {name: batch.count(name) for name in batch}
        expected = slow.read(batch)
        read = fast.read(batch)
        assert read.keys() == expected.keys()
        for name, row in read.items():
            np.testing.assert_allclose(row, expected[name], rtol=1e-12, atol=1e-14)
        gradients = {name: random.normal(size=dim) * random.choice([0.01, 1.0]) for name in sorted(counts)}
        slow.step(gradients, counts, 0.1, number)
        fast.step(gradients, 0.1, number)
        assert_same(fast, slow)
        assert fast.tables.arena.num_records == fast.map.num_held == slow.num_present()
        assert slow.num_present() <= fast.map.room.num_chunks == slow.room()[0]
        assert fast.map.num_entries <= fast.map.room.num_entries


@pytest.mark.parametrize(("chunks", "dim"), [(4, 16), (4, 32), (8, 32), (6, 24), (8, 30), (3, 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_utilities_are_added_up_alike_in_one_process_and_on_a_cluster(chunks, dim, dtype):
    """Where several chunks are done at once, too; a cluster has norms from `chunk_norms`."""
    fast = Fast(
        PruneSettings(chunks=chunks, period=100, decay=0.9, utility="gradient"), dim, SGD(lr=0.1), dtype
    )
    random = np.random.default_rng(2)
    utilities, touched = {}, {}
    starts = chunk_starts(dim, chunks)
    for number in range(1, 6):
        batch = [(int(t), int(k)) for t, k in zip(*random.integers(0, [[3], [6]], (2, 12)), strict=True)]
        gradients = {name: random.normal(size=dim).astype(dtype) for name in fast.read(batch)}
        fast.step(gradients, 0.1, number)
        for name, gradient in gradients.items():
            kept = power(0.9, number - touched.get(name, number))
            norms = chunk_norms(gradient[None, :], starts)[0]
            if dtype == np.float64 or dim == 4 * chunks:
                assert norms.tolist() == [norm(part) for part in np.array_split(gradient, chunks)]
            before = np.array(utilities.get(name, np.zeros(chunks)), dtype=np.float64)
            utilities[name] = (kept * before + batch.count(name) * norms).astype(np.float32).tolist()
            touched[name] = number
    assert {name: row[2].tolist() for name, row in fast.rows().items()} == utilities


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_chunk_and_nothing_pruned_is_the_unpruned_model_bit_for_bit(rule, dtype):
    fast = Fast(PruneSettings(chunks=1, period=2), 7, rule, dtype)
    plain = TableGroup(fast.specs, rule, dtype, 5)
    random = np.random.default_rng(3)
    for number in range(1, 9):
        batch = [
            (int(t), int(k))
            for t, k in zip(random.integers(0, 3, 30), random.integers(0, 20, 30), strict=True)
        ]
        rows = fast.read(batch)
        names = list(rows)
        gradients = {name: random.normal(size=7).astype(dtype) for name in names}
        tables, keys = (np.array(part) for part in zip(*names, strict=True))
        records = plain.make_fresh(tables, keys)
        assert (plain.arena.read(records)[:, :7] == np.array([rows[name] for name in names])).all()
        plain.update(records, np.array([gradients[name] for name in names]), 0.1, number)
        fast.step(gradients, 0.1, number)
    for table in range(3):
        expected = {k: row for ks, rs in plain.blocks(table) for k, row in zip(ks.tolist(), rs, strict=True)}
        for block in fast.tables.row_blocks(table):
            assert block["present"].all()
            for key, record in zip(block["keys"].tolist(), block["chunks"], strict=True):
                assert (record == expected.pop(key)).all()
        assert not expected
