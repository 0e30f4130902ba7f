import threading

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


def test_a_chunk_that_cannot_be_had_leaves_records_and_free_numbers(monkeypatch):
    arena = RecordArena(width=4, dtype=np.float32, chunk_bytes=256)
    records = arena.allocate(30)
    arena.release(records[10:20])
    before = arena.allocated_bytes, arena.num_records, arena.addresses.tolist()
    calls, take = 0, RecordArena._cut

    def failing(arena, num_bytes):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise MemoryError
        return take(arena, num_bytes)

    monkeypatch.setattr(RecordArena, "_cut", failing)
    with pytest.raises(OutOfMemoryError, match="20 are held"):
        arena.allocate(500)
    monkeypatch.undo()
    assert (arena.allocated_bytes, arena.num_records, arena.addresses.tolist()) == before
    assert arena.allocate(11).tolist() == [*range(19, 9, -1), 30]


def test_threads_never_get_the_same_record():
    arena = RecordArena(width=1, dtype=np.float32, chunk_bytes=1024)
    held = [[] for _ in range(4)]

    def work(mine, seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            if mine and rng.random() < 0.4:
                arena.release(mine.pop())
            else:
                mine.append(arena.allocate(int(rng.integers(0, 50))))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(held, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    records = np.concatenate([record for mine in held for record in mine])
    assert len(np.unique(records)) == len(records) == arena.num_records
    assert records.max() < len(arena.addresses) << arena.shift
