"""What one rank makes of a plan, against the obvious way to say the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.data.samples import Samples
from rowhaul.runtime.own_samples import part_of
from rowhaul.runtime.phase_kernels import number_rows, pick_gradients, sort_moves, unnumbered
from rowhaul.runtime.record_kernels import pick_needed, sort_by_role
from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Kind
from rowhaul.schedule.row_states import State

SEEDS = st.integers(0, 2**32 - 1)
EXAMPLES = settings(max_examples=30)


def some_moves(random, count, num_ranks, *, within=False):
    """Columns as `sort_moves` expects them."""
    source = random.integers(0, num_ranks, count).astype(np.int16)
    target = source.copy() if within else ((source + 1) % num_ranks).astype(np.int16)
    return (
        random.integers(0, len(Kind), count).astype(np.uint8),
        random.choice([1, 3, 4, 7], count).astype(np.uint8),
        source,
        target,
        4 * random.integers(1, 9, count),
        random.integers(0, len(Phase), count),
        random.integers(0, 30, count).astype(np.int32),
    )


@EXAMPLES
@given(SEEDS, st.integers(2, 4), st.booleans())
def test_moves_are_sorted_by_phase_and_peer_in_the_order_of_the_plan(seed, num_ranks, sends):
    random = np.random.default_rng(seed)
    rank = int(random.integers(0, num_ranks))
    parts = [some_moves(random, int(random.integers(0, 40)), num_ranks, within=one) for one in (False, True)]
    every = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    kind, payload, source, target, num_bytes, phases, _ = every
    ours, theirs = (source, target) if sends else (target, source)
    peers = [peer for peer in range(num_ranks) if peer != rank] + [rank]
    columns, offsets, counts, begins, ends, kind_bytes, has_gradients = sort_moves(
        *parts, rank, num_ranks, len(Kind), len(Phase), sends
    )
    place = 0
    for phase in range(len(Phase)):
        end = 0
        for peer in peers:
            chosen = np.flatnonzero((ours == rank) & (theirs == peer) & (phases == phase))
            assert counts[phase, peer] == len(chosen)
            assert begins[phase, peer] == end
            for m in chosen:
                assert [column[place] for column in columns] == [every[c][m] for c in (0, 1, 2, 6)]
                assert offsets[place] == end
                end += num_bytes[m]
                place += 1
            assert ends[phase, peer] == end
            expected = np.bincount(kind[chosen], num_bytes[chosen], len(Kind))
            assert kind_bytes[phase, peer].tolist() == expected.tolist()
        assert has_gradients[phase] == (payload[(ours == rank) & (phases == phase)] & 4).any()
    assert place == len(offsets)


@EXAMPLES
@given(SEEDS, st.integers(0, 60), st.booleans())
def test_every_row_has_one_number_and_those_of_the_plan_keep_theirs(seed, num_rows, known):
    random = np.random.default_rng(seed)
    rows = sorted({(int(t), int(k)) for t, k in random.integers(-20, 20, (num_rows, 2))})
    tables = np.array([t for t, _ in rows], np.int32)
    keys = np.array([k for _, k in rows], np.int64)
    table, key = random.integers(-20, 20, 80).astype(np.int32), random.integers(-20, 20, 80)
    named = list(zip(table.tolist(), key.tolist(), strict=True))
    numbers, every_table, every_key = number_rows(tables, keys, len(rows) if known else 0, table, key)
    every = list(zip(every_table.tolist(), every_key.tolist(), strict=True))
    assert every[: len(rows)] == rows
    assert [every[number] for number in numbers] == named
    others = every[len(rows) :]
    assert len(set(others)) == len(others)
    assert set(others) == set(named) - (set(rows) if known else set())


@EXAMPLES
@given(SEEDS)
def test_rows_of_other_ranks_get_no_number(seed):
    random = np.random.default_rng(seed)
    source, target = random.integers(0, 3, (2, 40)).astype(np.int16)
    rows = random.integers(-1, 3, 40).astype(np.int32)
    expected = np.flatnonzero((rows < 0) & ((source == 1) | (target == 1)))
    assert unnumbered(rows, source, target, 1).tolist() == expected.tolist()


@EXAMPLES
@given(SEEDS, st.integers(0, 50))
def test_gradients_of_a_group_are_picked_table_by_table_with_their_places(seed, count):
    random = np.random.default_rng(seed)
    kind, payload, source, *_, row = some_moves(random, count, 3)
    tables, keys = random.integers(0, 4, 30).astype(np.int32), random.integers(-9, 9, 30)
    table, key, offsets = tables[row], keys[row], 10 * np.arange(count)
    group_of, position_of = np.array([0, 1, 0, 0]), np.array([1, 0, 0, 2])
    chosen, done = np.array([True, False, True, True]), random.integers(0, 2, count).astype(np.uint8)
    picked, starts, begins = pick_gradients(
        kind, payload, source, row, offsets, chosen, done, tables, keys, group_of, position_of, 0, 3, 16, 20
    )
    fits = chosen[kind] & (group_of[table] == 0) & (payload & 4 != 0) & (done == 0)
    for worker in range(len(starts)):
        for position in range(3):
            some = np.flatnonzero(fits & (source == worker) & (position_of[table] == position))
            part = slice(*starts[worker, position : position + 2])
            behind = np.where(payload[some] & 1, np.where(payload[some] & 2, 20, 16), 0)
            assert picked[part].tolist() == key[some].tolist()
            assert begins[part].tolist() == (offsets[some] + behind).tolist()
    assert len(picked) == fits.sum()


@EXAMPLES
@given(SEEDS, st.integers(0, 60), st.booleans())
def test_needed_rows_are_picked_table_by_table(seed, num_rows, in_order):
    random = np.random.default_rng(seed)
    tables = np.sort(random.integers(0, 4, num_rows)).astype(np.int32)
    keys, needed = random.permutation(num_rows), random.integers(0, 4, num_rows).astype(np.uint8)
    group_of, position_of = np.array([0, 1, 0, 0]), np.array([0, 0, 1, 2] if in_order else [1, 0, 0, 2])
    places, chosen, starts = pick_needed(tables, keys, needed, 2, group_of, position_of, 0, 3)
    fits = (needed & 2 != 0) & (group_of[tables] == 0)
    expected = [r for position in range(3) for r in np.flatnonzero(fits & (position_of[tables] == position))]
    assert places.tolist() == expected
    assert chosen.tolist() == keys[expected].tolist()
    assert position_of[tables[expected]].tolist() == np.repeat(np.arange(3), np.diff(starts)).tolist()


@EXAMPLES
@given(SEEDS, st.integers(0, 60), st.booleans())
def test_roles_are_slices_of_all_rows_that_a_worker_trains(seed, num_rows, bounded):
    random = np.random.default_rng(seed)
    tables = np.sort(random.integers(0, 4, num_rows)).astype(np.int32)
    keys = random.permutation(num_rows)
    trainers = random.integers(1, 8, num_rows).astype(np.uint64)
    states = random.integers(0, len(State), num_rows).astype(np.uint8)
    group_of, position_of = np.array([0, 1, 0, 0]), np.array([1, 0, 0, 2])
    records = random.permutation(num_rows)
    chosen, positions, locations, roles, order, ordered, starts, copied, here, *_ = sort_by_role(
        tables, keys, trainers, states, records, 1, bounded, group_of, position_of, 0, 3,
        int(State.REPLICATED), int(State.NOT_ADMITTED),
    )  # fmt: skip
    in_group = group_of[tables] == 0
    mine = in_group & (trainers & np.uint64(2) != 0)
    special = (states == State.REPLICATED) | (states == State.NOT_ADMITTED)
    alone = np.full(num_rows, True) if bounded else trainers == 2
    expected = [
        mine & ~special & alone,
        mine & ~special & ~alone,
        mine & (states == State.REPLICATED),
        mine & (states == State.NOT_ADMITTED),
    ]
    for role, rows in enumerate(expected):
        part = slice(roles[role], roles[role + 1])
        assert sorted(chosen[part]) == sorted(keys[rows])
        if role < 3:
            assert (np.diff(positions[part]) >= 0).all()
    row_of = {int(key): row for row, key in enumerate(keys)}
    assert all(position_of[tables[row_of[int(k)]]] == p for k, p in zip(chosen, positions, strict=True))
    assert chosen[order].tolist() == ordered.tolist()
    assert len(ordered) == roles[3]
    assert len(chosen) == roles[4]
    assert locations[: roles[3]].tolist() == [records[row_of[int(key)]] for key in chosen[: roles[3]]]
    assert (locations[roles[3] :] == -1).all()
    assert positions[order].tolist() == np.repeat(np.arange(3), np.diff(starts)).tolist()
    assert sorted(copied) == sorted(records[in_group & (states == State.REPLICATED)])
    assert copied[here].tolist() == locations[roles[2] : roles[3]].tolist()


@EXAMPLES
@given(SEEDS, st.integers(0, 30), st.integers(1, 4))
def test_a_workers_samples_are_those_that_take_gives(seed, num_samples, num_features):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, (num_features, num_samples)).astype(np.int32)
    samples = Samples(
        tuple(map(str, range(num_features))),
        random.integers(0, 99, int(lengths.sum())),
        lengths,
        random.random((num_samples, 2)).astype(np.float32),
        random.random(num_samples).astype(np.float32),
        np.arange(num_samples),
    )
    worker = random.integers(0, 3, num_samples).astype(np.int32)
    expected, found = samples.take(np.flatnonzero(worker == 1)), part_of(samples, worker, 1)
    for name in ("values", "lengths", "dense", "labels", "index"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype
