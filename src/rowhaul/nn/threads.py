"""Independent pieces of one step, side by side on threads: compiled kernels hold no GIL.

Pieces never share a table, so results do not depend on how many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_all(tasks: Sequence[Callable[[], Result]], in_parallel: bool) -> list[Result]:
    """Results of all tasks, on as many threads as PyTorch has; some run in the caller's."""
    num_threads = min(len(tasks), torch.get_num_threads()) if in_parallel else 1
    if num_threads <= 1:
        return [task() for task in tasks]
    parts = [partial(_run_each, tasks[number::num_threads]) for number in range(num_threads)]
    others = [_pool(num_threads - 1).submit(part) for part in parts[1:]]
    try:
        first = parts[0]()
    finally:  # even if it failed: no task may still write when the caller continues
        finished = [other.exception() for other in others]
    for error in finished:
        if error is not None:
            raise error
    found = [first, *(other.result() for other in others)]
    return [found[number % num_threads][number // num_threads] for number in range(len(tasks))]


def _run_each(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    return [task() for task in tasks]


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="rowhaul")


# A forked process inherits the pool but none of its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
