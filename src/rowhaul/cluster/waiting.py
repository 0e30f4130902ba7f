"""Waiting that ends: for a call that may hang in the network, or for something to become true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Result = TypeVar("Result")

_PAUSE = 0.05  # seconds between two looks


def within(
    seconds: float,
    call: Callable[[], Result],
    *,
    check: Callable[[], None] = lambda: None,
    discard: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Make a call in a thread of its own and return its result; raise `TimeoutError` if it takes too long.

    Calls into the network that take no timeout of their own, or not for all they do, cannot be
    interrupted: such a thread is left behind, and what it yields in the end goes to ``discard``.

    Args:
        seconds: how long to wait.
        call: what to call.
        check: called again and again; what it raises ends the waiting.
        discard: undoes a result that comes too late.
    """
    task = _Task(call, discard)
    threading.Thread(target=task.run, name="rowhaul-call", daemon=True).start()
    try:
        if until(task.done.is_set, seconds, check):
            return task.result()
        raise TimeoutError
    finally:
        task.abandon()


def until(
    condition: Callable[[], bool],
    seconds: float,
    check: Callable[[], None] = lambda: None,
    pause: float = _PAUSE,
) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def ranks_text(ranks: Sequence[int], roles: Sequence[str] | None = None) -> str:
    """Ranks in words: ``rank 3 (worker 3)``, ``ranks 0-2, 5``."""
    if roles is not None and len(ranks) <= 3:
        return ", ".join(f"rank {rank} ({roles[rank]})" for rank in ranks)
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and pieces[-1][-1] == rank - 1:
            pieces[-1].append(rank)
        else:
            pieces.append([rank])
    texts = (f"{piece[0]}-{piece[-1]}" if len(piece) > 1 else str(piece[0]) for piece in pieces)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class _Task(Generic[Result]):
    """A call in a thread; exactly one of its waiter and `discard` gets the result."""

    def __init__(self, call: Callable[[], Result], discard: Callable[[Result], None]) -> None:
        self._call, self._discard = call, discard
        self._lock = threading.Lock()
        self._abandoned = False
        self._values: list[Result] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            value = self._call()
        except BaseException as error:
            self._error = error
            self.done.set()
            return
        with self._lock:
            if not self._abandoned:
                self._values.append(value)
                self.done.set()
                return
        self._discard(value)

    def result(self) -> Result:
        with self._lock:
            self._abandoned = True  # taken
        if self._error is not None:
            raise self._error
        return self._values.pop()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
        while self._values:  # it came while the waiter was giving up
            self._discard(self._values.pop())
