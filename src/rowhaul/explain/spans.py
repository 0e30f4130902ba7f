"""What the threads of this rank do when: spans, and how long training waited for whom.

`doing` of `rowhaul._activity` reports what every thread did; `MeasuredLinks` reports how long the moves
thread waited for each other rank. While training waits for an iteration's rows, the moves thread works on
them: what it does in that time is what training waits for.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import NamedTuple

from rowhaul._activity import Activity
from rowhaul.schedule.phases import Phase

TRAINING, ROWS, DENSE, PLANS, AGREEMENT = "training", "rows", "dense sum", "plans", "agreement"
LANES = (TRAINING, ROWS, DENSE, PLANS, AGREEMENT)
_LANE_OF_THREAD = {
    "rowhaul-moves": ROWS,
    "rowhaul-dense": DENSE,
    "rowhaul-planner": PLANS,
    "rowhaul-control": AGREEMENT,
}
COMPUTE, WAIT_DENSE, WAIT_ROWS = "compute", "wait for the dense sum", "wait for rows"
WAIT_PLAN, WAIT_TRAINING, AGREE = "wait for the plan", "wait for training", "agree on the plan"
PLAN, READ, WAIT_DATA, SUM = "plan", "read data", "wait for data", "sum"
PHASE_NAMES = {
    Phase.EARLY_FIRST: "early rows",
    Phase.EARLY_SECOND: "early rows, second",
    Phase.LATE_FIRST: "late rows",
    Phase.LATE_SECOND: "late rows, second",
    Phase.AFTER: "rows after training",
}
_KEPT = 6000  # spans
_RECENT = 300  # spans of the moves thread, at most, in one wait of training
_LEAST_SECONDS = 20e-6  # shorter ones are not kept


class Span(NamedTuple):
    """Something that a thread did; times are of `time.monotonic`."""

    lane: str
    name: str
    began: float
    ended: float
    iteration: int = -1  # -1: not known
    peer: int = -1  # the rank waited for

    def overlap(self, began: float, ended: float) -> float:
        """Return how many seconds of it lie in an interval."""
        return max(0.0, min(self.ended, ended) - max(self.began, began))


class Waits(NamedTuple):
    """What training waited for, in seconds."""

    rows: dict[int, float]  # by the rank that sends them
    plan: float
    data: float
    moving: float  # this rank's own work on rows: packing, unpacking, steps


class Recorder:
    """Collects the spans of one rank, from all of its threads.

    Attributes:
        iteration: the next one to train; the owner keeps it.
        counts: whether seconds are added up; spans are always kept.
        seconds: of the training thread, by name, in settled iterations: compute and all its waits.
        waited: for rows of each rank, by training, in settled iterations.
        received: for rows of each rank, by the moves thread, mostly beside training.
    """

    def __init__(self) -> None:
        self.iteration, self.counts = 0, True
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[int, float] = defaultdict(float)
        self.received: defaultdict[int, float] = defaultdict(float)
        self._spans: deque[Span] = deque(maxlen=_KEPT)
        self._moves: deque[Span] = deque(maxlen=_RECENT)
        self._reads: deque[Span] = deque(maxlen=_RECENT)
        # Of iterations that are not settled: seconds by name, and by the rank whose rows were awaited.
        self._open: defaultdict[int, defaultdict[str | int, float]] = defaultdict(lambda: defaultdict(float))
        self._current = -1  # the iteration that training waits for, or computes
        self._cpu_began = 0.0  # of the training thread, when the step began
        self._peers: list[tuple[int, float, float]] = []  # waits of the moves thread since the last phase

    def ended(self, activity: Activity, around: Activity, began: float, ended: float) -> None:
        """Note an activity that has ended in this thread; a `Watcher`."""
        lane = _LANE_OF_THREAD.get(threading.current_thread().name)
        if lane is None:
            if threading.current_thread() is not threading.main_thread():
                return
            lane = TRAINING
        if around.waits:
            return  # a part of another wait
        if lane == TRAINING:
            self._training_ended(activity, around, began, ended)
        elif lane == ROWS:
            if activity is Activity.AWAITING_PLAN:
                self._move(Span(ROWS, WAIT_PLAN, began, ended))
            elif activity is Activity.WAITING:
                self._add(Span(ROWS, WAIT_TRAINING, began, ended))
        elif lane == DENSE:
            if activity is Activity.SUMMING:
                self._add(Span(DENSE, SUM, began, ended, self.iteration))
        elif lane == PLANS:
            self._plan_ended(activity, began, ended)
        elif activity is Activity.WAITING:
            self._add(Span(AGREEMENT, AGREE, began, ended))
        elif activity is Activity.AWAITING_PLAN:
            self._add(Span(AGREEMENT, WAIT_PLAN, began, ended))

    def waited_for(self, peer: int, began: float, ended: float) -> None:
        """Note that the moves thread has waited for another rank."""
        self._peers.append((peer, began, ended))

    def phase_ended(self, iteration: int, phase: Phase, began: float) -> None:
        """Note a phase, and the waits in it; those outside of phases belong to no iteration."""
        ended = time.monotonic()
        peers, self._peers = self._peers, []
        self._add(Span(ROWS, PHASE_NAMES[phase], began, ended, iteration))
        for peer, first, last in peers:
            if first >= began:
                self.received[peer] += (last - first) * self.counts
                self._move(Span(ROWS, WAIT_ROWS, first, last, iteration, peer))

    def settle(self, iteration: int, *, counts: bool) -> None:
        """Add the seconds of an iteration that is over, or drop them, as of a worker that is left out."""
        found = self._open.pop(iteration, None)
        for name, seconds in found.items() if found and counts else ():
            if isinstance(name, int):
                self.waited[name] += seconds
            else:
                self.seconds[name] += seconds

    def spans(self, since: float) -> list[Span]:
        """Return the spans that ended after a moment."""
        return [span for span in list(self._spans) if span.ended > since]

    def _training_ended(self, activity: Activity, around: Activity, began: float, ended: float) -> None:
        taken = ended - began
        if activity is Activity.COMPUTING:
            self._add(Span(TRAINING, COMPUTE, began, ended, self.iteration - 1))
            self._count("step", taken)
            self._count("cpu", time.thread_time() - self._cpu_began)
        elif activity is Activity.AWAITING_ROWS and around is Activity.NOTHING:
            self._add(Span(TRAINING, WAIT_ROWS, began, ended, self.iteration))
            self._cpu_began, self._current = time.thread_time(), self.iteration
            if self.counts:
                self._count_wait(self.explain_wait(began, ended))
        elif activity is Activity.WAITING and around is Activity.COMPUTING:
            self._count("dense", taken)
            self._add(Span(TRAINING, WAIT_DENSE, began, ended, self.iteration))

    def _count(self, name: str | int, seconds: float) -> None:
        if self.counts:
            self._open[self._current][name] += seconds

    def _count_wait(self, waits: Waits) -> None:
        for peer, seconds in waits.rows.items():
            self._count(peer, seconds)
        self._count("plan", waits.plan)
        self._count("data", waits.data)
        self._count("moving", waits.moving)

    def explain_wait(self, began: float, ended: float) -> Waits:
        """Say what training waited for in an interval, from what the moves and plans threads did in it."""
        rows: defaultdict[int, float] = defaultdict(float)
        plan = data = 0.0
        for span in list(self._moves):
            seconds = span.overlap(began, ended)
            if not seconds:
                continue
            if span.peer >= 0:
                rows[span.peer] += seconds
                continue
            plan += seconds
            first, last = max(span.began, began), min(span.ended, ended)
            data += sum(read.overlap(first, last) for read in list(self._reads))
        data = min(data, plan)
        moving = max(0.0, ended - began - plan - sum(rows.values()))
        return Waits(dict(rows), plan - data, data, moving)

    def _plan_ended(self, activity: Activity, began: float, ended: float) -> None:
        if activity in (Activity.READING, Activity.AWAITING_DATA):
            span = Span(PLANS, READ if activity is Activity.READING else WAIT_DATA, began, ended)
            self._reads.append(span)
            self._add(span)
        elif activity is Activity.PLANNING:
            self._add(Span(PLANS, PLAN, began, ended))

    def _move(self, span: Span) -> None:
        self._moves.append(span)
        self._add(span)

    def _add(self, span: Span) -> None:
        if span.ended - span.began >= _LEAST_SECONDS:
            self._spans.append(span)
