"""Executors call in order, and a failure anywhere on a rank ends every wait."""

import threading

import pytest

from rowhaul._threads import Failure, Future, SerialExecutor


def test_calls_are_made_in_submission_order_by_one_thread():
    executor, calls = SerialExecutor("test", Failure()), []
    futures = [
        executor.submit(lambda number=number: calls.append((number, threading.get_ident())) or number)
        for number in range(50)
    ]
    assert [future.wait() for future in futures] == list(range(50))
    executor.close()
    assert [number for number, _ in calls] == list(range(50))
    assert len({thread for _, thread in calls}) == 1


def test_after_a_failure_nothing_runs_and_every_wait_raises_it():
    failure, called = Failure(), []
    executor, other = SerialExecutor("test", failure), SerialExecutor("other", failure)
    begun, go_on = threading.Event(), threading.Event()
    stuck = other.submit(lambda: begun.set() or go_on.wait(200))
    begun.wait(200)
    failing = executor.submit(lambda: 1 // 0)
    later = executor.submit(lambda: called.append(1))
    for future in (failing, later, stuck, Future(failure)):
        with pytest.raises(ZeroDivisionError):
            future.wait()
    go_on.set()
    executor.close()
    other.close()
    assert not called


def test_an_error_is_explained_when_it_is_raised():
    failure = Failure()
    failure.explain_with(lambda error: ValueError(f"rank 3 is lost ({error})"))
    failure.set(ConnectionError("reset"))
    failure.set(KeyError("a later one"))
    with pytest.raises(ValueError, match=r"rank 3 is lost \(reset\)") as caught:
        failure.check()
    assert isinstance(caught.value.__cause__, ConnectionError)
