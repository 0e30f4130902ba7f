"""A card's cache under hot eviction, with streams and threads that are late by chance: the same bits."""

import random
import time

import numpy as np
import pytest
import torch

from rowhaul.data.prefetch import prefetch
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.optim import RowwiseAdagrad

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.cache_size import CacheSize
from rowhaul.device.cached_rows import CachedDeviceRows
from rowhaul.device.hauling import Hauler
from rowhaul.device.host_tables import HostTables
from rowhaul.device.index import DeviceIndex
from rowhaul.device.launch import runs_interpreted
from rowhaul.device.rows import DeviceRows

pytestmark = pytest.mark.skipif(runs_interpreted(), reason="needs a card: interpreted kernels run in order")
DEVICE = torch.device("cuda")
STEPS, SAMPLES, IDS = 250, 4096, 40_000
NAMES, DIM = ["a", "b"], 4
NUM_CYCLES = 2_000_000  # a millisecond, about


@pytest.fixture
def late_streams(monkeypatch):
    """Make copies on any stream, and the threads that serve them, wait for a while, now and then.

    What is not ordered by an event or a future then comes in another order, sooner or later.
    """
    chance = random.Random(3)

    def delayed(call, on_card):
        def wait_then_call(*arguments, **options):
            if chance.random() < 0.3:
                if on_card:
                    torch.cuda._sleep(int(chance.random() * NUM_CYCLES))
                else:
                    time.sleep(chance.random() / 1000)
            return call(*arguments, **options)

        return wait_then_call

    for owner, name, on_card in (
        (Hauler, "_launch", True),
        (DeviceIndex, "number_listed", True),
        (HostTables, "find", False),
        (HostTables, "add", False),
    ):
        monkeypatch.setattr(owner, name, delayed(getattr(owner, name), on_card))


def batches():
    """Skewed ids, so that some rows stay and most come and go; the same ones return after a few batches."""
    draws = np.random.default_rng(0)
    for number in range(STEPS):
        hot = (IDS ** draws.random(SAMPLES)).astype(np.int64)
        cold = draws.integers(0, IDS, SAMPLES) // 8 * 8 + number % 8
        ids = torch.from_numpy(np.concatenate([hot, cold]))
        yield KeyedJaggedTensor(NAMES, ids, lengths=torch.ones(2 * SAMPLES, dtype=torch.int64))


def trained(memory, skips):
    """Train on batches announced by another thread; returns what was read in each step, and all rows."""
    tables = [EmbeddingBagConfig(embedding_dim=DIM, name=name, feature_names=[name]) for name in NAMES]
    rows, rule = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(0.1), seed=5), RowwiseAdagrad(0.1)
    if memory:
        rows.read_from(CachedDeviceRows(rows.feature_groups, rule, 5, DEVICE, memory))
    else:
        rows.read_from(DeviceRows(rows.feature_groups, rule, 5, DEVICE))

    def announced():
        for one in batches():
            rows.locate_early(one)
            yield one

    read = []
    for number, ids in enumerate(prefetch(announced(), 4), 1):
        if skips and number % 7 == 3:
            continue  # announced, and never read
        out = rows(ids).values()
        out.backward(torch.sin(out.detach() * 100 + number))
        if number % 5 == 0:
            torch.cuda._sleep(NUM_CYCLES)
        rows.apply_gradients(0.1, number)
        read.append(out.detach().clone())
    found = {}
    for name in NAMES:
        for keys, records in rows.rows(name):
            found.update(
                {(name, key): one.tobytes() for key, one in zip(keys.tolist(), records, strict=True)}
            )
    return rows, torch.stack(read).cpu(), found


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("num_batches", [1.1, 2.5])
def test_late_streams_change_no_bit(late_streams, skips, num_batches):
    _, expected_reads, expected = trained(0, skips)
    memory = CacheSize.for_records(int(num_batches * 2 * SAMPLES), 4 * (DIM + 1))
    rows, reads, found = trained(memory, skips)
    assert torch.equal(reads, expected_reads)
    assert expected.items() <= found.items()  # batches passed over may have made theirs, too
    assert skips or expected.keys() == found.keys()
    assert rows.source.counts.num_fetched > STEPS * SAMPLES / 8  # rows went, and came back
