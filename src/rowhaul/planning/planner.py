"""The planner: a thread that turns batches of samples into plans, ahead of the training that follows them.

One rank of each host has it. The scheduler belongs to this thread alone: whatever others want of it, a
control record to take in or its state for a checkpoint, is done here, between two plans. It plans no
further than it was allowed to, so that a control record reaches every planner before the first
iteration in which it is in force, and so that nothing is ahead of training when a segment ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.schedule import ControlRecord, IdBatch, Plan, Scheduler
from rowhaul.schedule.control import Value

Result = TypeVar("Result")
MakeScheduler = Callable[[Iterator[IdBatch]], Scheduler]

_PATIENCE = 0.2  # seconds between two looks at whether something has failed


@dataclass(frozen=True)
class PlannedBatch:
    """A plan, the samples that it is for, and what ranks compare before they act on it."""

    plan: Plan
    samples: Samples
    samples_digest: bytes  # 16
    plan_digest: bytes  # 16; without the ids, which the samples' one is of
    decision_seconds: float  # that the scheduler took; neither reading nor looking rows up
    ready_at: float  # time.monotonic(), a clock that all processes of a host share


class Audience(Protocol):
    """Who else gets the plans, in the planner's thread, as soon as they are made."""

    def send(self, planned: PlannedBatch) -> None:
        """Take the next plan."""
        ...

    def end(self) -> None:
        """There are no more."""
        ...

    def fail(self, error: BaseException) -> None:
        """Planning has failed."""
        ...


def samples_digest(samples: Samples) -> bytes:
    """A hash (16 bytes) of everything that samples hold: ids, dense values, labels, positions."""
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
    """Something to do with the scheduler between two plans; without ``done`` its errors end the planner."""

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
    """Plans iterations in a thread of its own.

    Args:
        make_scheduler: makes the scheduler, new or restored, from the ids of the batches to come.
        samples: the global batches, from the first that the scheduler has not planned on.
        failure: of this rank: the planner's errors go there, and waiting for it ends when it is set.
        tables_of_features: the number of the table of each feature; by default each has its own.
        ahead: iterations that may be planned before any is allowed.
        audience: gets everything that `next` gives here.
        complete: adds to a planned batch what can only be known once it is planned; its ids stay as they are.
            Ranks compare the samples without it.

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
        """Let iterations up to and including this one be planned; what was allowed stays allowed."""
        with self._changed:
            self._allowed = max(self._allowed, iteration)
            self._changed.notify_all()

    def next(self) -> PlannedBatch | None:
        """The next plan, in order, once it is there; None when all batches are planned."""
        with self._changed:
            while not self._ready:
                self._failure.check()
                if self._ended:
                    return None
                if self._closing:
                    raise RuntimeError("the planner is closed: there is no next plan")
                self._changed.wait(_PATIENCE)
            return self._ready.popleft()

    def receive(self, record: ControlRecord) -> None:
        """Take a control record in before the next plan is made; does not wait.

        One that the scheduler refuses, because it comes too late or makes no sense, ends the planner.
        """
        self._submit(_Call(lambda scheduler: scheduler.receive(record)))

    def post(self, name: str, value: Value) -> ControlRecord:
        """Decide a control record here, as `Scheduler.post`: for a run that has no other planner."""
        return self.at_rest(lambda scheduler: scheduler.post(name, value))

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result:
        """Do something with the scheduler between two plans, in the planner's thread; waits for the result.

        When everything allowed has been given by `next`, the scheduler rests right after the last of it.
        """
        done: Future[Result] = Future()
        self._submit(_Call(work, done))
        while not done.done():
            self._failure.check()
            try:
                done.exception(_PATIENCE)
            except TimeoutError:
                continue
        return done.result()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after the plan that it is at; one that is stuck in its source is left behind."""
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
        """What to do next: what others want comes before the next plan; None when the planner is closed."""
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
        """Nothing more will be done: nobody may wait for it, and files being read are closed."""
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
    """Refuse what is no batch, or one whose parts tell of different numbers of samples."""
    if not isinstance(samples, Samples):
        raise DataError(f"batches must be rowhaul Samples; got a {type(samples).__name__}")
    sizes = {"lengths": samples.lengths.shape[-1], "dense": len(samples.dense), "index": len(samples.index)}
    if samples.labels is not None:
        sizes["labels"] = len(samples.labels)
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise DataError(f"all parts of a batch must tell of the same number of samples; got {given}")
