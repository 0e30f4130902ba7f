"""Waits with a time limit: for a call that may hang in the network, or for a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from rowhaul._activity import Activity, doing

Result = TypeVar("Result")

FOREVER = 10 * 365 * 86400.0  # seconds: while another rank works; if it dies, its heartbeat says so

_PAUSE = 0.05  # seconds between two checks


def within(
    seconds: float,
    call: Callable[[], Result],
    *,
    check: Callable[[], None] = lambda: None,
    discard: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Make a call in a thread and return its result; raise `TimeoutError` if it takes too long.

    Network calls without a timeout cannot be interrupted: such a thread is abandoned.

    Args:
        seconds: time limit.
        call: the function to call.
        check: called repeatedly; an error that it raises ends the wait.
        discard: cleans up a result that arrives too late.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                discard(result)

    threading.Thread(target=run, name="rowhaul-call", daemon=True).start()
    deadline = time.monotonic() + seconds
    try:
        with doing(Activity.WAITING):
            while not wait([future], _PAUSE).done:
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
        return future.result()
    except BaseException:
        if not future.cancel() and future.exception() is None:  # finished while this thread gave up
            discard(future.result())
        raise


def until(condition: Callable[[], bool], seconds: float, check: Callable[[], None] = lambda: None) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + seconds
    with doing(Activity.WAITING):
        while not condition():
            check()
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
    return True


def ranks_text(ranks: Sequence[int], roles: Sequence[str] | None = None) -> str:
    """Name ranks in a message: ``rank 3 (worker 3)``, ``ranks 0-2, 5``."""
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
