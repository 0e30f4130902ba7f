"""A snapshot reads what was there when it was taken, whatever training does meanwhile."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import RowhaulError
from rowhaul.optim import SGD
from rowhaul.store import TableGroup, TableSpec, snapshot
from rowhaul.store.keyed import remove
from rowhaul.store.snapshot import GroupSnapshot
from rowhaul.store.snapshot_kernels import count_pending, keep_changing, keep_removed, take_records

TABLES = 2


def group(width=3):
    specs = [TableSpec(f"t{table}", width, -1, 1) for table in range(TABLES)]
    return TableGroup(specs, SGD(lr=1), np.float32, 0)


def as_dict(blocks):
    """Rows by key; none may come twice."""
    found = [(int(key), row.tobytes()) for keys, rows in blocks for key, row in zip(keys, rows, strict=True)]
    assert len(dict(found)) == len(found)
    return dict(found)


def live(tables):
    return [as_dict(tables.blocks(table)) for table in range(TABLES)]


def change(tables, kind, table, keys):
    """One thing that training does to rows."""
    keys = np.unique(np.array(keys, np.int64))
    positions = np.full(len(keys), table)
    if kind == "step":
        tables.update(tables.make_fresh(positions, keys), np.ones((len(keys), tables.dim)), 1.0, 1)
    elif kind == "load":
        tables.load(table, keys, np.full((len(keys), tables.arena.width), 7.0, np.float32))
    else:
        there = np.flatnonzero(tables.index.find_each(positions, keys) >= 0)
        remove(tables, positions[there], keys[there])


changes = st.tuples(
    st.sampled_from(["step", "load", "remove"]),
    st.integers(0, TABLES - 1),
    st.lists(st.integers(0, 12), max_size=8),
)


@given(st.lists(changes, max_size=6), st.lists(st.lists(changes, max_size=4), min_size=1, max_size=4))
@settings(max_examples=150)
def test_the_snapshot_is_what_was_there(before, between):
    tables = group()
    for one in before:
        change(tables, *one)
    expected, bystander = live(tables), group()
    for one in [*before, *(one for some in between for one in some)]:
        change(bystander, *one)
    snapshot = GroupSnapshot(tables)
    found = [{} for _ in range(TABLES)]
    rest = iter(between)
    for table in range(TABLES):
        for one in next(rest, []):
            change(tables, *one)
        blocks = snapshot.blocks(table)
        for keys, rows in blocks:
            found[table] |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
            for one in next(rest, []):
                change(tables, *one)
    for some in rest:
        for one in some:
            change(tables, *one)
    snapshot.close()
    assert found == expected
    assert live(tables) == live(bystander), "reading a snapshot changes rows"
    assert tables.arena.keeper is None


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
@settings(max_examples=60)
def test_rows_with_a_mark_are_read_apart(there, marked, removed):
    tables = group()
    change(tables, "step", 1, sorted(there))
    change(tables, "step", 0, [1, 2, 3])
    expected = live(tables)[1]
    snapshot = GroupSnapshot(tables)
    some = np.array(sorted(there & marked), np.int64)
    positions = np.full(len(some), 1)
    snapshot.mark(positions, tables.index.find_each(positions, some))
    change(tables, "step", 1, sorted(there))
    change(tables, "remove", 1, sorted(removed))
    change(tables, "step", 1, sorted(removed))
    assert as_dict(snapshot.blocks(1)) == {key: row for key, row in expected.items() if key not in marked}
    assert as_dict(snapshot.blocks(1, marked=True)) == {
        key: row for key, row in expected.items() if key in marked
    }
    assert len(as_dict(snapshot.blocks(0))) == 3
    snapshot.close()


def test_one_thread_reads_while_two_train():
    tables, rng = group(16), np.random.default_rng(0)
    keys = rng.permutation(200_000)[:60_000].astype(np.int64)
    change(tables, "step", 0, keys[:40_000])
    change(tables, "step", 1, keys[:20_000])
    for _ in range(3):
        expected, snapshot, ended = live(tables), GroupSnapshot(tables), threading.Event()

        def train(table, seed, ended=ended):
            own = np.random.default_rng(seed)
            while not ended.is_set():
                change(tables, ["step", "step", "remove"][own.integers(3)], table, own.choice(keys, 3000))

        threads = [threading.Thread(target=train, args=(table, table)) for table in range(TABLES)]
        for thread in threads:
            thread.start()
        found = [as_dict(snapshot.blocks(table)) for table in range(TABLES)]
        ended.set()
        for thread in threads:
            thread.join()
        snapshot.close()
        assert found == expected
        assert live(tables) != expected


def test_there_is_one_snapshot_at_a_time():
    tables = group()
    snapshot = GroupSnapshot(tables)
    with pytest.raises(RowhaulError, match="close it first"):
        GroupSnapshot(tables)
    snapshot.close()
    GroupSnapshot(tables).close()


def test_rows_that_are_cleared_stay_in_the_snapshot():
    tables = group()
    change(tables, "step", 0, [1, 2, 3])
    expected, snapshot = live(tables), GroupSnapshot(tables)
    tables.clear()
    change(tables, "step", 0, [1, 2])
    assert [as_dict(snapshot.blocks(table)) for table in range(TABLES)] == expected
    snapshot.close()


def test_where_nothing_has_a_mark_nothing_is_read_as_marked():
    tables = group()
    change(tables, "step", 0, [1, 2, 3])
    snapshot = GroupSnapshot(tables)
    assert as_dict(snapshot.blocks(0, marked=True)) == {}
    assert len(as_dict(snapshot.blocks(0))) == 3
    snapshot.close()


def test_all_kernels_are_compiled_beforehand():
    """A kernel that training meets while a snapshot is open takes as long to compile as many steps."""
    snapshot.compile_kernels()
    kernels = (count_pending, keep_changing, keep_removed, take_records)
    compiled = [list(kernel.signatures) for kernel in kernels]
    tables = group(5)
    change(tables, "step", 1, range(20))
    taken = GroupSnapshot(tables)
    change(tables, "step", 1, range(5, 30))
    change(tables, "remove", 1, range(10))
    assert len(as_dict(taken.blocks(1))) == 20
    taken.close()
    assert [list(kernel.signatures) for kernel in kernels] == compiled
