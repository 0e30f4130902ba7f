"""Positions in memory: nobody can compute them beforehand, and no keys crowd together."""

import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from rowhaul._distinct import num_seats, number_keys
from rowhaul._scramble import draw_secret, placed, placed_row, scrambled, unscrambled
from rowhaul.schedule.directory.distinct import distinct_rows
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.store.index import KeyIndex
from rowhaul.store.shards import LINE_SLOTS, unmix

COUNT = 1 << 14
NUMBERS = np.arange(COUNT, dtype=np.uint64)
GOLDEN = 0x9E3779B97F4A7C15
UNDO_GOLDEN = np.uint64(pow(GOLDEN, -1, 1 << 64))


def grid(low, high):
    """Two numbers of seven bits, anywhere in a word."""
    return ((NUMBERS & np.uint64(127)) << np.uint64(low)) | ((NUMBERS >> np.uint64(7)) << np.uint64(high))


# What strangers might send: what ids look like anyway, what collides under the mixers of other hash tables.
MADE_UP = {
    "a sequence": NUMBERS,
    **{f"multiples of 2**{bits}": NUMBERS << np.uint64(bits) for bits in (8, 16, 24, 32, 40, 48, 50)},
    "a grid": grid(0, 32),
    "a grid of low and high bits": grid(0, 57),
    "a grid of middle and high bits": grid(25, 50),
    "both halves alike": NUMBERS | (NUMBERS << np.uint64(32)),
    "one seat after a golden multiplication": (NUMBERS | (NUMBERS << np.uint64(32))) * UNDO_GOLDEN,
    "one line after splitmix64": unmix(NUMBERS),
    "one place after splitmix64": unmix(NUMBERS << np.uint64(40)),
}


def over_arrays(function):
    """Apply a function for kernels to each word of an array."""

    @njit
    def apply(words):
        out = np.empty(len(words), np.uint64)
        for i in range(len(words)):
            out[i] = function(words[i])
        return out

    return apply


HASHES = {"scrambled": over_arrays(scrambled), "placed": over_arrays(placed)}


def test_scrambling_is_undone():
    words = np.random.default_rng(0).integers(0, 2**64, 10_000, dtype=np.uint64)
    words[:4] = 0, 1, 2**63, 2**64 - 1
    np.testing.assert_array_equal(over_arrays(unscrambled)(HASHES["scrambled"](words)), words)


def mean_distance(hashes):
    """How far entries are from their places in a table that is half full, placed by their highest bits."""
    places = np.sort((hashes >> np.uint64(64 - 15)).astype(np.int64))
    found = np.maximum.accumulate(places - np.arange(COUNT)) + np.arange(COUNT)
    return float((found - places).mean())


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize("kind", HASHES)
def test_made_up_words_scatter_like_random_ones(name, kind):
    """Random ones are half a place away; under any secret."""
    before = draw_secret()
    try:
        for _ in range(20):
            draw_secret()
            assert 0.4 < mean_distance(HASHES[kind](MADE_UP[name])) < 0.65
    finally:
        draw_secret(before)


def longest_run(taken):
    """Entries side by side: as many may be looked at for one."""
    ends = np.flatnonzero(np.diff(np.concatenate([[0], taken.astype(np.int8), [0]])))
    return int((ends[1::2] - ends[::2]).max())


@pytest.mark.parametrize("name", MADE_UP)
def test_made_up_keys_do_not_crowd_the_seats_of_a_batch(name):
    keys, size = MADE_UP[name].view(np.int64), num_seats(COUNT)
    seats, known = np.zeros(size, np.uint32), np.empty(COUNT + 1, np.int64)
    numbers = np.empty(COUNT, np.int32)
    assert number_keys(keys, 0, COUNT, seats, size, known, 0, numbers) == COUNT
    np.testing.assert_array_equal(numbers, np.arange(COUNT))
    assert longest_run(seats != 0) < 150
    _, rows, _, found, _ = distinct_rows(np.array([0, COUNT]), np.zeros(COUNT, np.int32), keys)
    np.testing.assert_array_equal(found, np.sort(keys))
    np.testing.assert_array_equal(found[rows], keys)


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize("table", [0, 7])
def test_made_up_rows_do_not_crowd_a_row_index(name, table):
    keys = (MADE_UP[name] - np.uint64((table + 1) * GOLDEN % 2**64)).view(np.int64)
    index = RowIndex()
    index.reserve(COUNT)
    tables = np.full(COUNT, table, np.int32)
    index.add(tables, keys, np.arange(COUNT))
    assert longest_run(index.places[:, 1] != 0) < 150
    np.testing.assert_array_equal(index.find(tables, keys), np.arange(COUNT))


def test_rows_of_several_tables_do_not_meet():
    """The same keys of many tables, or keys that differ by what tables differ by."""
    index, each_table = RowIndex(), np.arange(COUNT, dtype=np.int32) % 64
    index.reserve(2 * COUNT)
    for step in (0, GOLDEN):
        keys = ((NUMBERS >> np.uint64(6)) - each_table.astype(np.uint64) * np.uint64(step)).view(np.int64)
        index.add(each_table, keys, np.arange(COUNT))
    assert longest_run(index.places[:, 1] != 0) < 150


@pytest.mark.parametrize("name", MADE_UP)
def test_made_up_keys_stay_close_to_their_lines_in_the_index(name):
    """A lookup reads the lines from a key's own to where it is; an insert moves entries about as far."""
    keys = MADE_UP[name].view(np.int64)
    index = KeyIndex(1)
    index.find_or_insert(keys, np.array([0, COUNT]), lambda absent: absent, lambda records: None)
    slots = index._memory._shards[0].reshape(-1, 2)
    num_lines = np.uint64(index._memory.rows[0, 2])
    taken = np.flatnonzero(slots[:, 1] != -1)
    words = slots[taken, 0].view(np.uint64)
    lines = (((words >> np.uint64(32)) * num_lines) >> np.uint64(32)).astype(np.int64)
    lines_read = taken // LINE_SLOTS - lines + 1
    assert lines_read.mean() < 2
    assert lines_read.max() < 20
    assert longest_run(slots[:, 1] != -1) < 300


PROGRAM = """
import numpy as np
from rowhaul.schedule.directory.row_index import RowIndex
index, keys = RowIndex(), np.arange(200)
index.add(np.zeros(200, np.int32), keys, keys)
print(*np.flatnonzero(index.places[:, 1]))
"""


@pytest.mark.slow
def test_every_process_has_its_own_secret_although_kernels_are_cached():
    found = {
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(found) == 3


def test_tables_are_told_apart():
    pairs = njit(lambda: (placed_row(0, 5), placed_row(1, 5)))()
    assert pairs[0] != pairs[1]
