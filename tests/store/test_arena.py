import resource
import subprocess
import sys
import threading
from pathlib import Path

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

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise MemoryError
        return take(*arguments)

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


def test_a_few_rows_in_many_arenas_take_few_pages():
    """Gradients wait in an arena for each worker and size of rows: a huge page for each would be too much."""
    resident = _resident_bytes()
    arenas = [RecordArena(width=16, dtype=np.float32) for _ in range(100)]
    for arena in arenas:
        records = arena.allocate(20)
        arena.write(records, np.ones((20, 16), np.float32))
    assert _resident_bytes() - resident < 100 * 100_000  # what else the process does is in it, too


def test_memory_of_a_large_arena_goes_back_as_its_chunks_do():
    """Slabs are small beside the arena, so that who copies it chunk by chunk needs little more than one."""
    arena = RecordArena(width=16, dtype=np.float32, chunk_bytes=1 << 18)
    arena.write(arena.allocate(500_000), np.ones((500_000, 16), np.float32))  # 32 MB
    before, half = _resident_bytes(), len(arena._chunks) // 2
    arena._chunks[:half] = [np.empty(0, dtype=np.uint8)] * half
    assert before - _resident_bytes() > 32e6 * (1 / 2 - 1 / 4) - 4e6


def test_memory_that_the_system_refuses_is_told_and_changes_nothing():
    """In a process of its own, whose address space is limited."""
    program = (
        "import resource, numpy as np\n"
        "from rowhaul.store.arena import OutOfMemoryError, RecordArena\n"
        "arena = RecordArena(16, np.float32)\n"
        "arena.write(arena.allocate(10), np.ones((10, 16), np.float32))\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), used + (100 << 20)))\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        arena.allocate(10_000_000)\n"
        "    except OutOfMemoryError as error:\n"
        "        assert '10 are held' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
        "assert arena.allocate(500_000).tolist() == list(range(10, 500_010))\n"
        "assert (arena.read(np.arange(10)) == 1).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
