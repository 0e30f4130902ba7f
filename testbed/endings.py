"""Ends processes by their ids: terminates them, then kills those that remain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from testbed.errors import TestbedError
from testbed.names import NAMESPACES

SECONDS_TO_END = 3.0  # between asking and forcing, and between forcing and giving up


def end(alive: Callable[[], Sequence[int]]) -> None:
    """End processes until ``alive`` names none; it is called repeatedly, since processes start others."""
    asked: set[int] = set()
    asked_until = time.monotonic() + SECONDS_TO_END
    while pids := alive():
        now = time.monotonic()
        if now > asked_until + SECONDS_TO_END:
            raise TestbedError(f"processes {list(pids)} do not end, not even killed; look at them with `ps`")
        for pid in pids:
            if now > asked_until:
                _signal(pid, signal.SIGKILL)
            elif pid not in asked:  # once: a program may take a second request for impatience
                asked.add(pid)
                _signal(pid, signal.SIGTERM)
        time.sleep(0.01)


def processes_in(namespaces: Sequence[str]) -> list[int]:
    """Processes whose network is one of these namespaces."""
    networks = {_identity(NAMESPACES / namespace) for namespace in namespaces} - {None}
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) in networks]


def session_of(pid: int) -> int | None:
    """The session of a process, None where it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to; None where there is none (a process that has ended), or not for us."""
    try:
        status = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return status.st_dev, status.st_ino


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
