"""Histories built from raw logs: equal to a slow loop, and never with anything of the future."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.data import Schema
from rowhaul.data.folder import writer as folder_module
from rowhaul.data.formats import time_order
from rowhaul.data.formats.histories import SAME_TIME, RecentItems
from rowhaul.data.preparing import prepare
from rowhaul.errors import ConfigError

LENGTH = 3


def slow_histories(events, length=LENGTH):
    """For (user, time, item) in the order of time: the user's items of earlier times, newest last."""
    past, made = defaultdict(list), []
    for user, time, item in events:
        made.append([other for when, other in past[user] if when < time][-length:])
        past[user].append((time, item))
    return made


def leaks(events, histories):
    """Places whose history holds what its user did not do before: the check that catches a leak."""
    before = defaultdict(list)
    for user, time, item in events:
        before[user].append((time, item))
    return [
        place
        for place, ((user, time, _), history) in enumerate(zip(events, histories, strict=True))
        if not set(history) <= {item for when, item in before[user] if when < time}
    ]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 99)), max_size=60),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_equals_a_slow_loop_in_whatever_chunks(gaps, cuts):
    """Several events of a user may have one time."""
    time, events = 0, []
    for user, gap, item in gaps:
        time += gap
        events.append((user, time, item))
    recent, found = RecentItems(["a", "b"], LENGTH), []
    for chunk in np.split(
        np.array(events, np.int64).reshape(-1, 3), sorted(min(c, len(events)) for c in cuts)
    ):
        users, times, items = (np.ascontiguousarray(column) for column in chunk.T)
        made = recent.see(users, times, {"a": items, "b": items + 1}, np.ones(len(chunk), np.bool_))
        offsets, values = made["a"]
        assert np.array_equal(offsets, made["b"][0])
        assert np.array_equal(values + 1, made["b"][1])
        found += [values[first:last].tolist() for first, last in pairwise(offsets)]
    if max((sum(one[:2] == e[:2] for e in events) for one in events), default=0) <= SAME_TIME:
        assert found == slow_histories(events)
    assert not leaks(events, found)


def write_movielens(folder, events):
    folder.mkdir()
    (folder / "ratings.dat").write_text(
        "".join(f"{user}::{item}::{1 + (user + item) % 5}::{time}\n" for user, time, item in events)
    )
    items = sorted({item for *_, item in events})
    (folder / "movies.dat").write_text("".join(f"{item}::Film::Drama\n" for item in items))
    return folder


def read(folder):
    paths = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("test/*.parquet"))]
    return pa.concat_tables([pq.read_table(path) for path in paths])


@pytest.fixture
def events(monkeypatch):
    """A log that is grouped by user, in no order of time, and larger than a run of the sort."""
    monkeypatch.setattr(folder_module, "ROWS_PER_PART", 400)
    monkeypatch.setattr(time_order, "ROWS_PER_RUN", 300)
    monkeypatch.setattr(time_order, "ROWS_PER_SLICE", 128)
    generator = np.random.default_rng(0)
    every = [
        (int(user), int(time), int(item))
        for user, time, item in zip(
            generator.integers(1, 30, 900),
            generator.integers(0, 500, 900),
            generator.integers(1, 80, 900),
            strict=True,
        )
    ]
    return sorted(every, key=lambda one: one[0])


def test_movielens_with_histories(events, tmp_path):
    """In the order of time, without looking ahead; a planted leak is caught."""
    prepare(write_movielens(tmp_path / "raw", events), tmp_path / "data", "movielens", history=LENGTH)
    table = read(tmp_path / "data")
    ordered = sorted(events, key=lambda one: one[1])  # stable: as in the file within one time
    assert table["movie"].to_pylist() == [item for *_, item in ordered]
    histories = table["history"].to_pylist()
    assert histories == slow_histories(ordered)
    assert not leaks(ordered, histories)
    planted = [
        [*history, ordered[place][2]] if place % 300 == 299 else history
        for place, history in enumerate(histories)
    ]
    assert leaks(ordered, planted)
    schema = Schema.read(tmp_path / "data/schema.yaml")
    (column,) = [one for one in schema.ids if one.name == "history"]
    assert (column.table, column.max_length) == ("movie", LENGTH)


def test_the_future_does_not_change_the_past(events, tmp_path):
    """Without the later half of a log, the histories of the earlier half are the same."""
    ordered = sorted(events, key=lambda one: one[1])
    end = ordered[450][1]
    earlier = [one for one in events if one[1] < end]
    for name, some in (("all", events), ("earlier", earlier)):
        prepare(
            write_movielens(tmp_path / name, some), tmp_path / f"{name}-data", "movielens", history=LENGTH
        )
    whole, part = read(tmp_path / "all-data"), read(tmp_path / "earlier-data")
    assert whole.slice(0, len(part)).to_pylist() == part.to_pylist()


def test_only_positive_events_enter_if_asked(events, tmp_path):
    prepare(
        write_movielens(tmp_path / "raw", events), tmp_path / "data", "movielens", history=LENGTH,
        history_of="positive",
    )  # fmt: skip
    table = read(tmp_path / "data")
    liked = set(
        zip(table["user"].to_pylist(), table["movie"].to_pylist(), table["liked"].to_pylist(), strict=True)
    )
    for user, history in zip(table["user"].to_pylist(), table["history"].to_pylist(), strict=True):
        assert all((user, item, 1) in liked for item in history)


def test_userbehavior(tmp_path):
    """Items and categories side by side; an action other than pv is a label of 1; bad lines are named."""
    acts = ["pv", "fav", "cart", "buy"]
    rows = [(1 + i % 3, 100 + i, 7 + i % 2, acts[i % 4], 1000 + i) for i in range(12)]
    path = tmp_path / "UserBehavior.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in [*rows, (1, 2, 3, "typo", 5)]))
    report = prepare(path, tmp_path / "data", "userbehavior", history=2, on_bad_line="skip", test_share=0)
    assert (report.rows, report.bad_lines) == (12, 1)
    table = read(tmp_path / "data")
    assert table["acted"].to_pylist() == [int(row[3] != "pv") for row in rows]
    assert table["history"].to_pylist()[9] == [103, 106]
    assert table["category_history"].to_pylist()[9] == [8, 7]


def test_rows_are_bad_for_two_reasons(tmp_path):
    """A row without a time does not hide what else is bad in the rows around it."""
    path = tmp_path / "UserBehavior.csv"
    path.write_text("1,10,7,pv,5\n1,11,7,typo,6\n1,12,7,buy,\n,13,7,buy,8\n1,14,7,typo,\n")
    report = prepare(path, tmp_path / "data", "userbehavior", on_bad_line="skip", test_share=0)
    assert (report.rows, report.bad_lines) == (1, 4)
    reasons = [example.partition(": ")[2] for example in report.bad_line_examples]
    assert [reason.startswith("column time") for reason in reasons] == [False, True, False, False]
    assert read(tmp_path / "data")["item"].to_pylist() == [10]


def test_refusals(events, tmp_path):
    raw = write_movielens(tmp_path / "raw", events)
    with pytest.raises(ConfigError, match="histories are made in the order of time"):
        prepare(raw, tmp_path / "data", "movielens", history=3, time_order=False)
    with pytest.raises(ConfigError, match="a length of at least 1"):
        prepare(raw, tmp_path / "data", "movielens", history=0)
    with pytest.raises(ConfigError, match="one of all, positive"):
        prepare(raw, tmp_path / "data", "movielens", history=2, history_of="liked")
    with pytest.raises(ConfigError, match="give their length"):
        prepare(raw, tmp_path / "data", "movielens", history_of="all")
    with pytest.raises(ConfigError, match="format avazu has no option history"):
        prepare(raw, tmp_path / "data", "avazu", history=2)
