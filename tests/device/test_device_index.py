"""The index on a card against a dictionary: any keys, growth, removal, keys that repeat within a batch."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.index import DeviceIndex
from rowhaul.device.launch import runs_interpreted

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
FEW, MANY = 200, 400_000  # keys of a batch: interpreted, and on a card


def test_records_are_those_of_a_dictionary():
    random, index, known = np.random.default_rng(0), DeviceIndex(DEVICE), {}
    size = FEW if runs_interpreted() else MANY
    extremes = np.array([0, -1, 2**63 - 1, -(2**63)])
    for _ in range(6):
        keys = np.concatenate([random.integers(-size, size, size), extremes])
        tables = random.integers(0, 3, len(keys)).astype(np.int32)
        rows = list(zip(tables.tolist(), keys.tolist(), strict=True))
        there = torch.from_numpy(keys).to(DEVICE), torch.from_numpy(tables).to(DEVICE)
        found = index.find(*there)
        assert found.tolist() == [known.get(row, -1) for row in rows]
        index.reserve(int((found < 0).sum()))
        index.add_missing(*there, found)
        index.ask(len(keys))
        for row, record in zip(rows, found.tolist(), strict=True):
            assert known.setdefault(row, record) == record
        assert len(set(known.values())) == len(known) == len(index)
        gone = list(known)[:: max(len(known) // 50, 1)]
        index.remove(
            torch.tensor([key for _, key in gone]).to(DEVICE),
            torch.tensor([table for table, _ in gone], dtype=torch.int32).to(DEVICE),
        )
        freed = {known.pop(row) for row in gone}
        assert freed.isdisjoint(known.values())
    tables, keys, records = (one.tolist() for one in index.entries())
    assert dict(zip(zip(tables, keys, strict=True), records, strict=True)) == known
    assert index.num_records < 1.1 * len(known) + 200  # numbers of removed rows are used again


@pytest.mark.slow
def test_places_take_few_bytes():
    index, count = DeviceIndex(DEVICE), 1500 if runs_interpreted() else 3_000_000
    keys = torch.arange(count, device=DEVICE)
    tables = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    found = index.find(keys, tables)
    index.reserve(count)
    index.add_missing(keys, tables, found)
    assert sorted(found.tolist()) == list(range(count))
    assert index.allocated_bytes / count <= 24
