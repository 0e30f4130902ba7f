"""Control records: the only way for anything measured to enter the schedule.

What depends on a clock or a link (prices, shares, the dispatcher and its parameters) is decided on
one rank, sent to all, and takes effect on all in the same iteration: two after the one in which it
was decided, so that it has arrived everywhere and no plan in the making changes under way.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass

import numpy as np

from rowhaul.errors import ConfigError
from rowhaul.schedule.saved import Arrays, Saved, text_array

DELAY = 2  # iterations between the decision and its effect
NAMES = ("dispatcher", "prices", "shares", "tables_scored")

Value = str | int | tuple[int, ...]


@dataclass(frozen=True)
class ControlRecord:
    """A numbered decision: from iteration ``active`` on, ``name`` has this value."""

    number: int
    active: int
    name: str
    value: Value

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"there is no control record {self.name!r}; known are {', '.join(NAMES)}")
        if not isinstance(self.value, str):  # plain integers: plans are hashed with them
            plain = tuple(map(int, self.value)) if isinstance(self.value, tuple) else int(self.value)
            object.__setattr__(self, "value", plain)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The value where it is one number per worker."""
        if not isinstance(self.value, tuple):
            raise ConfigError(f"{self.name} needs a tuple, one number per worker; got {self.value!r}")
        return self.value


class ControlLog:
    """The control records of a run, in order."""

    def __init__(self) -> None:
        self.waiting: deque[ControlRecord] = deque()
        self._next_number = 0

    def next(self, name: str, value: Value, *, during: int) -> ControlRecord:
        """The record that would decide something during an iteration: in force `DELAY` iterations later."""
        return ControlRecord(self._next_number, during + DELAY, name, value)

    def go_on_at(self, number: int) -> None:
        """Number records on from an earlier log's; there is none yet."""
        self._next_number = number

    def add(self, record: ControlRecord, *, next_iteration: int) -> None:
        """Take a record in; they must arrive in order, each once, before they are in force."""
        if record.number != self._next_number:
            raise ConfigError(f"control record {self._next_number} was due, but {record.number} came")
        if record.active < next_iteration:
            raise ConfigError(
                f"control record {record.number} came too late: it is in force from iteration "
                f"{record.active} on, but {next_iteration} is planned next"
            )
        self._next_number += 1
        self.waiting.append(record)

    def due(self, iteration: int) -> list[ControlRecord]:
        """The records that take effect with this iteration."""
        due = []
        while self.waiting and self.waiting[0].active <= iteration:
            due.append(self.waiting.popleft())
        return due

    def export(self) -> Arrays:
        """The records that wait, and the number of the next one, as plain arrays."""
        waiting = [[one.number, one.active, one.name, one.value] for one in self.waiting]
        return {"waiting": text_array(json.dumps(waiting)), "next_number": np.array([self._next_number])}

    def restore(self, saved: Saved) -> None:
        """Wait for what was waited for where `export` was called; nothing may have been added here yet."""
        for number, active, name, value in json.loads(saved.text("waiting")):
            value = tuple(value) if isinstance(value, list) else value
            self.waiting.append(ControlRecord(number, active, name, value))
        self._next_number = saved.number("next_number")
