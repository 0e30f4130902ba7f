"""The threads of a rank, and what happens to all of them when something goes wrong in one.

Every process group is used by one thread only, its *lane*, so that all ranks issue the group's
operations in the same order. The main thread never sits in a network call itself: it waits for
lanes in small steps, and whatever fails first, in any lane or in the heartbeat, is what it raises.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

_PATIENCE = 0.2  # seconds between two looks at whether something has failed


class Failure:
    """The first error of a rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._explain: Callable[[BaseException], BaseException] = lambda error: error

    @property
    def error(self) -> BaseException | None:
        """What failed first, if anything did."""
        return self._error

    def explain_with(self, explain: Callable[[BaseException], BaseException]) -> None:
        """Let a better error be raised instead: one that names the rank that was lost, for example."""
        self._explain = explain

    def set(self, error: BaseException) -> None:
        """Note an error, unless there is one already."""
        with self._lock:
            if self._error is None:
                self._error = error

    def check(self) -> None:
        """Raise the error if there is one."""
        if self._error is not None:
            explained = self._explain(self._error)
            raise explained from (self._error if explained is not self._error else None)


class Future(Generic[Result]):
    """A value that a lane will have; waiting for it ends when anything on the rank fails."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._done = threading.Event()
        self._value: Result | None = None

    def set(self, value: Result) -> None:
        """Give the value."""
        self._value = value
        self._done.set()

    @property
    def is_set(self) -> bool:
        """Whether the value is there."""
        return self._done.is_set()

    def wait(self) -> Result:
        """The value, once it is there."""
        while not self._done.wait(_PATIENCE):
            self._failure.check()
        return self._value  # type: ignore[return-value]  # set before the event was


class Lane:
    """One thread that makes calls in the order they were submitted.

    Example:
        >>> lane = Lane("moves", failure)
        >>> lane.submit(lambda: links.post(...)).wait()
        >>> lane.close()
    """

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure = failure
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"rowhaul-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Make a call after those before it; nothing is made any more once something has failed."""
        future: Future[Result] = Future(self._failure)
        self._calls.put(lambda: future.set(call()))
        return future

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after what was submitted; a call that is stuck in the network is left behind."""
        self._calls.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failure.error is not None:
                continue
            try:
                call()
            except BaseException as error:
                self._failure.set(error)
