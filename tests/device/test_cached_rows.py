"""Rows of which a card holds a part: the same bits as with all of them there, whatever the part."""

import copy

import numpy as np
import pytest
import torch

from rowhaul.errors import ConfigError, UnknownKeyError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.nn.config import PoolingType
from rowhaul.optim import Adam, RowwiseAdagrad

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.cache_size import CacheSize
from rowhaul.device.cached_rows import CachedDeviceRows
from rowhaul.device.launch import runs_interpreted
from rowhaul.device.rows import DeviceRows

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
NAMES = ["w", "z", "x", "y"]
SAMPLES, IDS = (6, 120) if runs_interpreted() else (64, 3000)
COUNT = 10 if runs_interpreted() else 30
TIGHT = 12_000 if runs_interpreted() else 120_000  # bytes: room for the rows of a batch or two


def collection(memory=None, rule=None, on_unknown="init"):
    """All rows in this process (no memory), on the card (0), or within so many bytes there."""
    rule = rule or RowwiseAdagrad(0.1)
    tables = [
        EmbeddingBagConfig(embedding_dim=4, name="a", feature_names=["x", "y"]),
        EmbeddingBagConfig(embedding_dim=6, name="b", feature_names=["z"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(embedding_dim=4, name="c", feature_names=["w"], pooling=PoolingType.MEAN),
    ]
    made = EmbeddingBagCollection(tables, optimizer=rule, seed=5, on_unknown=on_unknown)
    if memory == 0:
        made.read_from(DeviceRows(made.feature_groups, rule, 5, DEVICE))
    elif memory is not None:
        made.read_from(CachedDeviceRows(made.feature_groups, rule, 5, DEVICE, memory))
    return made


def batches(count, seed=0, jagged=True):
    random = np.random.default_rng(seed)
    for _ in range(count):
        lengths = random.integers(0, 3, 4 * SAMPLES) if jagged else np.ones(4 * SAMPLES, np.int64)
        values = random.integers(0, IDS, lengths.sum())
        yield KeyedJaggedTensor(NAMES, torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def trained(rows, count, *, ahead=0, seed=0, jagged=True):
    """Train on some batches, announced so many ahead of their use; returns all rows by table and key."""
    given, number = list(batches(count, seed, jagged)), 0
    random = np.random.default_rng(7)
    for one in given[:ahead]:
        rows.locate_early(one)
    for number, ids in enumerate(given, 1):
        if ahead and number - 1 + ahead < count:
            rows.locate_early(given[number - 1 + ahead])
        out = rows(ids).values()
        gradients = torch.from_numpy(random.normal(size=out.shape).astype(np.float32))
        out.backward(gradients.to(out.device))
        rows.apply_gradients(0.1, number)
    return by_key(rows)


def by_key(rows):
    found = {}
    for name in ("a", "b", "c"):
        for keys, records in rows.rows(name):
            for key, record in zip(keys.tolist(), records, strict=True):
                found[name, key] = record.tobytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "memory", "ahead"),
    [
        (RowwiseAdagrad(0.1), TIGHT, 0),
        (RowwiseAdagrad(0.1), 2 * TIGHT, 3),
        (RowwiseAdagrad(0.1), 40 * TIGHT, 2),
        (Adam(0.05), 2 * TIGHT, 1),
    ],
)
def test_bits_do_not_depend_on_the_cache(rule, memory, ahead):
    expected = trained(collection(0, rule), COUNT)
    rows = collection(memory, rule)
    assert trained(rows, COUNT, ahead=ahead) == expected
    assert all(tables.allocated_bytes <= tables.num_bytes for tables in rows.source.tables)
    for name in ("a", "b", "c"):
        assert rows.num_rows(name) == sum(table == name for table, _ in expected)
    if memory == TIGHT:
        assert rows.source.counts.num_fetched > 0  # some rows went and came back


@pytest.mark.slow
def test_rows_are_those_of_this_process_to_rounding():
    here, there = collection(), collection(TIGHT)
    trained(here, 8)
    found, expected = trained(there, 8), by_key(here)
    assert found.keys() == expected.keys()
    for row, bits in expected.items():
        np.testing.assert_allclose(
            np.frombuffer(found[row], np.float32), np.frombuffer(bits, np.float32), rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
def test_evaluation_reads_rows_wherever_they_are_and_changes_nothing():
    for on_unknown in ("init", "default"):
        here, there = collection(0, on_unknown=on_unknown), collection(TIGHT, on_unknown=on_unknown)
        for one in (here, there):
            trained(one, 5)
            one.eval()
        later = next(batches(1, seed=9))
        there.locate_early(later)  # rows that are only planned do not count
        for ids in batches(2, seed=3):
            torch.testing.assert_close(there(ids).values(), here(copy.deepcopy(ids)).values(), rtol=0, atol=0)
        there.train()
        assert by_key(there) == by_key(here)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_step_between_forward_and_backward_is_refused(is_weighted):
    """Rows of the first batch may be gone from the card, and their records those of other rows."""
    tables = [EmbeddingBagConfig(embedding_dim=4, name="a", feature_names=["x"])]
    rows = EmbeddingBagCollection(tables, is_weighted, optimizer=RowwiseAdagrad(0.1))
    rows.read_from(CachedDeviceRows(rows.feature_groups, rows.optimizer, 5, DEVICE, TIGHT))
    weights = torch.ones(3, requires_grad=True) if is_weighted else None

    def forward(first):
        ids = torch.arange(first, first + 3)
        return rows(KeyedJaggedTensor(["x"], ids, weights, lengths=torch.tensor([1, 2]))).values().sum()

    late = forward(0)
    forward(3).backward()
    rows.apply_gradients(0.1, 1)
    rows.anchor.requires_grad_(not is_weighted)
    with pytest.raises(ConfigError, match="a step was taken between forward and backward"):
        late.backward()
    rows.anchor.requires_grad_()
    forward(0).backward()
    rows.apply_gradients(0.1, 2)


def test_unknown_keys_can_be_refused():
    rows = collection(TIGHT, on_unknown="error")
    trained(rows, 2)
    rows.eval()
    with pytest.raises(UnknownKeyError, match="key 999999 was never trained"):
        rows(KeyedJaggedTensor(NAMES, torch.tensor([999999]), lengths=torch.tensor([1, 0, 0, 0])))


@pytest.mark.slow
def test_gradients_of_several_batches_are_kept_until_the_step():
    found = []
    for memory in (0, 4 * TIGHT):
        rows, random = collection(memory), np.random.default_rng(1)
        for number in range(1, 5):
            for ids in batches(3, seed=number):
                out = rows(ids).values()
                gradients = torch.from_numpy(random.normal(size=out.shape).astype(np.float32))
                out.backward(gradients.to(out.device))
            rows.apply_gradients(0.1, number)
        found.append(by_key(rows))
    assert found[0] == found[1]


@pytest.mark.slow
def test_batches_read_twice_or_out_of_order_or_never():
    found = []
    for memory in (0, TIGHT):
        rows, given = collection(memory), list(batches(10))
        for one in given:
            rows.locate_early(one)
        for number, which in enumerate([1, 0, 4, 4, 2, 9, 3], 1):
            out = rows(given[which]).values()
            with torch.no_grad():
                rows(given[which])
            out.sum().backward()
            rows.apply_gradients(0.1, number)
        rows(next(batches(1, seed=8)))  # makes rows, as everywhere
        found.append(by_key(rows))
    assert found[0].items() <= found[1].items()  # batches passed over may have made theirs, too


@pytest.mark.slow
def test_rows_move_between_memories_and_are_replaced():
    rows = collection(TIGHT)
    expected = trained(rows, 8)
    state = {name: array.clone() for name, array in rows.state_dict().items()}
    other = collection(3 * TIGHT)
    trained(other, 3, seed=4)
    other.load_state_dict(state)
    assert by_key(other) == expected
    back = rows.source.moved_to(torch.device("cpu"), rows.feature_groups, rows.optimizer, 5)
    rows.read_from(back)
    assert by_key(rows) == expected
    copied = copy.deepcopy(other)
    assert by_key(copied) == expected
    assert trained(copied, 3, seed=6) == trained(other, 3, seed=6)


def test_too_little_memory_names_what_would_do():
    rows = collection(9000)
    with pytest.raises(ConfigError, match="too little for the rows of one batch; give at least") as error:
        trained(rows, 3)
    size = float(str(error.value).split("give at least ")[1].split(" KiB")[0])
    enough = collection(int(1024 * size) + 1024)
    assert trained(enough, 3) == trained(collection(0), 3)


@pytest.mark.parametrize("record_bytes", [8, 68, 516, 4100])
def test_sizes_stay_within_what_is_given(record_bytes):
    for num_bytes in (0, 10_000, 10**6, 10**8, 8 << 30):
        size = CacheSize.within(num_bytes, record_bytes)
        taken = size.num_records * (record_bytes + 18.5) + 4 * (size.num_places + 64)
        assert size.num_records == 0 or taken <= num_bytes
        if num_bytes >= 10**8:
            # Whole chunks of records alone.
            assert size.num_records + (1 << size.shift) >= (num_bytes - 2048) // (record_bytes + 24)
    for count in (1, 1000, 10**6):
        assert CacheSize.within(CacheSize.for_records(count, record_bytes), record_bytes).num_records >= count
