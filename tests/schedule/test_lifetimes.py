"""Rows come and go as the policies of their tables say: equal to the obvious way, row by row."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_lifetimes import NaiveLifetimes, Row
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.schedule.arrays import Saved
from rowhaul.schedule.lifetimes import Lifetimes, RowPolicy, Status, policies_by_table

KEYS = (0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1, 7, 8)

policies = st.builds(
    RowPolicy,
    admit_after=st.sampled_from([1, 1, 2, 3]),
    ttl=st.sampled_from([None, 1, 2, 3, 7]),
    max_rows=st.sampled_from([None, 1, 2, 4]),
    evict=st.sampled_from(["lru", "lfu"]),
)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[RowPolicy], list[Counter[Row]]]:
    """Policies, and how often each iteration names which rows; some rows much more often than others."""
    some = draw(st.lists(policies, min_size=1, max_size=3))
    shuffle = random.Random(draw(st.integers(0, 1 << 30)))
    iterations = []
    for _ in range(draw(st.integers(1, 30))):
        named = range(shuffle.randrange(12))
        rows = ((shuffle.randrange(len(some)), KEYS[min(int(shuffle.expovariate(0.4)), 7)]) for _ in named)
        iterations.append(Counter(rows))
    return some, iterations


def see(lifetimes: Lifetimes, iteration: int, named: Counter[Row]) -> dict[Row, Status]:
    rows = sorted(named)
    status = lifetimes.see(
        iteration,
        np.array([row[0] for row in rows], np.int32),
        np.array([row[1] for row in rows], np.int64),
        np.array([named[row] for row in rows], np.int32),
    )
    return {row: Status(one) for row, one in zip(rows, status.tolist(), strict=True)}


def forget(lifetimes: Lifetimes, iteration: int) -> tuple[set[Row], set[Row]]:
    gone = lifetimes.forget(iteration)
    rows = list(zip(gone.tables.tolist(), gone.keys.tolist(), strict=True))
    assert len(set(rows)) == len(rows), "a row is forgotten once"
    return set(rows[: gone.num_expired]), set(rows[gone.num_expired :])


def check_iteration(lifetimes: Lifetimes, naive: NaiveLifetimes, iteration: int, named: Counter[Row]) -> None:
    before = {row for row in named if naive.knows(row)}
    admitted = naive.see(iteration, named)
    expected = {
        row: Status.KNOWN if row in before else Status.ADMITTED if row in admitted else Status.WAITING
        for row in named
    }
    plain = {row for row in named if naive.policies[row[0]].keeps_all}
    found = see(lifetimes, iteration, named)
    assert {row: one for row, one in found.items() if row not in plain} == {
        row: one for row, one in expected.items() if row not in plain
    }
    assert all(found[row] == Status.KNOWN for row in plain), "tables without a policy admit everything"
    assert forget(lifetimes, iteration) == naive.forget(iteration)


@settings(max_examples=300)
@given(traces())
def test_rows_are_admitted_and_forgotten_as_dictionaries_say(
    trace: tuple[list[RowPolicy], list[Counter[Row]]],
) -> None:
    lifetimes, naive = Lifetimes(trace[0]), NaiveLifetimes(trace[0])
    for iteration, named in enumerate(trace[1]):
        check_iteration(lifetimes, naive, iteration, named)


@settings(max_examples=150)
@given(traces(), st.integers(0, 30))
def test_what_was_exported_goes_on(trace: tuple[list[RowPolicy], list[Counter[Row]]], cut: int) -> None:
    lifetimes, naive = Lifetimes(trace[0]), NaiveLifetimes(trace[0])
    for iteration, named in enumerate(trace[1]):
        if iteration == cut:
            saved = lifetimes.export()
            lifetimes = Lifetimes(trace[0])
            lifetimes.restore(Saved(saved))
            again = lifetimes.export()
            assert saved.keys() == again.keys()
            assert all(np.array_equal(saved[name], again[name]) for name in saved)
        check_iteration(lifetimes, naive, iteration, named)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_long_traces_of_many_rows(evict: str) -> None:
    """Entries, heaps and lists grow, are given back and used again; the order of ties holds throughout."""
    some = [RowPolicy(ttl=40, max_rows=900, evict=evict), RowPolicy(2, max_rows=700, evict=evict)]
    lifetimes, naive = Lifetimes(some), NaiveLifetimes(some)
    rng = np.random.default_rng(0)
    largest = 0
    for iteration in range(120):
        keys = (rng.zipf(1.2, 400) % 5000).tolist()
        named = Counter(zip(rng.integers(0, 2, 400).tolist(), keys, strict=True))
        check_iteration(lifetimes, naive, iteration, named)
        largest = max(largest, len(naive.lives))
        assert sum(life.admitted for row, life in naive.lives.items() if row[0] == 0) <= 900
    assert largest > 2048  # more than the first entries and places
    assert lifetimes.memory_bytes < 150 * 8192  # entries, places and nodes, each up to half unused


def test_rows_that_are_known_from_elsewhere_count_as_named_once_then() -> None:
    lifetimes = Lifetimes([RowPolicy(3, ttl=5), RowPolicy(3)])
    see(lifetimes, 0, Counter({(0, 1): 2, (1, 1): 2, (0, 2): 1}))
    lifetimes.forget(0)
    lifetimes.know(2, np.array([0, 0, 1, 1], np.int32), np.array([7, 1, 7, 1]))
    named = Counter({(0, 1): 1, (0, 7): 1, (1, 1): 1, (1, 7): 1, (0, 2): 1})
    found = see(lifetimes, 3, named)
    assert found.pop((0, 2)) == Status.WAITING
    assert set(found.values()) == {Status.KNOWN}
    lifetimes.know(3, np.array([0], np.int32), np.array([9]))
    see(lifetimes, 7, Counter({(0, 1): 1}))
    assert forget(lifetimes, 7) == (set(), set())
    assert forget(lifetimes, 8) == ({(0, 7), (0, 9)}, set())


def test_dropped_rows_are_left_alone() -> None:
    lifetimes = Lifetimes([RowPolicy(ttl=1), RowPolicy(max_rows=1, evict="lfu")])
    see(lifetimes, 0, Counter({(0, 1): 1, (0, 2): 1, (1, 1): 1}))
    lifetimes.drop(np.array([0, 1, 1], np.int32), np.array([1, 1, 5]))
    assert forget(lifetimes, 3) == ({(0, 2)}, set())
    see(lifetimes, 4, Counter({(1, 3): 1, (1, 4): 2}))
    assert forget(lifetimes, 4) == (set(), {(1, 3)})


def test_rows_that_are_dropped_and_known_again_at_once_are_forgotten_once() -> None:
    lifetimes = Lifetimes([RowPolicy(max_rows=2, evict="lfu")])
    see(lifetimes, 0, Counter([(0, 1), (0, 2)]))
    assert forget(lifetimes, 0) == (set(), set())
    row = np.zeros(1, np.int32), np.array([1])
    lifetimes.drop(*row)
    lifetimes.know(0, *row)
    see(lifetimes, 1, Counter({(0, key): 2 for key in (3, 4, 5)}))
    assert forget(lifetimes, 1) == (set(), {(0, 1), (0, 2), (0, 3)})


def test_policies_may_change_between_two_runs() -> None:
    """What is known is kept as far as the new policies have a place for it."""
    before = Lifetimes([RowPolicy(2, ttl=9), RowPolicy(3), RowPolicy(ttl=5)])
    see(before, 0, Counter({(0, 1): 2, (0, 2): 1, (1, 1): 3, (1, 2): 1, (2, 1): 1}))
    after = Lifetimes([RowPolicy(2), RowPolicy(3, ttl=4), RowPolicy()])
    after.restore(Saved(before.export()))
    found = see(after, 1, Counter({(0, 1): 1, (0, 2): 1, (2, 1): 1}))
    assert found == {(0, 1): Status.KNOWN, (0, 2): Status.ADMITTED, (2, 1): Status.KNOWN}


def test_damaged_states_are_refused() -> None:
    lifetimes = Lifetimes([RowPolicy(ttl=3)])
    see(lifetimes, 0, Counter({(0, 1): 1}))
    saved = lifetimes.export()
    for damaged in ({**saved, "tables": np.array([1], np.int32)}, {**saved, "last": np.zeros(2, np.int32)}):
        with pytest.raises(CheckpointError, match="damaged"):
            Lifetimes([RowPolicy(ttl=3)]).restore(Saved(damaged))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"usr": {"ttl": 1}}, "tables.usr: there is no such table; did you mean user?"),
        ({"zzz": {}}, "the tables are user, item"),
        ({"user": {"ttl": 0}}, "tables.user: ttl must be a whole number of iterations from 1"),
        ({"default": {"max_rows": -1}}, "tables.default: max_rows must be a whole number of rows from 1"),
        ({"user": {"admit_after": 0}}, "admit_after must be a whole number of sightings from 1"),
        ({"user": {"admit_after": None}}, "admit_after must be"),
        ({"user": {"ttl": 1.5}}, "got 1.5"),
        ({"user": {"max_rows": True}}, "got True"),
        ({"user": {"evict": "fifo"}}, "tables.user: evict must be lru or lfu; got 'fifo'"),
        ({"user": {"tll": 3}}, "unknown setting tables.user.tll; did you mean ttl?"),
        ({"user": 3}, "tables.user: expected settings by name, got 3"),
    ],
)
def test_wrong_policies_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policies_by_table(given, ["user", "item"])
    assert told in str(caught.value)


def test_a_table_s_own_settings_go_before_the_default() -> None:
    given = {"default": {"admit_after": 2, "ttl": 9}, "user": {"ttl": None, "max_rows": 5, "evict": "lfu"}}
    assert policies_by_table(given, ["user", "item"]) == (
        RowPolicy(2, None, 5, "lfu"),
        RowPolicy(2, 9),
    )
