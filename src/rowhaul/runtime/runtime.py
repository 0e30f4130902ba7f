"""The threads of one rank: plans are agreed on, rows move, and iterations are trained.

Three threads run beside the main thread: *control* compares plans with the other ranks, *moves* carries them
out, and *dense* sums gradients over the workers. The main thread of a worker trains iteration t between its
`begin` and its `end`; meanwhile rows of t+1 move, those that t trains from `release_rows` on. A run is
divided into segments: at the end of one nothing is pending, and rows are where the directory says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rowhaul._activity import Activity, doing, progressed
from rowhaul._threads import Failure, Future, SerialExecutor
from rowhaul.errors import ConfigError
from rowhaul.planning.agreement import Postbox, agree, meet
from rowhaul.planning.feed import PlanFeed
from rowhaul.planning.replicas import ReplicaDigests
from rowhaul.runtime.mover import Job, Mover, TrainedRows
from rowhaul.schedule import Plan, Scheduler
from rowhaul.schedule.plan import ROW_COUNTS
from rowhaul.transport.base import Collective, Wire

AHEAD = 2  # iterations agreed on beyond the one in training; one more may be planned
# Iteration t + this is agreed on when t + 2 gets its rows: then t + 1 is trained, and t's digests are known.
DIGEST_DELAY = AHEAD + 3

# What ranks report to each other with every plan: seconds, but for the samples, the iteration, which is the
# number of iterations that the rank has finished, and the counts of rows that plans leave out.
MEASURES = (
    "cpu", "samples", "compute", "all_reduce", "waiting", "push", "pull", "early", "dispatch", "slack",
    "iteration", *ROW_COUNTS,
)  # fmt: skip
CPU, ITERATION = MEASURES.index("cpu"), MEASURES.index("iteration")

Result = TypeVar("Result")


@dataclass
class _Iteration:
    """The futures of one iteration."""

    job: Future[Job | None]  # planned and agreed on by all ranks; None at the end of the data
    ready: Future[Job | None]  # its rows are in the cache
    trained: Future[TrainedRows | None]


class Runtime:
    """The threads of a rank.

    Args:
        rank: this rank.
        mover: carries out plans.
        feed: the source of plans.
        control: the group of all ranks.
        dense: the group of all workers, or None on a store.
        failure: of this rank.
        trains: whether this rank is a worker.
        first: the first iteration; a later one when a run is resumed.
        postbox: control records of rank 0 for all ranks.
        early: whether rows of the next iteration move beside the training of one; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        mover: Mover,
        feed: PlanFeed,
        control: Collective,
        dense: Collective | None,
        failure: Failure,
        *,
        trains: bool,
        first: int = 0,
        postbox: Postbox | None = None,
        early: bool = True,
    ) -> None:
        self.rank, self.mover, self.feed, self.failure, self.trains = rank, mover, feed, failure, trains
        self.iteration = first  # the next one to train
        self.postbox = postbox or Postbox()
        self.samples = 0  # of all ranks, trained so far
        self.ended = False  # whether the data is used up
        self.measures = np.zeros(len(MEASURES))  # of the latest iteration, sent to all ranks
        self.measures[ITERATION] = first
        self._replica_digests: dict[int, ReplicaDigests] = {}  # by the iteration whose plan they go with
        self._control, self._dense, self.early = control, dense, early
        self._summing = dense  # the workers that sums are over now; None on a rank outside them
        self._executors = {name: SerialExecutor(name, failure) for name in ("control", "moves", "dense")}
        self._iterations: dict[int, _Iteration] = {}
        self._segment: Future[None] | None = None
        self._last: int | None = None  # iteration of the segment, once known
        self._is_closed = False
        # Called with every plan; True ends the segment. Of all but stopping only rank 0 is asked.
        self.should_stop: Callable[[], bool] = lambda: False
        self.should_save: Callable[[], bool] = lambda: False
        self.should_rest: Callable[[], bool] = lambda: False
        self.should_publish: Callable[[], bool] = lambda: False
        # Called in the control thread of every rank once an iteration is agreed on.
        self.on_agreed: Callable[[int, Collective], None] = lambda number, control: None
        self._stopped = self._save_due = self._rest_due = self._publish_due = False

    @property
    def groups(self) -> tuple[Collective | None, Collective]:
        """The groups of the workers, None on a store, and of all ranks."""
        return self._dense, self._control

    @property
    def stopped(self) -> bool:
        """Whether the last segment ended because a rank asked for it."""
        return self._stopped

    @property
    def save_due(self) -> bool:
        """Whether the last segment ended for rank 0 to save."""
        return self._save_due

    @property
    def rest_due(self) -> bool:
        """Whether the last segment ended for all ranks to review something."""
        return self._rest_due

    @property
    def publish_due(self) -> bool:
        """Whether the last segment ended for all ranks to publish what changed."""
        return self._publish_due

    def start_segment(self, count: int | None) -> None:
        """Start up to ``count`` iterations, or all that the data has."""
        self.require_rest()
        self._last = None if count is None else self.iteration + count - 1
        self._stopped = self._save_due = self._rest_due = self._publish_due = False
        first = self.iteration
        if not self._is_over(first):
            self.feed.allow(first)
        for number in range(first, first + AHEAD + 1):
            self._plan(number)
        self._segment = self.in_moves(lambda mover: self._carry_out(first))

    def begin(self) -> Job | None:
        """Wait until the next iteration's rows are in the cache; None at the end of the segment."""
        if self._is_over(self.iteration):
            return None
        began = time.perf_counter()
        with doing(Activity.AWAITING_ROWS):
            job = self._iterations[self.iteration].ready.wait()
        if job is not None:
            job.seconds["waiting"] += time.perf_counter() - began
        return job

    def release_rows(self, trained: TrainedRows | None) -> None:
        """Pass on the gradients of the iteration that was begun last: from now on its rows may move."""
        self._iterations[self.iteration].trained.set_result(trained)

    def end(self) -> None:
        """Count the iteration that was begun last as trained, after `release_rows`."""
        self.iteration += 1
        progressed(self.iteration)

    def note_replicas(self, digests: ReplicaDigests) -> None:
        """Compare this worker's digests after the latest iteration with those of the others, soon."""
        self._replica_digests[self.iteration - 1 + DIGEST_DELAY] = digests

    def note_measures(self, job: Job) -> None:
        """Report a finished iteration's measurements to all ranks with the next plan."""
        measured = {**job.seconds, **job.counts, "slack": job.slack_seconds, "samples": job.num_samples}
        measured["iteration"] = job.plan.iteration + 1
        # A new array: the control thread may be sending the old one.
        self.measures = np.array([measured.get(name, 0.0) for name in MEASURES])

    def await_agreements(self) -> None:
        """Wait until all ranks agree on the plans under way; raise the error of all if they do not.

        While an iteration is trained all ranks have the same plans under way; those that have released its
        rows may have one more. A worker that waits for the former before it fails for a reason of its own
        never hides a disagreement that the others report.
        """
        for number, one in list(self._iterations.items()):
            if number <= self.iteration + AHEAD + 1:
                one.job.wait()

    def finish_segment(self) -> None:
        """Wait until nothing is pending; on a store this is the whole segment."""
        assert self._segment is not None
        self._segment.wait()
        self.await_agreements()  # also beyond the end: the control thread must see that the segment is over
        self._segment = None
        self._iterations.clear()

    def sum_among(self, workers: tuple[int, ...]) -> None:
        """Sum over these workers from now on; all workers call this between the same two sums."""
        if self._dense is not None:
            self._summing = self._dense.among(workers) if self.rank in workers else None

    def choose_sums_again(self) -> None:
        """Choose anew how to sum, as links have changed; all workers call this between the same segments."""
        if self._dense is not None:
            self._executors["dense"].submit(self._dense.choose_again).wait()

    def sum_over_workers(self, values: Tensor) -> Future[None]:
        """Sum a tensor over the summing workers in rank order, in place and in the background."""
        return self.in_dense(lambda dense: dense.sum_in_rank_order(values))

    def dense_bucket_ends(
        self, num_values: int, dtype: torch.dtype, wire: Wire | None = None
    ) -> Sequence[int]:
        """Return where the buckets of the next sum will end; a summing worker calls it between two sums."""
        assert self._summing is not None
        return self._summing.bucket_ends(num_values, dtype, wire)

    def in_dense(
        self, call: Callable[[Collective], Result], workers: tuple[int, ...] | None = None
    ) -> Future[Result]:
        """Call a collective over the summing workers, or over these, in the dense thread."""
        dense = self._summing
        if workers is not None and self._dense is not None:
            dense = self._dense.among(workers)
        assert dense is not None

        def call_now() -> Result:
            with doing(Activity.SUMMING):
                return call(dense)

        return self._executors["dense"].submit(call_now)

    def require_rest(self) -> None:
        """Refuse a call that would wait forever: within a segment for what follows it, or when closed."""
        if self._is_closed:
            raise ConfigError(
                "training was closed, and with it the threads that this call needs: train, evaluate and save "
                "before training.close(), on every rank"
            )
        if self._segment is not None:
            error = ConfigError(
                "the loop over batches() has not ended: it was left early (break, return), or this call is "
                "inside it. Say how many batches to train, batches(n), let the loop end by itself, and "
                "evaluate, save or go on after it, on every rank"
            )
            self.failure.set(error)  # this rank cannot go on, and closing must not wait for what is stuck
            raise error

    def give_up(self, error: BaseException) -> None:
        """Take an error that has left a segment early for the rank's failure: closing must not wait."""
        if self._segment is not None:
            self.failure.set(error)

    def in_control(self, call: Callable[[Collective], Result]) -> Future[Result]:
        """Call a collective over all ranks in the control thread, between segments."""
        self.require_rest()

        def call_now() -> Result:
            with doing(Activity.WAITING):
                return call(self._control)

        return self._executors["control"].submit(call_now)

    def meet(self, what: str) -> None:
        """Make sure that all ranks are at this call, between segments; see `agreement.meet`."""
        self.in_control(lambda control: meet(control, what, len(MEASURES))).wait()

    def plan_at_rest(self, make: Callable[[Scheduler], Plan], what: str) -> Plan:
        """Make a plan of no iteration, between segments, at a call that all ranks make; see `meet`."""
        self.require_rest()
        plan = self.feed.share(make)  # first: ranks of a host wait for its leader alone
        self.meet(what)
        return plan

    def in_moves(self, call: Callable[[Mover], Result]) -> Future[Result]:
        """Call something with this rank's mover in the moves thread, between segments."""
        self.require_rest()

        def call_now() -> Result:
            with doing(Activity.MOVING):
                return call(self.mover)

        return self._executors["moves"].submit(call_now)

    @property
    def is_closed(self) -> bool:
        """Whether the threads were stopped."""
        return self._is_closed

    def close(self) -> None:
        """Stop the threads and the feed."""
        self._is_closed = True
        self.feed.close()
        for executor in self._executors.values():
            executor.close()

    def _is_over(self, iteration: int) -> bool:
        return self._last is not None and iteration > self._last

    def _plan(self, number: int) -> None:
        """Start agreeing on an iteration, unless the segment ends before it."""
        if number in self._iterations or self._is_over(number):
            return
        failure = self.failure
        job = self._executors["control"].submit(lambda: self._agree_on(number))
        self._iterations[number] = _Iteration(job, Future(failure), Future(failure))

    def _agree_on(self, number: int) -> Job | None:
        """In the control thread: get the plan of an iteration and compare it with all ranks."""
        if self._is_over(number):
            return None
        with doing(Activity.AWAITING_PLAN):
            planned = self.feed.next()
        records = self.postbox.take(number) if self.rank == 0 and planned is not None else []
        measures = self.measures.copy()
        measures[CPU] = time.process_time()
        if not self.trains:
            measures[ITERATION] = self.iteration
        with doing(Activity.WAITING):
            agreement = agree(
                self._control,
                planned,
                self.feed.own_digest,
                self.should_stop(),
                records,
                measures,
                save=self.rank == 0 and self.should_save(),
                rest=self.rank == 0 and self.should_rest(),
                publish=self.rank == 0 and self.should_publish(),
                replicas=self._replica_digests.pop(number, None),
            )
        if planned is None:
            self.ended = True
            self._last = number - 1
            return None
        self.on_agreed(number, self._control)
        if agreement.stop or agreement.save or agreement.rest or agreement.publish:
            self._stopped, self._save_due, self._last = agreement.stop, agreement.save, number
            self._rest_due, self._publish_due = agreement.rest, agreement.publish
        for record in agreement.records:
            self.feed.receive(record)
        if not self._is_over(number + 1):
            self.feed.allow(number + 1)  # only now: all planners have this one's control records
        job = Job(planned.plan, self.mover.phases_of(planned.plan, early=self.early), planned.samples)
        job.seconds["dispatch"] = planned.decision_seconds
        job.seconds["reading"] = planned.reading_seconds
        job.measures = agreement.measures
        job.ready_at = time.perf_counter()
        return job

    def _carry_out(self, first: int) -> None:
        """In the moves thread: carry out a whole segment."""
        number = first
        job = self._take(number)
        if job is not None:
            self.mover.early(job)
        while job is not None:
            # Before training begins, see `await_agreements`; and before rows move: plans are made while
            # training waits for rows and sums, not while it computes.
            self._plan(number + AHEAD + 1)
            self.mover.late(job)
            iteration = self._iterations[number]
            iteration.ready.set_result(job)
            following = self._take(number + 1)
            if following is not None:
                self.mover.early(following)
            trained = iteration.trained.wait() if self.trains else None
            self.mover.finish(job, trained)
            self.samples += len(job.plan.worker)
            if not self.trains:
                self.iteration = number + 1
                progressed(self.iteration)
            del self._iterations[number]  # frees its plan
            job, number = following, number + 1
        if number in self._iterations:
            self._iterations[number].ready.set_result(None)
        self.mover.wait_sent()

    def _take(self, number: int) -> Job | None:
        if number not in self._iterations:
            return None
        wanted = time.perf_counter()
        with doing(Activity.AWAITING_PLAN):
            job = self._iterations[number].job.wait()
        if job is not None:
            job.slack_seconds = wanted - job.ready_at
        return job
