"""Signals as exceptions, so that ``with`` blocks clean up, and held back while they do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is an exception already


@contextmanager
def ending_raises() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise ``SystemExit``, as SIGINT raises ``KeyboardInterrupt``.

    Only the main thread can choose what signals do; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored (nohup) or that somebody else handles stays as it is.
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP wait; they act when the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, *ENDING)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python
        if arrived:
            signal.raise_signal(arrived[0])


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
