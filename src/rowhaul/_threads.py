"""The threads of a rank, and how a failure in one ends them all.

Every process group is used by one thread only, a `SerialExecutor`, so that all ranks issue the group's
operations in the same order. The main thread never blocks in a network call: it polls futures, and raises
the first error of any executor or of the heartbeat.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rowhaul._activity import Activity, doing
from rowhaul.errors import ClusterError

Result = TypeVar("Result")

POLL_SECONDS = 0.2  # between two checks for a failure while waiting
_AFTER_FAILURE = 0.3  # seconds for a thread to end once its rank has failed


class Failure:
    """The first error of a rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._explain: Callable[[BaseException], BaseException] = lambda error: error

    @property
    def error(self) -> BaseException | None:
        """The first error, if any."""
        return self._error

    def explain_with(self, explain: Callable[[BaseException], BaseException]) -> None:
        """Set a function that replaces an error by a better one, such as one that names the lost rank."""
        self._explain = explain

    def set(self, error: BaseException) -> None:
        """Record an error unless one is recorded already."""
        with self._lock:
            if self._error is None:
                self._error = error

    def check(self) -> None:
        """Raise the error if there is one."""
        if self._error is not None:
            explained = self._explain(self._error)
            raise explained from (self._error if explained is not self._error else None)


class Future(concurrent.futures.Future[Result]):
    """A future whose `wait` also ends when anything on the rank fails."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self._failure = failure

    def wait(self) -> Result:
        """Return the result once it is set; raise the rank's error if it fails first."""
        if not self.done():
            with doing(Activity.WAITING):
                while not self.done():
                    self._failure.check()
                    with contextlib.suppress(TimeoutError):
                        self.exception(POLL_SECONDS)
        return self.result()


def in_thread(call: Callable[[], Result], failure: Failure) -> Result:
    """Make a call in a thread of its own, which is abandoned if the rank fails meanwhile."""
    executor = SerialExecutor("call", failure)
    try:
        return executor.submit(call).wait()
    finally:
        executor.close(0.0)


class RankQueue(Generic[Result]):
    """A queue between threads of a rank; `get` also ends when the rank fails or the queue is closed.

    Args:
        failure: of this rank.
        closed: the message of the `ClusterError` that `get` raises on a closed, empty queue.
    """

    def __init__(self, failure: Failure, closed: str) -> None:
        self._failure, self._message = failure, closed
        self._items: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._closed = False

    def put(self, item: Result) -> None:
        """Append an item."""
        self._items.put(item)

    def get(self) -> Result:
        """Wait for the next item and remove it."""
        with doing(Activity.WAITING):
            while True:
                try:
                    return self._items.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    self._failure.check()
                    if self._closed:
                        raise ClusterError(self._message) from None

    def close(self) -> None:
        """End all waits."""
        self._closed = True


class SerialExecutor:
    """One thread that makes calls in submission order; after a failure of the rank it makes no more.

    Not a ``ThreadPoolExecutor``: the interpreter joins its threads at exit, and one that is stuck in the
    network would keep the process alive.

    Example:
        >>> executor = SerialExecutor("moves", failure)
        >>> executor.submit(lambda: links.post(...)).wait()
        >>> executor.close()
    """

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure = failure
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"rowhaul-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call. Its error becomes the rank's failure."""
        future: Future[Result] = Future(self._failure)
        self._calls.put(lambda: future.set_result(call()))
        return future

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after the queued calls; abandon it if a call is stuck in the network.

        That is likely once the rank has failed, and the others wait for its word: abandon it soon then.
        """
        self._calls.put(None)
        self._thread.join(timeout if self._failure.error is None else _AFTER_FAILURE)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failure.error is not None:
                continue
            try:
                call()
            except BaseException as error:
                self._failure.set(error)
