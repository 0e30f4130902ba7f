"""The planner: a thread that turns batches of samples into plans, ahead of training.

One rank of each host has it. The scheduler belongs to this thread alone: requests by others, such as a
control record or its state for a checkpoint, are handled here, between two plans. It plans only allowed
iterations, so that a control record reaches every planner before the first iteration in which it is in
force, and so that nothing is ahead of training when a segment ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from rowhaul._threads import Failure, Future
from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.schedule import ControlRecord, IdBatch, Plan, Scheduler

Result = TypeVar("Result")
MakeScheduler = Callable[[Iterator[IdBatch]], Scheduler]


@dataclass(frozen=True)
class PlannedBatch:
    """A plan, its samples, and the digests that ranks compare before they act on it."""

    plan: Plan
    samples: Samples
    samples_digest: bytes  # 16
    plan_digest: bytes  # 16; without the ids, which the other digest covers
    decision_seconds: float  # spent in the scheduler, without reading and looking up rows
    ready_at: float  # time.monotonic(), a clock that all processes of a host share


class Audience(Protocol):
    """Receives every plan as soon as it is made, in the planner's thread."""

    def send(self, planned: PlannedBatch) -> None:
        """Send the next plan."""
        ...

    def end(self) -> None:
        """Announce that there are no more plans."""
        ...

    def fail(self, error: BaseException) -> None:
        """Announce that planning has failed."""
        ...


def samples_digest(samples: Samples) -> bytes:
    """Hash everything in samples, ids, dense values, labels and positions, to 16 bytes."""
    state = xxhash.xxh3_128()
    for field in fields(samples):
        value = getattr(samples, field.name)
        if isinstance(value, np.ndarray):
            state.update(f"{field.name} {value.dtype.str} {value.shape}".encode())
            state.update(np.ascontiguousarray(value).data)
        else:
            state.update(f"{field.name} {value!r}".encode())
    return state.digest()


@dataclass(frozen=True)
class _Call:
    """A call with the scheduler between two plans; without ``done`` its errors end the planner."""

    work: Callable[[Scheduler], Any]
    done: Future[Any] | None = None

    def make(self, scheduler: Scheduler) -> None:
        if self.done is None:
            self.work(scheduler)
            return
        try:
            self.done.set_result(self.work(scheduler))
        except BaseException as error:
            self.done.set_exception(error)


class Planner:
    """Plans iterations in its own thread.

    Args:
        make_scheduler: makes the scheduler, new or restored, from the ids of the coming batches.
        samples: the global batches, starting with the first that the scheduler has not planned.
        failure: of this rank: gets the planner's errors; waits end when it is set.
        tables_of_features: the number of the table of each feature; by default each has its own.
        ahead: iterations that may be planned before any is allowed.
        audience: receives all plans, too.
        complete: adds data to the samples of a planned batch; ids do not change. Ranks compare the samples
            without it.

    Example:
        >>> planner = Planner(lambda batches: Scheduler(settings, batches), samples, failure)
        >>> planner.allow(1)  # iterations 0 and 1
        >>> planner.next().plan.iteration
        0
        >>> planner.close()
    """

    def __init__(
        self,
        make_scheduler: MakeScheduler,
        samples: Iterable[Samples],
        failure: Failure,
        *,
        tables_of_features: Sequence[int] | None = None,
        ahead: int = 0,
        audience: Audience | None = None,
        complete: Callable[[Samples, Plan], Samples] = lambda samples, plan: samples,
    ) -> None:
        self._source = iter(samples)
        self._failure = failure
        self._tables_of_features = tables_of_features
        self._audience = audience
        self._complete = complete
        self._window: deque[Samples] = deque()  # read, not planned yet
        self._scheduler = make_scheduler(self._ids())
        self._allowed = self._scheduler.iteration + ahead - 1
        self._changed = threading.Condition()  # guards all that follows
        self._calls: deque[_Call] = deque()
        self._ready: deque[PlannedBatch] = deque()
        self._ended = self._closing = False
        self._thread = threading.Thread(target=self._run, name="rowhaul-planner", daemon=True)
        self._thread.start()

    def allow(self, iteration: int) -> None:
        """Allow planning up to and including this iteration."""
        with self._changed:
            self._allowed = max(self._allowed, iteration)
            self._changed.notify_all()

    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None when all batches are planned."""
        with self._changed:
            self._failure.wait_until(self._changed, lambda: self._ready or self._ended or self._closing)
            if self._ready:
                return self._ready.popleft()
            self._failure.check()
            if self._ended:
                return None
            raise RuntimeError("the planner is closed: there is no next plan")

    def receive(self, record: ControlRecord) -> None:
        """Apply a control record before the next plan is made; does not wait.

        A record that the scheduler refuses, because it is late or invalid, ends the planner.
        """
        self._submit(_Call(lambda scheduler: scheduler.receive(record)))

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result:
        """Call a function with the scheduler between two plans, in the planner's thread; wait for the result.

        When `next` has returned all allowed plans, the scheduler rests right after the last of them.
        """
        done: Future[Result] = Future(self._failure)
        self._submit(_Call(work, done))
        return done.wait()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after the current plan; abandon it if it is stuck in its source."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _submit(self, call: _Call) -> None:
        with self._changed:
            self._failure.check()
            if self._closing:
                raise RuntimeError("the planner is closed: its scheduler is gone")
            self._calls.append(call)
            self._changed.notify_all()

    def _ids(self) -> Iterator[IdBatch]:
        for samples in self._source:
            check_samples(samples)
            self._window.append(samples)
            tables = self._tables_of_features
            yield IdBatch.from_features(
                range(len(samples.features)) if tables is None else tables, samples.values, samples.lengths
            )

    def _run(self) -> None:
        try:
            while (call := self._next_call()) is not None:
                call.make(self._scheduler)
        except BaseException as error:
            try:
                if self._audience is not None:
                    self._audience.fail(error)  # first: this process may end as soon as the failure is known
            finally:
                self._failure.set(error)
        finally:
            self._tidy()

    def _next_call(self) -> _Call | None:
        """Return the next call: requests of others first, then the next plan; None once closed."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                if self._calls:
                    return self._calls.popleft()
                if not self._ended and self._scheduler.iteration <= self._allowed:
                    return _Call(self._plan)
                self._changed.wait()

    def _plan(self, scheduler: Scheduler) -> None:
        planned = None
        if scheduler.fill():
            began = time.perf_counter()
            plan = scheduler.plan()
            seconds = time.perf_counter() - began
            samples = self._window.popleft()
            planned = PlannedBatch(
                plan=plan,
                samples=self._complete(samples, plan),
                samples_digest=samples_digest(samples),
                plan_digest=replace(plan, ids=None).digest(),
                decision_seconds=seconds,
                ready_at=time.monotonic(),
            )
        self._publish(planned)

    def _publish(self, planned: PlannedBatch | None) -> None:
        if self._audience is not None and planned is not None:
            self._audience.send(planned)
        elif self._audience is not None:
            self._audience.end()
        with self._changed:
            if planned is not None:
                self._ready.append(planned)
            else:
                self._ended = True
            self._changed.notify_all()

    def _tidy(self) -> None:
        """Fail all pending calls, and close the files being read."""
        error = self._failure.error or RuntimeError("the planner was closed before it could do this")
        with self._changed:
            self._closing = True
            for call in self._calls:
                if call.done is not None:
                    call.done.set_exception(error)
            self._calls.clear()
            self._changed.notify_all()
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


def check_samples(samples: Samples) -> None:
    """Refuse a batch whose parts have different numbers of samples."""
    if not isinstance(samples, Samples):
        raise DataError(f"batches must be rowhaul Samples; got a {type(samples).__name__}")
    sizes = {"lengths": samples.lengths.shape[-1], "dense": len(samples.dense), "index": len(samples.index)}
    if samples.labels is not None:
        sizes["labels"] = len(samples.labels)
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise DataError(f"all parts of a batch must have the same number of samples; got {given}")
