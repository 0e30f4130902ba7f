"""What pruning on a cluster is made of: reports in few bits, and ids of chunks in place of rows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import ConfigError
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.cluster.utility_log import (
    UtilityLog,
    decode_report,
    decode_set,
    encode_report,
    encode_set,
)
from rowhaul.pruning.layout import check_schedule, chunk_layout
from rowhaul.pruning.scheduling import ChunkIds
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import CacheSettings, HotRows, IdBatch, RowPolicy, ScheduleSettings, Topology
from rowhaul.schedule.directory.distinct import distinct_by_appearance
from rowhaul.store import TableSpec

KEYS = (0, 1, -1, 7, 8, 9, 1 << 40, -(1 << 63), (1 << 63) - 1)


def whole_layout(dim=5, tables=2):
    specs = tuple(TableSpec(f"t{number}", dim, -1.0, 1.0) for number in range(tables))
    return TableLayout(specs, row_optimizer("rowwise_adagrad", lr=0.1), "float32", 3)


@settings(max_examples=60)
@given(st.sets(st.integers(0, 5000)), st.integers(5001, 1 << 20), st.binary(max_size=3))
def test_a_set_comes_back_and_takes_few_bits(numbers, bound, rest):
    given_numbers = np.array(sorted(numbers), np.int64)
    data = encode_set(given_numbers, bound)
    found, end = decode_set(data + rest)
    assert found.tolist() == sorted(numbers)
    assert end == len(data)
    bits = (2 + math.log2(bound / max(len(numbers), 1))) * len(numbers)
    assert 8 * (len(data) - 17) <= bits + len(numbers) + 16  # a header, and whole bytes


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(0, 5000), st.tuples(*[st.floats(0, 2.0**100, width=32)] * 3), max_size=40),
    st.integers(1, 3),
)
def test_a_report_is_read_with_half_its_digits(seen, num_chunks):
    numbers = np.array(sorted(seen), np.int32)
    utilities = np.array([seen[one][:num_chunks] for one in sorted(seen)], np.float32)
    utilities = utilities.reshape(len(seen), num_chunks)
    data = encode_report(numbers, utilities)
    found, about = decode_report(data, num_chunks)
    assert found.tolist() == numbers.tolist()
    assert np.array_equal(about, torch.from_numpy(utilities).bfloat16().float().numpy())
    assert len(data) <= (2 * num_chunks + 3) * len(seen) + 20


def test_it_is_looked_ten_times_in_the_first_period_whether_to_prune():
    settings = PruneSettings(ratio=0.5, period=25)
    stops = [0]
    while stops[-1] < 100:
        stops.append(settings.next_stop(stops[-1]))
    assert stops == [*range(0, 25, 2), 25, 50, 75, 100]
    assert PruneSettings(ratio=0.5, period=1).next_stop(0) == 1
    assert PruneSettings(ratio=0.5, period=1000).next_stop(550) == 600


@settings(max_examples=40)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 40), st.floats(0, 100, width=32), max_size=6), min_size=1, max_size=12
    )
)
def test_a_log_of_utilities_is_a_sum_that_decays(seen):
    utility_log, expected = UtilityLog(2, 0.5), Counter()
    for now, amounts in enumerate(seen, 1):
        numbers = np.array(sorted(amounts), np.int32)
        some = np.array([[amounts[one], 2 * amounts[one]] for one in numbers.tolist()]).reshape(-1, 2)
        utility_log.add(numbers, some, now)
        for one in list(expected):
            expected[one] *= 0.5
        for one, amount in amounts.items():
            expected[one] += amount
    for _ in range(2):
        numbers, utilities = utility_log.report(len(seen))
        assert numbers.tolist() == sorted(expected)
        wanted = [[expected[one], 2 * expected[one]] for one in numbers.tolist()]
        np.testing.assert_allclose(utilities, np.array(wanted).reshape(-1, 2), rtol=1e-5, atol=1e-30)
        copied = UtilityLog(2, 0.5)
        copied.restore(utility_log.export())
        utility_log = copied  # which knows the same
    utility_log.clear()
    assert not len(utility_log)


@st.composite
def id_batches(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(KEYS)), max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    offsets = np.array([0, *cuts, len(rows)])
    tables, keys = (
        np.array([row[part] for row in rows], kind) for part, kind in ((0, np.int32), (1, np.int64))
    )
    return IdBatch(offsets, tables, keys)


@settings(max_examples=40)
@given(id_batches())
def test_rows_are_counted(ids):
    named, keys, starts, counts = distinct_by_appearance(ids.tables, ids.keys, 2)
    tables = np.repeat([0, 1], np.diff(starts))
    rows = list(zip(tables.tolist(), keys.tolist(), strict=True))
    given_rows = list(zip(ids.tables.tolist(), ids.keys.tolist(), strict=True))
    assert [rows[place] for place in named.tolist()] == given_rows
    assert Counter(dict(zip(rows, counts.tolist(), strict=True))) == Counter(given_rows)


@settings(max_examples=40)
@given(st.lists(id_batches(), min_size=1, max_size=6), st.sampled_from([0.3, 0.6, 0.9]), st.integers(1, 3))
def test_the_pool_is_never_exceeded_and_batches_name_what_is_there(batches, ratio, chunks):
    layout = chunk_layout(whole_layout(), PruneSettings(ratio=ratio, chunks=chunks, period=2))
    one, other = (ChunkIds(layout, iter(()), least_entries=4) for _ in range(2))
    for now, ids in enumerate(batches):
        for reader in (one, other):
            if reader.must_wait and reader.look(now):
                reader.map.prune(now)
        found, again = one.read(ids), other.read(ids)
        assert all(map(np.array_equal, vars(found).values(), vars(again).values()))
        live = one.rows[0]
        for reader in (one, other):
            reader.count_next()
        rows = one.map.rows()
        held = one.map.entries.slots(rows.numbers)[0] >= 0
        assert one.map.num_held == held.sum() <= max(one.map.room.num_chunks, 0)
        assert one.map.num_entries == len(rows.keys) <= max(one.map.room.num_entries, 4)
        names = zip(rows.tables.tolist(), rows.keys.tolist(), strict=True)
        present = dict(zip(names, held.tolist(), strict=True))
        expected = [
            [
                (table * chunks + place, key)
                for table, key in zip(ids.tables[some].tolist(), ids.keys[some].tolist(), strict=True)
                for place in range(chunks)
                if (table, key) in present and present[table, key][place]
            ]
            for some in map(slice, ids.offsets[:-1], ids.offsets[1:])
        ]
        assert [
            list(zip(found.tables[some].tolist(), found.keys[some].tolist(), strict=True))
            for some in map(slice, found.offsets[:-1], found.offsets[1:])
        ] == expected
        assert set(zip(live.tables.tolist(), live.keys.tolist(), strict=True)) <= present.keys()


def test_chunks_begin_as_the_row_would():
    whole = RowMemory(whole_layout())
    layout = chunk_layout(whole_layout(), PruneSettings(ratio=0.5, chunks=3))
    chunks, keys = RowMemory(layout), np.array(KEYS)
    for table in range(2):
        position = np.full(len(keys), table)
        rows = whole.groups[0].arena.read(whole.groups[0].make_fresh(position, keys))[:, :5]
        parts = []
        for place in range(3):
            number, position_of_chunk = chunks.place_of(3 * table + place)
            group = chunks.groups[number]
            made = group.make_fresh(np.full(len(keys), position_of_chunk), keys)
            parts.append(group.arena.read(made)[:, : group.dim])
        assert np.array_equal(np.concatenate(parts, axis=1), rows)


def test_what_does_not_go_together_is_refused():
    layout = chunk_layout(whole_layout(dim=4), PruneSettings(ratio=0.5, chunks=2))
    good = ScheduleSettings(
        topology=Topology(2, tables_per_row=2), sizes=layout.sizes(), prices=(1, 1), cache=CacheSettings(100)
    )
    check_schedule(good, layout)
    hot = HotRows(np.array([0]), np.array([1]))
    for change, message in (
        ({"sync": "bounded:2"}, "bounded"),
        ({"hot": hot}, "hot_rows"),
        ({"policies": (RowPolicy(2),) * 4}, "policies"),
        ({"topology": Topology(2)}, "tables_per_row"),
    ):
        settings_ = ScheduleSettings(**{**vars(good), **change})
        with pytest.raises(ConfigError, match=message):
            check_schedule(settings_, layout)
    mixed = TableLayout(
        (TableSpec("a", 4, 0, 1), TableSpec("b", 8, 0, 1)), row_optimizer("sgd", lr=0.1), "float32", 0
    )
    with pytest.raises(ConfigError, match="rows of 4, 8 values"):
        chunk_layout(mixed, PruneSettings(ratio=0.5, chunks=2))
