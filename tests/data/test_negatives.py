"""Histories cut to their newest ids and negatives drawn by the reader, against slow loops."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.data import SampleStream, Schema
from rowhaul.data.negatives import draw_negatives
from rowhaul.data.samples import Samples
from rowhaul.errors import DataError

SCHEMA = Schema.from_dict(
    {
        "label": "y",
        "ids": [
            "user",
            {"name": "item", "table": "items"},
            {"name": "history", "table": "items", "max_length": 3},
            {"name": "others", "table": "items", "negatives_of": "item", "count": 2},
            {"name": "past_others", "table": "items", "negatives_of": "history", "draw": "frequent"},
        ],
    }
)


def write(path, histories, items):
    count = len(items)
    table = {"y": np.zeros(count, np.int8), "user": np.arange(count), "item": items}
    table["history"] = pa.array(histories, pa.list_(pa.int64()))
    pq.write_table(pa.table(table), path, row_group_size=7)
    return path


def bags(samples, feature):
    place = samples.features.index(feature)
    ids = samples.ids_of_features()[place]
    return [one.tolist() for one in np.split(ids, np.cumsum(samples.lengths[place])[:-1])]


@pytest.fixture
def log(tmp_path):
    generator = np.random.default_rng(0)
    histories = [generator.integers(0, 50, generator.integers(0, 7)).tolist() for _ in range(40)]
    histories[3] = None
    return write(tmp_path / "log.parquet", histories, generator.integers(0, 50, 40)), histories


def test_histories_are_cut_to_the_newest_and_counted(log):
    path, histories = log
    stream = SampleStream(path, SCHEMA, 9)
    found = [bag for samples in stream for bag in bags(samples, "history")]
    assert found == [(one or [])[-3:] for one in histories]
    assert stream.num_cut == sum(len(one or []) > 3 for one in histories)
    assert stream.news() == [
        "histories longer than their max_length {'history': 3} are cut to the newest ids"
    ]
    assert stream.news() == []  # said once


def test_negatives_are_others_of_the_batch_and_follow_from_seed_and_place(log):
    path, _ = log
    once, again = ([*SampleStream(path, SCHEMA, 20, epochs=2, seed=5)] for _ in range(2))
    later = [*SampleStream(path, SCHEMA, 20, epochs=2, seed=5, start=20)]
    for one, other in zip(once, again, strict=True):
        assert np.array_equal(one.values, other.values)
    for one, other in zip(once[1:], later, strict=True):  # a resumed run draws the same
        assert np.array_equal(one.values, other.values)
    assert bags(once[0], "others") != bags(once[2], "others")  # the next epoch draws others
    assert bags(once[0], "others") != bags(next(iter(SampleStream(path, SCHEMA, 20, seed=6))), "others")
    for samples in once:
        items = {key for bag in bags(samples, "item") for key in bag}
        past = {key for bag in bags(samples, "history") for key in bag}
        for item, history, others, past_others in zip(
            *(bags(samples, name) for name in ("item", "history", "others", "past_others")), strict=True
        ):
            own = {*item, *history}
            assert len(others) == 2
            assert len(past_others) == len(history)
            assert set(others) <= items - own
            assert set(past_others) <= past - own


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8)
)
def test_a_sample_gets_its_own_id_only_if_the_batch_has_no_other(rows):
    count = len(rows)
    values = [np.arange(count), np.array([item for item, _ in rows])]
    values += [np.array(history, np.int64) for _, history in rows]
    lengths = np.array([np.ones(count), np.ones(count), [len(history) for _, history in rows]], np.int32)
    dense = np.zeros((count, 0), np.float32)
    plain = Samples(
        ("user", "item", "history"),
        np.concatenate(values).astype(np.int64),
        lengths,
        dense,
        None,
        np.arange(count),
    )
    drawn = draw_negatives(plain, SCHEMA, 3)
    assert bags(drawn, "item") == [[item] for item, _ in rows]
    for (item, history), others in zip(rows, bags(drawn, "others"), strict=True):
        free = {other for other, _ in rows} - {item, *history}
        assert set(others) <= {other for other, _ in rows}
        if 4 * len(free) >= 3 * len({other for other, _ in rows}):  # 16 tries do not all fail
            assert set(others) <= free


@pytest.mark.parametrize(("draw", "share"), [("even", 1 / 4), ("frequent", 0.7)])
def test_negatives_are_drawn_evenly_or_as_often_as_ids_occur(draw, share):
    items = np.repeat([0, 1, 2, 3, 4], [700, 100, 100, 99, 1])
    ids = [{"name": "item", "table": "items"}]
    ids += [{"name": "n", "table": "items", "negatives_of": "item", "count": 50, "draw": draw}]
    dense = np.zeros((len(items), 0), np.float32)
    plain = Samples(("item",), items, np.ones((1, len(items)), np.int32), dense, None, np.arange(len(items)))
    drawn = bags(draw_negatives(plain, Schema.from_dict({"ids": ids}), 3), "n")
    rest = np.concatenate(drawn[-100:-1])  # of samples with id 3, which the others are drawn against
    assert np.mean(rest == 0) == pytest.approx(share / (1 - (0.099 if draw == "frequent" else 0)), rel=0.06)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"name": "n", "negatives_of": "item"}, "reads the same table"),
        ({"name": "n", "table": "items", "negatives_of": "typo"}, "name an id column that is in the files"),
        ({"name": "n", "count": 2}, "say `negatives_of`"),
        ({"name": "n", "draw": "frequent"}, "draw is for negatives; say `negatives_of`"),
        (
            {"name": "n", "table": "items", "negatives_of": "item", "draw": "often"},
            "known are even, frequent",
        ),
        ({"name": "n", "max_length": 0}, "max_length must be at least 1"),
        ({"name": "n", "max_length": "5"}, "`max_length` must be int"),
    ],
)
def test_bad_columns_are_refused(column, message):
    with pytest.raises(DataError, match=message):
        Schema.from_dict({"ids": [{"name": "item", "table": "items"}, column]})


def test_a_schema_with_histories_is_written_and_read(tmp_path):
    SCHEMA.write(tmp_path / "schema.yaml")
    assert Schema.read(tmp_path / "schema.yaml") == SCHEMA
    assert SCHEMA.histories == ("history",)
    assert SCHEMA.column_names() == ["y", "user", "item", "history"]
    assert SCHEMA.tables["items"] == ("item", "history", "others", "past_others")
