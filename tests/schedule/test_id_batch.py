import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import DataError
from rowhaul.schedule.batch import IdBatch


@settings(max_examples=50)
@given(st.data())
def test_turning_features_around_keeps_every_id_of_every_sample(data):
    num_features, num_samples = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    ids = [
        [data.draw(st.lists(st.integers(-9, 9), max_size=3)) for _ in range(num_samples)]
        for _ in range(num_features)
    ]
    tables = [data.draw(st.integers(0, 2)) for _ in range(num_features)]
    values = np.array([key for feature in ids for sample in feature for key in sample], np.int64)
    lengths = np.array([[len(sample) for sample in feature] for feature in ids], np.int32)
    batch = IdBatch.from_features(tables, values, lengths.reshape(num_features, num_samples))
    assert len(batch) == num_samples
    for i in range(num_samples):
        expected = [(tables[f], key) for f in range(num_features) for key in ids[f][i]]
        mine = slice(batch.offsets[i], batch.offsets[i + 1])
        assert list(zip(batch.tables[mine], batch.keys[mine], strict=True)) == expected


def arrays(offsets, tables, keys):
    return np.array(offsets, np.int64), np.array(tables, np.int32), np.array(keys, np.int64)


@pytest.mark.parametrize(
    ("offsets", "tables", "keys", "message"),
    [
        ([], [], [], "offsets must start at 0"),
        ([0, 3], [0, 0], [1, 2], "end at the number of ids, 2"),
        ([0, 2], [0], [1, 2], "1 tables were given for 2 keys"),
        ([0, 2, 1, 2], [0, 0], [1, 2], "must not decrease"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, tables, keys, message):
    with pytest.raises(DataError, match=message):
        IdBatch(*arrays(offsets, tables, keys))


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="with 2 features"):
        IdBatch.from_features([0, 1], np.arange(3), np.ones((1, 3), np.int32))
    with pytest.raises(DataError, match="add up to 3, but there are 4"):
        IdBatch.from_features([0], np.arange(4), np.ones((1, 3), np.int32))
    with pytest.raises(DataError, match="must not be negative; got -1"):
        IdBatch.from_features([0], np.arange(2), np.array([[3, -1]], np.int32))


def test_ids_of_other_integer_types_become_int64():
    batch = IdBatch(np.array([0, 1], np.uint8), np.array([0], np.int64), np.array([2**64 - 1], np.uint64))
    assert [array.dtype for array in (batch.offsets, batch.tables, batch.keys)] == [
        np.int64,
        np.int32,
        np.int64,
    ]
    assert batch.keys.tolist() == [-1]
    with pytest.raises(DataError, match="keys must be a row of int64; got float64"):
        IdBatch(np.array([0, 1]), np.array([0]), np.array([1.5]))
    with pytest.raises(DataError, match="ids must be integers; got float64"):
        IdBatch.from_features([0], np.array([1.7, 2.0]), np.ones((1, 2), np.int32))


def test_the_digest_depends_on_every_sample_id_and_order():
    batches = [
        arrays([0, 1, 3], [0, 0, 1], [5, 6, 7]),
        arrays([0, 2, 3], [0, 0, 1], [5, 6, 7]),
        arrays([0, 1, 3], [0, 1, 1], [5, 6, 7]),
        arrays([0, 1, 3], [0, 0, 1], [6, 5, 7]),
        arrays([0, 1, 3, 3], [0, 0, 1], [5, 6, 7]),
        arrays([0], [], []),
        arrays([0, 0], [], []),
    ]
    assert len({IdBatch(*one).digest() for one in batches}) == len(batches)
    assert IdBatch(*batches[0]).digest() == IdBatch(*batches[0]).digest()
