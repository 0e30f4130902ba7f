"""Writes one checkpoint at a time in a thread that gives way to training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rowhaul._cores import usable_cores

NICE = 10  # under which Linux gives a thread about a tenth of a core that another one wants
_SHARE_OF_ALL_CORES = 0.04  # that all threads of a host that write may take together
_LEAST_SHARE, _LARGEST_SHARE = 0.04, 0.8  # of one core, for one of them
_SHORTEST_WAIT = 0.001  # seconds; shorter ones add up


class SaveCancelledError(Exception):
    """The run ended before its checkpoint was written."""


class Pacer:
    """Bounds a thread's share of a core; call it between small pieces of work.

    Args:
        num_processes: how many share the cores.
    """

    def __init__(self, num_processes: int = 1) -> None:
        share = _SHARE_OF_ALL_CORES * usable_cores() / num_processes
        self._share = min(max(share, _LEAST_SHARE), _LARGEST_SHARE)
        self._hurries, self._ended = threading.Event(), False
        self._is_urgent: Callable[[], bool] = lambda: False
        self._check: Callable[[], None] = lambda: None
        self._clocks: tuple[float, float] | None = None

    def __call__(self) -> None:
        """Wait until this thread has used no more than its share since the last call."""
        if self._ended:
            raise SaveCancelledError
        self._check()
        used, now = time.thread_time(), time.monotonic()
        if self._clocks is not None and not self._hurries.is_set() and not self._is_urgent():
            wait = (used - self._clocks[0]) / self._share - (now - self._clocks[1])
            if wait < _SHORTEST_WAIT:
                return  # it counts the next time
            self._hurries.wait(wait)
            if self._ended:
                raise SaveCancelledError
        self._clocks = time.thread_time(), time.monotonic()

    def hurry(self) -> None:
        """Wait no more: somebody waits for the thread."""
        self._hurries.set()

    def hurry_when(self, is_urgent: Callable[[], bool]) -> None:
        """Wait no more as long as this says so."""
        self._is_urgent = is_urgent

    def check_with(self, check: Callable[[], None]) -> None:
        """Call this as well, which raises where the work is in vain."""
        self._check = check

    def end(self) -> None:
        """Make the next call raise `SaveCancelledError`."""
        self._ended = True
        self._hurries.set()


class SaveThread:
    """Runs the save that is under way, if any.

    Args:
        num_processes: how many save at once on this host.
        nice: how much the thread gives way to others; 0: not at all.
    """

    def __init__(self, num_processes: int = 1, nice: int = NICE) -> None:
        self._num_processes, self._nice = num_processes, nice
        self._thread: threading.Thread | None = None
        self._pacer = Pacer()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[Pacer], None], done: Callable[[Exception | None], None]) -> None:
        """Write beside training; ``done`` gets the error, or None, in the same thread."""
        assert not self.is_busy
        self._pacer = pacer = Pacer(self._num_processes)

        def run() -> None:
            if self._nice:
                with suppress(AttributeError, OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            try:
                write(pacer)
            except SaveCancelledError:
                return
            except Exception as error:
                done(error)
            else:
                done(None)

        self._thread = threading.Thread(target=run, name="rowhaul-save", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save that is under way."""
        if self._thread is not None:
            self._pacer.hurry()
            self._thread.join()
            self._thread = None

    def close(self, seconds: float = 30.0) -> None:
        """End the save that is under way; nothing of it stays."""
        if self._thread is not None:
            self._pacer.end()
            self._thread.join(seconds)
            self._thread = None
