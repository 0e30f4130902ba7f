"""Work that nobody waits for at once: utilities are brought up to date while the next batch is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any


class Background:
    """Tasks done in the order given, in a thread of their own; whoever needs their effect waits."""

    def __init__(self) -> None:
        self._given: list[Future[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy (pickle, deepcopy) is of what is done.
        self.wait()
        return {"_given": []}

    def submit(self, task: Callable[[], object]) -> None:
        """Do a task soon."""
        self._given.append(_thread().submit(task))

    def wait(self) -> None:
        """Come back when everything is done; an error of a task is raised here."""
        given, self._given = self._given, []
        for one in given:
            one.result()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rowhaul-utilities")


# A forked process inherits the pool but not its thread.
os.register_at_fork(after_in_child=_thread.cache_clear)
