"""Independent pieces of one step, side by side on threads: compiled kernels hold no GIL.

Pieces never share a table, so results do not depend on how many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")


def run_all(tasks: Sequence[Callable[[], Result]], in_parallel: bool) -> list[Result]:
    """Results of all tasks; the first runs in the caller's thread."""
    if len(tasks) == 1 or not in_parallel:
        return [task() for task in tasks]
    others = [_pool(len(tasks) - 1).submit(task) for task in tasks[1:]]
    try:
        first = tasks[0]()
    finally:  # even if it failed: no task may still write when the caller continues
        finished = [other.exception() for other in others]
    for error in finished:
        if error is not None:
            raise error
    return [first, *(other.result() for other in others)]


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="rowhaul")


# A forked process inherits the pool but none of its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
