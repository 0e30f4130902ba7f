"""What this process is doing now, in a page of memory that another process can read.

The process that beats for a rank must know how far the rank has come even while a thread holds the GIL, so it
reads shared memory. Each thread that does something worth a name holds a slot of the page meanwhile. Standard
library only: the process that reads the page does without PyTorch.

Example:
    >>> with doing(Activity.READING):
    ...     batch = next(stream)
    >>> progressed(iteration=12)
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


class Activity(enum.IntEnum):
    """What a thread is doing; those from `WAITING` on wait for other ranks."""

    NOTHING = 0
    OPENING = enum.auto()
    READING = enum.auto()
    PLANNING = enum.auto()
    COMPUTING = enum.auto()
    MOVING = enum.auto()
    EVALUATING = enum.auto()
    SAVING = enum.auto()
    LOADING = enum.auto()
    WAITING = 64
    AWAITING_PLAN = enum.auto()
    AWAITING_ROWS = enum.auto()
    SUMMING = enum.auto()
    AWAITING_DATA = enum.auto()

    @property
    def waits(self) -> bool:
        """Whether this is waiting for other ranks."""
        return self >= Activity.WAITING

    @property
    def text(self) -> str:
        """As it reads after ``rank 3 (10.0.0.7),``."""
        return _TEXTS[self]


_TEXTS = {
    Activity.NOTHING: "busy with something else",
    Activity.OPENING: "opening the data",
    Activity.READING: "reading data",
    Activity.PLANNING: "planning",
    Activity.COMPUTING: "computing",
    Activity.MOVING: "moving rows",
    Activity.EVALUATING: "evaluating",
    Activity.SAVING: "saving a checkpoint",
    Activity.LOADING: "loading a checkpoint",
    Activity.WAITING: "waiting for other ranks",
    Activity.AWAITING_PLAN: "waiting for a plan",
    Activity.AWAITING_ROWS: "waiting for rows",
    Activity.SUMMING: "summing dense gradients",
    Activity.AWAITING_DATA: "waiting for data from rank 0",
}

_PROGRESS = struct.Struct("<qq")  # the iteration, and a number that changes with all progress
_SLOT = struct.Struct("<qd")  # an activity, and when it began by CLOCK_MONOTONIC, which all processes share
_NUM_SLOTS = 64
PAGE_BYTES = _PROGRESS.size + _NUM_SLOTS * _SLOT.size


@dataclass(frozen=True)
class Doing:
    """What one thread is doing, for how many seconds."""

    activity: Activity
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """A page at one moment; the longest activity first."""

    iteration: int
    ticks: int
    doing: tuple[Doing, ...]


class Page:
    """A page, shared with another process through its file descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, PAGE_BYTES)
        self._ticks = itertools.count(1)
        self._iteration = 0

    def progressed(self, iteration: int | None = None) -> None:
        """Note progress of any kind, and the iteration if it has changed."""
        if iteration is not None:
            self._iteration = iteration
        _PROGRESS.pack_into(self._memory, 0, self._iteration, next(self._ticks))

    def get(self, slot: int) -> tuple[int, float]:
        """Return the activity in a slot, and when it began."""
        return _SLOT.unpack_from(self._memory, _PROGRESS.size + slot * _SLOT.size)

    def set(self, slot: int, activity: int, since: float) -> None:
        """Write the activity of a slot."""
        _SLOT.pack_into(self._memory, _PROGRESS.size + slot * _SLOT.size, activity, since)

    def read(self) -> Snapshot:
        """Return what the page says now."""
        iteration, ticks = _PROGRESS.unpack_from(self._memory, 0)
        now = time.monotonic()
        slots = [self.get(slot) for slot in range(_NUM_SLOTS)]
        doing = [Doing(Activity(code), max(0.0, now - since)) for code, since in slots if code]
        return Snapshot(iteration, ticks, tuple(sorted(doing, key=lambda one: -one.seconds)))


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rowhaul-activity")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor


page = Page()  # of this process
_free = list(range(_NUM_SLOTS))
_of_thread = threading.local()

Watcher = Callable[[Activity, Activity, float, float], None]
"""Called with an activity that has ended, the one around it, and when it began and ended."""
_watcher: Watcher | None = None


def progressed(iteration: int | None = None) -> None:
    """Note that this process has made progress: an iteration, a block written, a batch evaluated."""
    page.progressed(iteration)


def watch(watcher: Watcher | None) -> None:
    """Call a function, in the thread concerned, at the end of every activity; None: no longer."""
    global _watcher
    _watcher = watcher


class doing:  # noqa: N801  # reads as a statement
    """Context in which this thread is doing something; the innermost one counts."""

    __slots__ = ("_activity", "_before", "_began", "_slot")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        slot: int | None = getattr(_of_thread, "slot", None)
        if slot is None:
            slot = _of_thread.slot = _free.pop() if _free else -1
        self._slot, self._began = slot, time.monotonic()
        self._before = (int(Activity.NOTHING), 0.0) if slot < 0 else page.get(slot)
        if slot >= 0:
            page.set(slot, self._activity, self._began)

    def __exit__(self, *error: object) -> None:
        if self._slot >= 0:
            page.set(self._slot, *self._before)
        if _watcher is not None:
            _watcher(self._activity, Activity(self._before[0]), self._began, time.monotonic())
        if not self._before[0]:
            _of_thread.slot = None
            if self._slot >= 0:
                _free.append(self._slot)


def _start_anew() -> None:
    """In a forked child: leave the parent's page alone."""
    global page
    page = Page()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
