"""Pieces of a step on threads: results in order, few threads, errors after all is done."""

import threading
import time

import pytest
import torch

from rowhaul.nn.threads import run_all


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_results_are_in_order_and_threads_are_few(num_threads, count):
    used = set()

    def task(number):
        used.add(threading.get_ident())
        return number

    tasks = [lambda number=number: task(number) for number in range(count)]
    assert run_all(tasks, True) == list(range(count))
    assert len(used) <= num_threads


def test_an_error_waits_for_the_others(num_threads):
    done = []

    def fail():
        raise ValueError("no")

    def work():
        time.sleep(0.01)
        done.append(True)

    with pytest.raises(ValueError, match="no"):
        run_all([fail, work], True)
    assert len(done) == (num_threads > 1)
