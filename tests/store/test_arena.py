import numpy as np
import pytest

from rowhaul.store.arena import OutOfMemoryError, RecordArena


def test_growing_moves_nothing():
    arena = RecordArena(width=3, dtype=np.float32, chunk_bytes=64)
    first = arena.allocate(7)
    contents = np.arange(21, dtype=np.float32).reshape(7, 3)
    arena.write(first, contents)
    addresses = arena.addresses.copy()
    arena.allocate(1000)
    np.testing.assert_array_equal(arena.addresses[: len(addresses)], addresses)
    np.testing.assert_array_equal(arena.read(first), contents)


def test_released_records_are_used_again_before_new_memory():
    arena = RecordArena(width=2, dtype=np.float64)
    records = arena.allocate(10)
    arena.release(records[[3, 7]])
    assert arena.num_records == 8
    assert arena.allocate(3).tolist() == [7, 3, 10]
    assert arena.num_records == 11


def test_records_of_any_width_round_trip():
    for width in (1, 2, 17, 1000, 3_000_000):  # the last is larger than a chunk
        arena = RecordArena(width=width, dtype=np.float32)
        records = arena.allocate(3)
        contents = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
        arena.write(records[::-1].copy(), contents)
        np.testing.assert_array_equal(arena.read(records), contents[::-1])


def test_memory_that_cannot_be_had_changes_nothing():
    arena = RecordArena(width=1 << 40, dtype=np.float64)
    with pytest.raises(OutOfMemoryError, match="no memory for 1,000 rows"):
        arena.allocate(1000)
    assert arena.num_records == 0
    assert arena.allocated_bytes == 0
