"""A card's cache against a dictionary: whatever is announced, read, stepped, evaluated or replaced."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.optim import SGD

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.cache_size import CacheSize
from rowhaul.device.cached_rows import CachedDeviceRows
from rowhaul.device.launch import runs_interpreted

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
SAMPLES, DIM = 4, 3
ids_of_a_batch = st.lists(st.integers(0, 60), min_size=2 * SAMPLES, max_size=2 * SAMPLES)


class CacheStates(RuleBasedStateMachine):
    """Rows begin as in this process; steps subtract integers, so that nothing is rounded twice."""

    @initialize(rows=st.sampled_from([16, 32, 64]))
    def begin(self, rows):
        tables = [EmbeddingBagConfig(embedding_dim=DIM, name=name, feature_names=[name]) for name in "ab"]
        self.collection = EmbeddingBagCollection(tables, optimizer=SGD(1.0), seed=2)
        groups, rule = self.collection.feature_groups, self.collection.optimizer
        memory = CacheSize.for_records(rows, 4 * DIM)
        self.collection.read_from(CachedDeviceRows(groups, rule, 2, DEVICE, memory))
        self.fresh = EmbeddingBagCollection(tables, optimizer=SGD(1.0), seed=2).eval()
        self.expected, self.announced, self.step = {}, [], 0

    def batch(self, ids):
        return KeyedJaggedTensor(
            ["a", "b"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
        )

    def values_of(self, ids, known):
        """What a batch reads: rows of the dictionary, others as they begin."""
        values = self.fresh(self.batch(ids)).values().numpy().reshape(SAMPLES, 2, DIM)
        for place, key in enumerate(ids):
            table, sample = divmod(place, SAMPLES)
            found = known.get(("ab"[table], key))
            if found is not None:
                values[sample, table] = found
        return values

    @rule(ids=ids_of_a_batch)
    def announce(self, ids):
        batch = self.batch(ids)
        self.collection.locate_early(batch)
        self.announced.append((ids, batch))

    @rule(ids=ids_of_a_batch)
    def train(self, ids):
        self._train(ids, self.batch(ids))

    @rule()
    def train_announced(self):
        if self.announced:
            self._train(*self.announced.pop(0))

    def _train(self, ids, batch):
        expected = self.values_of(ids, self.expected)
        out = self.collection(batch).values()
        np.testing.assert_array_equal(out.detach().cpu().numpy().reshape(expected.shape), expected)
        out.sum().backward()
        self.step += 1
        self.collection.apply_gradients(1.0, self.step)
        counts = {}
        for place, key in enumerate(ids):
            row = "ab"[place // SAMPLES], key
            counts[row] = counts.get(row, 0) + 1
            self.expected.setdefault(row, expected[place % SAMPLES, place // SAMPLES].copy())
        for row, count in counts.items():
            self.expected[row] = self.expected[row] - np.float32(count)

    @rule(ids=ids_of_a_batch)
    def evaluate(self, ids):
        self.collection.eval()
        found = self.collection(self.batch(ids)).values().cpu().numpy()
        self.collection.train()
        np.testing.assert_array_equal(found.reshape(SAMPLES, 2, DIM), self.values_of(ids, self.expected))

    @rule(keys=st.sets(st.integers(0, 60), min_size=1, max_size=5))
    def replace_rows(self, keys):
        records = np.arange(len(keys) * DIM, dtype=np.float32).reshape(len(keys), DIM)
        self.collection.load_rows("a", np.array(sorted(keys)), records)
        self.expected.update({("a", key): record for key, record in zip(sorted(keys), records, strict=True)})

    @rule()
    def compare_all(self):
        found = {
            (name, key): record
            for name in "ab"
            for keys, records in self.collection.rows(name)
            for key, record in zip(keys.tolist(), records, strict=True)
        }
        assert set(self.expected) <= found.keys()
        for row, record in self.expected.items():
            np.testing.assert_array_equal(found[row], record)

    @invariant()
    def rows_are_counted(self):
        if hasattr(self, "collection") and not self.announced:
            for name in "ab":
                assert self.collection.num_rows(name) >= sum(table == name for table, _ in self.expected)


TestCacheStates = pytest.mark.slow(CacheStates.TestCase)
TestCacheStates.settings = settings(
    max_examples=6 if runs_interpreted() else 60, stateful_step_count=12, derandomize=True
)
