"""Control records: the only way for anything measured to enter the schedule.

What depends on a clock or a link (prices, shares, the dispatcher and its parameters) is decided on one rank,
sent to all, and takes effect on all in the same iteration: two after the one in which it was decided, so that
it has arrived everywhere and no plan in the making changes under way.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.schedule.arrays import Arrays, Saved, text_array
from rowhaul.schedule.dispatch import make_dispatcher, text_of, with_settings
from rowhaul.schedule.dispatch.task import Dispatcher, Learns, LooksAhead, is_blind
from rowhaul.schedule.sizes import check_prices, check_shares

DELAY = 2  # iterations between a decision and its effect
NAMES = ("dispatcher", "prices", "shares", "tables_scored", "passes")

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
            raise ConfigError(f"unknown control record {self.name!r}; known are {', '.join(NAMES)}")
        if not isinstance(self.value, str):  # plain integers: plans are hashed with them
            plain = tuple(map(int, self.value)) if isinstance(self.value, tuple) else int(self.value)
            object.__setattr__(self, "value", plain)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The value, if it is one number per worker."""
        if not isinstance(self.value, tuple):
            raise ConfigError(f"{self.name} needs a tuple, one number per worker; got {self.value!r}")
        return self.value


class ControlLog:
    """The control records of a run, in order."""

    def __init__(self) -> None:
        self.waiting: deque[ControlRecord] = deque()
        self._next_number = 0

    def next(self, name: str, value: Value, *, during: int) -> ControlRecord:
        """Make the record of a decision taken during an iteration; it is active `DELAY` iterations later."""
        return ControlRecord(self._next_number, during + DELAY, name, value)

    def go_on_at(self, number: int) -> None:
        """Continue the numbers of an earlier log; this one must be empty."""
        self._next_number = number

    def add(self, record: ControlRecord, *, next_iteration: int) -> None:
        """Add a record; they must arrive in order, each once, before they become active."""
        if record.number != self._next_number:
            raise ConfigError(f"expected control record {self._next_number}; got {record.number}")
        if record.active < next_iteration:
            raise ConfigError(
                f"control record {record.number} came too late: it is active from iteration "
                f"{record.active} on, but iteration {next_iteration} is planned next"
            )
        self._next_number += 1
        self.waiting.append(record)

    def due(self, iteration: int) -> list[ControlRecord]:
        """Remove and return the records that take effect with this iteration."""
        due = []
        while self.waiting and self.waiting[0].active <= iteration:
            due.append(self.waiting.popleft())
        return due

    def export(self) -> Arrays:
        """Export the waiting records and the next number as plain arrays."""
        waiting = [[one.number, one.active, one.name, one.value] for one in self.waiting]
        return {"waiting": text_array(json.dumps(waiting)), "next_number": np.array([self._next_number])}

    def restore(self, saved: Saved) -> None:
        """Restore an exported log into an empty one."""
        for number, active, name, value in json.loads(saved.text("waiting")):
            value = tuple(value) if isinstance(value, list) else value
            self.waiting.append(ControlRecord(number, active, name, value))
        self._next_number = saved.number("next_number")


class ActiveControls:
    """The dispatcher, prices and shares of the next plan, and the records that will change them.

    Args:
        dispatcher: a dispatcher or its text.
        prices: one per worker.
        shares: one per worker; None for equal shares.
    """

    dispatcher: Dispatcher
    learner: Learns | None  # the dispatcher, if it learns
    far_sighted: LooksAhead | None  # the dispatcher, if it looks ahead
    blind: bool  # whether the dispatcher need not know where rows are

    def __init__(
        self, dispatcher: str | Dispatcher, prices: tuple[int, ...], shares: tuple[int, ...] | None
    ) -> None:
        self._num_workers = len(prices)
        self._log = ControlLog()
        self.prices: npt.NDArray[np.int64] = np.array(prices, np.int64)
        self._given_shares = list(shares or [1] * self._num_workers)
        self.shares = list(self._given_shares)
        self.use(make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher)

    @property
    def summing(self) -> int:
        """The workers that take part in sums, a bit each: those with a share, and worker 0."""
        return sum(1 << worker for worker, share in enumerate(self.shares) if share or not worker)

    @property
    def has_chosen_shares(self) -> bool:
        """Whether a record has replaced the shares of the settings."""
        return self.shares != self._given_shares

    def give_up_shares(self) -> tuple[int, ...]:
        """Return to the shares of the settings; returns those that were in force."""
        given_up, self.shares = tuple(self.shares), list(self._given_shares)
        return given_up

    def use(self, dispatcher: Dispatcher) -> None:
        """Dispatch with this one from now on."""
        # Checked once, here: a check takes Python longer than some dispatchers need for a batch.
        self.dispatcher = dispatcher
        self.learner = dispatcher if isinstance(dispatcher, Learns) else None
        self.far_sighted = dispatcher if isinstance(dispatcher, LooksAhead) else None
        self.blind = is_blind(dispatcher)

    def post(self, name: str, value: Value, *, next_iteration: int) -> ControlRecord:
        """Make a record after the last plan and add it; see `ControlLog`."""
        record = self._log.next(name, value, during=next_iteration - 1)
        self.receive(record, next_iteration=next_iteration)
        return record

    def receive(self, record: ControlRecord, *, next_iteration: int) -> None:
        """Add a record; a refused one changes nothing."""
        self._check(record)
        self._log.add(record, next_iteration=next_iteration)

    def advance(self, iteration: int) -> tuple[ControlRecord, ...]:
        """Apply and return the records that become active with this iteration."""
        due = self._log.due(iteration)
        for record in due:
            self._apply(record)
        return tuple(due)

    def go_on_at(self, next_record: int) -> None:
        """Continue the record numbers of an earlier log."""
        self._log.go_on_at(next_record)

    def export(self) -> Arrays:
        """Export what is active and what will be as plain arrays."""
        learnt = self.learner.learnt() if self.learner is not None else None
        return {
            "prices": self.prices.copy(),
            "shares": np.array(self.shares, np.int64),
            "dispatcher": text_array(text_of(self.dispatcher) or ""),
            **({} if learnt is None else {"learnt": learnt}),
            **self._log.export(),
        }

    def restore(self, saved: Saved) -> None:
        """Restore exported controls. A dispatcher without a text stays the one of the settings."""
        self.prices = saved.array("prices", np.int64, self._num_workers)
        self.shares = saved.array("shares", np.int64, self._num_workers).tolist()
        if text := saved.text("dispatcher"):
            self.use(make_dispatcher(text))
        if "learnt" in saved:
            if self.learner is None:
                raise CheckpointError(f"the dispatcher had learnt, but {self.dispatcher.name} does not learn")
            self.use(self.learner.recall(saved.array("learnt", np.int64)))
        self._log.restore(saved)

    def _check(self, record: ControlRecord) -> None:
        if record.name == "dispatcher":
            make_dispatcher(str(record.value))
        elif record.name == "prices":
            check_prices(record.numbers, self._num_workers)
        elif record.name == "shares":
            check_shares(record.numbers, self._num_workers)
        else:
            before = [one.value for one in self._log.waiting if one.name == "dispatcher"]
            dispatcher = make_dispatcher(str(before[-1])) if before else self.dispatcher
            with_settings(dispatcher, **{record.name: record.value})

    def _apply(self, record: ControlRecord) -> None:
        if record.name == "dispatcher":
            self.use(make_dispatcher(str(record.value)))
        elif record.name == "prices":
            self.prices = np.array(record.numbers, np.int64)
        elif record.name == "shares":
            self.shares = list(record.numbers)
        else:
            self.use(with_settings(self.dispatcher, **{record.name: record.value}))
