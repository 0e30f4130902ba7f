"""Control records: the only way for anything measured to enter the schedule.

What depends on a clock or a link (prices, shares, the dispatcher and its parameters) is decided on
one rank, sent to all, and takes effect on all in the same iteration: two after the one in which it
was decided, so that it has arrived everywhere and no plan in the making changes under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rowhaul.errors import ConfigError

DELAY = 2  # iterations between the decision and its effect
NAMES = ("dispatcher", "prices", "shares", "tables_scored")

Value = str | int | tuple[int, ...]


@dataclass(frozen=True)
class ControlRecord:
    """A numbered decision: from iteration ``in_force`` on, ``name`` has this value."""

    number: int
    in_force: int
    name: str
    value: Value

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"there is no control record {self.name!r}; known are {', '.join(NAMES)}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The value where it is one number per worker."""
        if not isinstance(self.value, tuple):
            raise ConfigError(f"{self.name} needs a tuple, one number per worker; got {self.value!r}")
        return self.value


class ControlLog:
    """The control records of a run, in order."""

    def __init__(self) -> None:
        self._waiting: deque[ControlRecord] = deque()
        self._next_number = 0

    def post(self, name: str, value: Value, *, during: int) -> ControlRecord:
        """Decide something during iteration ``during``; it is in force `DELAY` iterations later."""
        record = ControlRecord(self._next_number, during + DELAY, name, value)
        self.receive(record)
        return record

    def receive(self, record: ControlRecord) -> None:
        """Take a record that another rank decided; they must arrive in order, each once."""
        if record.number != self._next_number:
            raise ConfigError(f"control record {self._next_number} was due, but {record.number} came")
        self._next_number += 1
        self._waiting.append(record)

    def due(self, iteration: int) -> list[ControlRecord]:
        """The records that take effect with this iteration."""
        due = []
        while self._waiting and self._waiting[0].in_force <= iteration:
            due.append(self._waiting.popleft())
        return due
