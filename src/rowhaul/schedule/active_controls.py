"""What control records change under way: the dispatcher, the prices of links, the workers' shares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.schedule.control import ControlLog, ControlRecord, Value
from rowhaul.schedule.dispatch import make_dispatcher, text_of, with_settings
from rowhaul.schedule.dispatch.task import Dispatcher, Learns, LooksAhead, is_blind
from rowhaul.schedule.saved import Arrays, Saved, text_array
from rowhaul.schedule.settings import ScheduleSettings, check_prices, check_shares


class ActiveControls:
    """What holds for the next plan, and the records that will change it."""

    dispatcher: Dispatcher
    learner: Learns | None  # the dispatcher, if it learns
    far_sighted: LooksAhead | None  # the dispatcher, if it looks ahead
    blind: bool  # whether the dispatcher need not know where rows are

    def __init__(self, settings: ScheduleSettings) -> None:
        self._num_workers = settings.topology.num_workers
        self._log = ControlLog()
        self.prices: npt.NDArray[np.int64] = np.array(settings.prices, np.int64)
        self.shares = list(settings.shares or [1] * self._num_workers)
        dispatcher = settings.dispatcher
        self.use(make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher)

    def use(self, dispatcher: Dispatcher) -> None:
        """Dispatch with this one from now on."""
        # Asked once, here: it takes Python longer than some dispatchers need for a batch.
        self.dispatcher = dispatcher
        self.learner = dispatcher if isinstance(dispatcher, Learns) else None
        self.far_sighted = dispatcher if isinstance(dispatcher, LooksAhead) else None
        self.blind = is_blind(dispatcher)

    def post(self, name: str, value: Value, *, next_iteration: int) -> ControlRecord:
        """Decide a record after the last plan; see `ControlLog`."""
        record = self._log.next(name, value, during=next_iteration - 1)
        self.receive(record, next_iteration=next_iteration)
        return record

    def receive(self, record: ControlRecord, *, next_iteration: int) -> None:
        """Take in a record; one that is refused changes nothing."""
        self._check(record)
        self._log.add(record, next_iteration=next_iteration)

    def advance(self, iteration: int) -> tuple[ControlRecord, ...]:
        """Let the records take effect that do so with this iteration."""
        due = self._log.due(iteration)
        for record in due:
            self._apply(record)
        return tuple(due)

    def go_on_at(self, next_record: int) -> None:
        """Number records on from an earlier log's."""
        self._log.go_on_at(next_record)

    def export(self) -> Arrays:
        """What is in force, and what will be, as plain arrays."""
        learnt = self.learner.learnt() if self.learner is not None else None
        return {
            "prices": self.prices.copy(),
            "shares": np.array(self.shares, np.int64),
            "dispatcher": text_array(text_of(self.dispatcher) or ""),
            **({} if learnt is None else {"learnt": learnt}),
            **self._log.export(),
        }

    def restore(self, saved: Saved) -> None:
        """Go on with what was in force where `export` was called.

        A dispatcher that has no text is not made anew: the one of the settings goes on.
        """
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
