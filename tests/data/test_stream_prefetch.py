"""The thread behind a stream: bounded, honest about errors, and never left behind."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rowhaul.data import prefetch as prefetching
from rowhaul.data.prefetch import prefetch

_older: set[threading.Thread] = set()  # that other tests of this process have left to end by themselves


@pytest.fixture(autouse=True)
def _remember_older_threads() -> None:
    _older.clear()
    _older.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    """The prefetching threads of this test."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "rowhaul-prefetch" and thread not in _older
    ]


def test_everything_comes_in_order_and_the_thread_ends() -> None:
    assert list(prefetch(range(100), 3)) == list(range(100))
    assert threads() == []


def test_it_runs_ahead_by_no_more_than_its_depth() -> None:
    made: list[int] = []
    blocked = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 4:  # one taken, three waiting, one in hand
                blocked.set()
            yield number

    ahead = prefetch(source(), 3)
    assert next(ahead) == 0
    assert blocked.wait(10)
    assert made == [0, 1, 2, 3, 4]
    ahead.close()
    assert made == [0, 1, 2, 3, 4]


def test_an_error_comes_after_what_was_made_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    ahead = prefetch(source(), 3)
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="broken"):
        next(ahead)
    assert threads() == []


def test_stopping_early_closes_the_source_and_ends_the_thread() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    for _ in prefetch(source(), 2):
        break
    gc.collect()
    assert threads() == []
    assert closed.is_set()


def test_a_consumer_that_fails_leaves_no_thread() -> None:
    def consume() -> None:
        for _ in prefetch(iter(int, 1), 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    gc.collect()
    assert threads() == []


def test_a_consumer_in_a_cycle_is_collected_with_its_thread() -> None:
    def consume() -> None:
        holder: list[object] = []
        ahead = prefetch(iter(int, 1), 2)
        holder.extend([ahead, holder])
        next(ahead)

    consume()
    gc.collect()
    assert threads() == []


def test_a_program_that_forgets_the_stream_still_exits() -> None:
    program = """
import threading
from rowhaul.data import prefetch as prefetching
from rowhaul.data.prefetch import prefetch

full = threading.Event()

def source():
    for number in range(1000):
        if number == 3:
            full.set()
        yield number

ahead = prefetch(source(), 2)
next(ahead)
full.wait()
print(threading.active_count(), "threads at the end")
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=200, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 threads at the end\n"  # the producer still waits to put an item


def test_a_source_that_is_stuck_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_PATIENCE_SECONDS", 0.1)
    stuck, goes_on = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 1
        stuck.set()
        assert goes_on.wait(60)
        yield 2

    ahead = prefetch(source(), 3)
    assert next(ahead) == 1
    assert stuck.wait(10)
    ahead.close()
    (left,) = threads()
    goes_on.set()  # and ends once it can
    left.join(10)
    assert not left.is_alive()
