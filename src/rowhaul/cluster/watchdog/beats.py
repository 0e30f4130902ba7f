"""One rank's beat: how far it has come, what its threads do, and whether the system has stopped it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rowhaul._activity import Activity, Doing, Page

_SLOW_SECONDS = 5.0  # after which it is worth asking the system what a rank's threads wait for


@dataclass(frozen=True)
class Beat:
    """What a watchdog knows of its rank."""

    iteration: int = 0
    ticks: int = 0
    doing: tuple[Doing, ...] = ()
    is_stopped: bool = False  # by SIGSTOP
    is_blocked: bool = False  # a thread waits for a disk or file server, and cannot be interrupted

    @classmethod
    def read(cls, page: Page, process: int) -> Beat:
        """Read a rank's page and what the system says of its process."""
        seen = page.read()
        is_slow = any(one.seconds > _SLOW_SECONDS and not one.activity.waits for one in seen.doing)
        return cls(
            seen.iteration,
            seen.ticks,
            seen.doing,
            _state(f"/proc/{process}/stat") == "T",
            is_slow and _is_blocked(process),
        )

    def to_json(self) -> list[Any]:
        """Return plain values."""
        doing = [[int(one.activity), round(one.seconds, 1)] for one in self.doing]
        return [self.iteration, self.ticks, doing, self.is_stopped, self.is_blocked]

    @classmethod
    def from_json(cls, values: list[Any]) -> Beat:
        """The inverse of `to_json`."""
        iteration, ticks, doing, is_stopped, is_blocked = values
        every = tuple(Doing(Activity(code), seconds) for code, seconds in doing)
        return cls(iteration, ticks, every, is_stopped, is_blocked)

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others, and does nothing else."""
        return bool(self.doing) and all(one.activity.waits for one in self.doing)

    def text(self) -> str:
        """Say what the rank has been doing for longest: its own work before waiting."""
        if not self.doing:
            return Activity.NOTHING.text
        own = [one for one in self.doing if not one.activity.waits]
        longest = max(own or self.doing, key=lambda one: one.seconds)
        blocked = " (its disk or file server does not answer)" if self.is_blocked else ""
        return f"{longest.activity.text} since {longest.seconds:.0f} s{blocked}"


def _is_blocked(process: int) -> bool:
    try:
        tasks = os.listdir(f"/proc/{process}/task")
    except OSError:
        return False
    return any(_state(f"/proc/{process}/task/{task}/stat") == "D" for task in tasks)


def _state(path: str) -> str:
    """Return the letter of a process's or thread's state; empty where the system does not say."""
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
