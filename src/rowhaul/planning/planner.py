"""The planner: a thread that turns batches of samples into plans, ahead of training.

One rank of each host has it. The scheduler belongs to this thread alone: requests by others, such as a
control record or its state for a checkpoint, are handled here, between two plans. It plans only allowed
iterations, so that a control record reaches every planner before the first iteration in which it is in
force, and so that nothing is ahead of training when a segment ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash

from rowhaul._activity import Activity, doing, progressed
from rowhaul._threads import Failure, Future, RankQueue, SerialExecutor
from rowhaul.data.samples import Samples
from rowhaul.errors import ClusterError, DataError
from rowhaul.schedule import ControlRecord, IdBatch, Plan, Scheduler

if TYPE_CHECKING:
    from rowhaul.planning.sharing import PlanServer

Result = TypeVar("Result")

NO_DIGEST = bytes(16)

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
    reading_seconds: float = 0.0  # since the plan before, for which planning waited for data


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


class Planner:
    """Plans iterations in its own thread.

    Args:
        make_scheduler: makes the scheduler, new or restored, from the ids of the coming batches.
        samples: the global batches, starting with the first that the scheduler has not planned.
        failure: of this rank: gets the planner's errors; waits end when it is set.
        tables_of_features: the number of the table of each feature; by default each has its own.
        ahead: iterations that may be planned before any is allowed.
        audience: receives all plans, too, as soon as they are made, in the planner's thread.
        complete: adds data to the samples of a planned batch, whose ids are the names of the rows that were
            planned. Ranks compare the samples without either.
        compares: whether other ranks plan or read by themselves, so that digests say whether they agree.

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
        audience: PlanServer | None = None,
        complete: Callable[[Samples, Plan], Samples] = lambda samples, plan: samples,
        compares: bool = True,
    ) -> None:
        self._source = iter(samples)
        self._failure = failure
        self._tables_of_features = tables_of_features
        self._audience = audience
        self._complete, self._compares = complete, compares
        self._window: deque[Samples] = deque()  # read, not planned yet
        self._reading_seconds = 0.0  # since the latest plan
        self._scheduler = make_scheduler(self._ids())
        closed = "the planner is closed: no next plan"
        self._ready: RankQueue[PlannedBatch | None] = RankQueue(failure, closed)
        self._executor = SerialExecutor("planner", failure)
        self._lock = threading.Lock()  # of the next attribute
        self._allowed = self._scheduler.iteration - 1
        self._has_ended = self._is_exhausted = False  # all batches are planned; and taken by `next`
        self._is_closed = False
        self.allow(self._allowed + ahead)

    def allow(self, iteration: int) -> None:
        """Allow planning up to and including this iteration."""
        with self._lock:
            for _ in range(self._allowed, iteration):
                self._executor.submit(lambda: self._guarded(self._plan))
            self._allowed = max(self._allowed, iteration)

    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None when all batches are planned."""
        planned = None if self._is_exhausted else self._ready.get()
        self._is_exhausted = planned is None
        return planned

    def receive(self, record: ControlRecord) -> None:
        """Apply a control record before the next plan is made; does not wait.

        A record that the scheduler refuses, because it is late or invalid, ends the planner.
        """
        self._check_open()
        self._executor.submit(lambda: self._guarded(lambda: self._scheduler.receive(record)))

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result:
        """Call a function with the scheduler after all allowed plans; wait for the result.

        The function runs in the planner's thread; its errors are raised here and do not end the planner.
        """
        self._check_open()
        done: Future[Result] = Future(self._failure)

        def call() -> None:
            try:
                self._check_open()
                done.set_result(work(self._scheduler))
            except BaseException as error:
                done.set_exception(error)

        self._executor.submit(call)
        return done.wait()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after the current plan; abandon it if it is stuck in its source."""
        self._is_closed = True
        self._ready.close()
        self._executor.close(timeout)
        with contextlib.suppress(AttributeError, ValueError):  # cannot be closed, or is being read
            self._source.close()  # type: ignore[attr-defined]  # generators have it, other iterators may not

    def _check_open(self) -> None:
        self._failure.check()
        if self._is_closed:
            raise ClusterError("the planner is closed: it makes no more plans")

    def _ids(self) -> Iterator[IdBatch]:
        while (samples := self._read()) is not None:
            check_samples(samples)
            self._window.append(samples)
            tables = self._tables_of_features or range(len(samples.features))
            yield IdBatch.from_features(tables, samples.values, samples.lengths, samples.time)

    def _read(self) -> Samples | None:
        began = time.perf_counter()
        with doing(Activity.READING):
            samples = next(self._source, None)
        self._reading_seconds += time.perf_counter() - began
        return samples

    def _guarded(self, call: Callable[[], None]) -> None:
        """Make a call whose errors end the planner."""
        if self._is_closed:
            return
        try:
            with doing(Activity.PLANNING):
                call()
        except BaseException as error:
            try:
                if self._audience is not None:
                    self._audience.fail(error)  # first: this process may end as soon as the failure is known
            finally:
                self._failure.set(error)

    def _plan(self) -> None:
        if self._has_ended:
            return
        planned = None
        if self._scheduler.fill():
            began = time.perf_counter()
            plan = self._scheduler.plan()
            seconds = time.perf_counter() - began
            samples = self._window.popleft()
            planned = PlannedBatch(
                plan=plan,
                samples=self._complete(_as_planned(samples, plan), plan),
                samples_digest=samples_digest(samples) if self._compares else NO_DIGEST,
                plan_digest=replace(plan, ids=None).digest() if self._compares else NO_DIGEST,
                decision_seconds=seconds,
                ready_at=time.monotonic(),
                reading_seconds=self._reading_seconds,
            )
            self._reading_seconds = 0.0
        self._has_ended = planned is None
        if self._audience is not None:
            self._audience.end() if planned is None else self._audience.send(planned)
        self._ready.put(planned)
        progressed()


def _as_planned(samples: Samples, plan: Plan) -> Samples:
    """Return samples whose ids are those that were planned: a scheduler may give rows other names."""
    planned = None if plan.ids is None else plan.ids.by_feature
    if planned is None or planned.values is samples.values:
        return samples
    return replace(samples, values=planned.values)


def check_samples(samples: Samples) -> None:
    """Refuse a batch whose parts have different numbers of samples."""
    if not isinstance(samples, Samples):
        raise DataError(f"batches must be rowhaul Samples; got a {type(samples).__name__}")
    sizes = {"lengths": samples.lengths.shape[-1], "dense": len(samples.dense), "index": len(samples.index)}
    for name in ("labels", "weights", "groups"):
        if (column := getattr(samples, name)) is not None:
            sizes[name] = len(column)
    weights = samples.id_weights
    if weights is not None and weights.shape != samples.values.shape:
        raise DataError(
            f"{len(samples.values):,} ids need as many weights, one each; got an array of {weights.shape}"
        )
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise DataError(f"all parts of a batch must have the same number of samples; got {given}")
