"""Batches that are planned before they are read, in order, beside training on those before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rowhaul.device.batches import Ids
from rowhaul.device.hauling import Fetched
from rowhaul.device.lanes import Event, await_here, here, is_over, settle, worker

_MOST_FINISHED = 8  # steps that a card may be behind before planning waits for it


@dataclass(eq=False)
class PlannedBatch:
    """A batch, and where its rows are once it is planned: a part for each size of row."""

    number: int  # 0: given up before it was planned
    ids: list[Ids]
    records: list[Tensor] = field(default_factory=list)
    fetched: list[Future[Fetched]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)  # whether it is planned, or cannot be
    error: Exception | None = None


class Lookahead:
    """Plans batches in the order in which they are announced, as far ahead as there is room.

    Rows of batches from ``oldest`` on stay on the card: those that are read and not stepped yet, and those
    planned for later. A thread of its own plans, so training never waits for that unless it is ahead.

    Args:
        plan: plans a batch; returns False if there is no room beside the rows of batches from ``oldest`` on.
        refuse: makes an error about a batch for which there is no room at all.
        device: the card.
    """

    def __init__(
        self,
        plan: Callable[[PlannedBatch], bool],
        refuse: Callable[[PlannedBatch], Exception],
        device: torch.device,
    ) -> None:
        self._plan, self._refuse, self._device = plan, refuse, device
        self._thread = worker(device, "rowhaul-plan")
        self.planning = threading.RLock()  # held by who plans, or needs everything to stay as it is
        self._announcing = threading.Lock()
        self._waiting: deque[PlannedBatch] = deque()
        self._unread: deque[PlannedBatch] = deque()  # planned
        self._reading: list[int] = []  # read since the last step
        self._next_number = 1
        self.oldest = 1
        self.last_read = 0
        # Batches that were the oldest, and events after all that was done with rows of those before each.
        self._finished: deque[tuple[int, Event]] = deque([(1, None)], _MOST_FINISHED)

    def announce(self, ids: list[Ids]) -> PlannedBatch:
        """Plan a batch that is read later; from any thread."""
        with self._announcing:
            batch = PlannedBatch(self._next_number, ids)
            self._next_number += 1
            self._waiting.append(batch)
        self._go_on()
        return batch

    def is_valid(self, batch: PlannedBatch) -> bool:
        """Whether the rows of a batch, once it is planned, are on the card."""
        return batch.number >= self.oldest

    def acquire(self, batch: PlannedBatch, *, keeps: bool) -> list[PlannedBatch]:
        """Wait until a batch is planned; returns all batches that are read, or given up, by this.

        Its rows stay until the next step or, unless ``keeps``, the next call. Batches announced before it
        that were not read are given up.
        """
        passed = []
        if not self._reading and batch.number > self.oldest:
            with self.planning:
                while self._waiting and self._waiting[0].number < batch.number:
                    self._give_up(self._waiting.popleft())
                passed = self._pass_until(batch.number - 1)
                self._advance(batch.number)
        if not batch.is_over.is_set():
            self._thread.submit(self._plan_until, batch)
            batch.is_over.wait()  # not for plans of others after it
        if batch.error is not None:
            raise batch.error
        if keeps and batch.number not in self._reading:
            self._reading.append(batch.number)
        self.last_read = max(self.last_read, batch.number)
        return passed + self._pass_until(batch.number)

    def _pass_until(self, number: int) -> list[PlannedBatch]:
        """Return the planned batches up to a number; what follows on this stream comes after their rows.

        That holds for batches that are never read, too: their rows may be evicted as soon as an event here is
        over, and must have arrived by then.
        """
        passed = []
        while self._unread and self._unread[0].number <= number:
            passed.append(self._unread.popleft())
            for fetched in passed[-1].fetched:
                await_here(self._device, fetched.result().ready)
        return passed

    def released(self, waits: bool) -> tuple[int, Event]:
        """Return the oldest batch whose rows must stay, and an event after all use of rows before that.

        Unless this ``waits``, the event is over already, if possible, and the batch may be an earlier one.
        """
        if waits:
            return self._finished[-1]
        while len(self._finished) > 1 and is_over(self._finished[1][1]):
            self._finished.popleft()
        return self._finished[0]

    def finish(self) -> None:
        """Note that what was read so far is done with: a step was taken."""
        if self._reading:
            self._advance(max(self._reading) + 1)
            self._reading.clear()
            self._go_on()

    def clear(self) -> None:
        """Give up all batches; hold ``planning``."""
        self._waiting.clear()
        self._unread.clear()
        self._reading.clear()
        self._advance(self._next_number)
        self.last_read = self._next_number - 1

    def _advance(self, oldest: int) -> None:
        self._finished.append((oldest, here(self._device)))
        self.oldest = oldest

    def _go_on(self) -> None:
        self._thread.submit(self._plan_some)

    def _plan_some(self) -> None:
        """Plan what there is room for."""
        with self.planning:
            while self._waiting and self._try(self._waiting[0]):
                self._waiting.popleft()

    def _plan_until(self, batch: PlannedBatch) -> None:
        """Plan a batch now, whatever becomes of those before it."""
        with self.planning:
            try:
                while not batch.is_over.is_set():
                    first = self._waiting[0]
                    has_room = self._try(first)
                    self._waiting.popleft()
                    if not has_room:
                        if first is batch:
                            batch.error = self._refuse(batch)
                        self._give_up(first)
            except Exception as error:  # raised again where the batch is read, which waits for this
                batch.error = error
                batch.is_over.set()

    def _give_up(self, batch: PlannedBatch) -> None:
        """Plan a batch no further; the rows of it that are on their way arrive before others replace them."""
        for fetched in batch.fetched:
            settle(fetched.result().ready)
        batch.number = 0
        self._unread.append(batch)  # for the rows that it made
        batch.is_over.set()

    def _try(self, batch: PlannedBatch) -> bool:
        """Plan a batch; an error is for who reads it."""
        try:
            if not self._plan(batch):
                return False
            self._unread.append(batch)
        except Exception as error:  # raised again where the batch is read
            batch.error = error
        batch.is_over.set()
        return True
