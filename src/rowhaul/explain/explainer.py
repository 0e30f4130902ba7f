"""`Explainer`: measures one rank of a cluster, and on rank 0 puts together what all have measured.

Every ``every`` iterations ranks exchange their numbers after they have agreed on a plan, in the control
thread; the iterations in between exchange nothing more than usual. Rank 0 counts the moves of all ranks
itself, as it has every plan, in a thread of its own, so that training does not wait for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rowhaul import _activity
from rowhaul._threads import Future, SerialExecutor
from rowhaul.explain.account import Account, RunFacts
from rowhaul.explain.explain_file import ExplainFile, Line
from rowhaul.explain.links import MeasuredLinks
from rowhaul.explain.rank_report import RankReport, longest, seconds_of
from rowhaul.explain.spans import Recorder
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Plan
from rowhaul.transport.base import Collective, gather_texts

_log = logging.getLogger(__name__)

Show = Callable[[Line], None]

_BETWEEN_SHOWN = 30.0  # seconds, at least, between two summaries on the screen
_MOST_PENDING = 8  # plans that rank 0 has not counted yet
_KEPT_TIMES = 16  # of agreements
_REPORTED_PHASES = 20  # late phases, two an iteration at most, that spans are reported of
_STARTING = 3  # iterations that compile kernels and try ways of summing: their seconds say nothing


class Explainer:
    """Measures a rank while it trains.

    Args:
        runtime: of this rank; its links are measured from now on.
        every: iterations between two reports, the same on all ranks.
        facts: of the run; None on all ranks but 0.
        folder: of the run, on rank 0; None writes nothing.
    """

    def __init__(self, runtime: Runtime, every: int, facts: RunFacts | None, folder: Path | None) -> None:
        self.show: Show = lambda detail: None  # a summary is due
        self._runtime, self._every, self._first = runtime, every, runtime.iteration
        self._recorder = Recorder()
        self._recorder.counts = False
        self._account = None if facts is None else Account(facts)
        self._file = ExplainFile(folder, facts.first_step if facts is not None else 0)
        self._agreed: deque[tuple[int, float]] = deque(maxlen=_KEPT_TIMES)
        self._begins: deque[float] = deque(maxlen=_REPORTED_PHASES)
        self._arrived: deque[list[bytes]] = deque()  # reports of all ranks, not yet read
        self._num_trained = self._num_left_out = 0  # iterations of this worker
        self._shown_at: float | None = None
        self._num_intervals = 0
        self._has_failed = False
        self._sent_before = self._sent()
        self._thread = None if facts is None else SerialExecutor("explain", runtime.failure)
        self._pending: deque[Future[None]] = deque()  # iterations to add
        mover = runtime.mover
        mover.links = MeasuredLinks(mover.links, self._recorder.waited_for)
        mover.on_phase = self._phase_ended
        runtime.on_agreed = self._on_agreed
        _activity.watch(self._ended)

    def iterated(self, job: Job) -> None:
        """Add an iteration that is over on this worker."""
        takes_part = self._runtime.rank in job.plan.summing_workers
        has_started = job.plan.iteration - self._first >= _STARTING
        self._recorder.settle(job.plan.iteration, counts=takes_part and has_started)
        if has_started and takes_part:
            self._recorder.seconds["compute"] += job.seconds["compute"]
            self._num_trained += 1
        elif has_started:
            self._num_left_out += 1
        if self._thread is not None:
            plan = job.plan
            self._pending.append(self._thread.submit(lambda: self._carefully(lambda: self._add(plan))))
            if len(self._pending) > _MOST_PENDING:
                self._pending.popleft().wait()

    def _carefully(self, call: Callable[[], None]) -> None:
        """Make a call unless one has failed: training goes on without explanations."""
        if self._has_failed:
            self._arrived.clear()
            return
        try:
            call()
        except Exception:
            self._has_failed = True
            _log.exception("training goes on, but is no longer explained")

    def _add(self, plan: Plan) -> None:
        """On rank 0: count the moves of an iteration; write and show what is due."""
        account = self._account
        assert account is not None
        account.traffic.add(plan)
        step = plan.iteration + 1
        if self._arrived:
            self._read(self._arrived.popleft())
            self._num_intervals += 1
            self._file.append(account.interval(step))
            if _is_power_of_two(self._num_intervals):
                self._write_detail(step, final=False)
            now = time.monotonic()
            if self._shown_at is None or now - self._shown_at >= _BETWEEN_SHOWN:
                self._shown_at = now
                self.show(account.detail(step))

    def finish(self) -> None:
        """Put together the last numbers of all ranks; a collective call, between two segments."""
        report = self._report(with_spans=True).pack()
        texts = self._runtime.in_control(lambda control: gather_texts(control, report)).wait()
        if self._thread is not None:
            self._thread.submit(lambda: self._carefully(lambda: self._end(texts))).wait()

    def _end(self, texts: list[bytes]) -> None:
        account = self._account
        if account is not None and account.traffic.iterations:
            self._read(texts)
            step = self._runtime.iteration
            self._file.append(account.interval(step))
            self.show(self._write_detail(step, final=True))

    def close(self) -> None:
        """Measure no longer."""
        _activity.watch(None)
        if self._thread is not None:
            self._thread.close()
        self._file.close()

    def _write_detail(self, step: int, final: bool) -> Line:
        assert self._account is not None
        detail = self._account.detail(step, final)
        self._file.append(detail)
        if (timeline := self._account.timeline(step)) is not None:
            self._file.append(timeline)
        return detail

    def _read(self, texts: list[bytes]) -> None:
        assert self._account is not None
        self._account.reports = [RankReport.unpack(text) for text in texts]

    def _on_agreed(self, number: int, control: Collective) -> None:
        """In the control thread, on all ranks: note when; exchange reports if it is time."""
        self._agreed.append((number, time.monotonic()))
        done = number - self._first
        if done and done % self._every == 0:
            texts = gather_texts(control, self._report(_is_power_of_two(done // self._every)).pack())
            if self._account is not None:
                self._arrived.append(texts)

    def _phase_ended(self, iteration: int, phase: Phase, began: float) -> None:
        if phase in (Phase.LATE_FIRST, Phase.LATE_SECOND):
            self._begins.append(began)
        self._recorder.phase_ended(iteration, phase, began)

    def _ended(
        self, activity: _activity.Activity, around: _activity.Activity, began: float, ended: float
    ) -> None:
        recorder = self._recorder
        recorder.iteration = self._runtime.iteration
        recorder.ended(activity, around, began, ended)
        if not recorder.counts and recorder.iteration - self._first >= _STARTING:
            self._sent_before = self._sent()
            recorder.counts = True

    def _report(self, with_spans: bool) -> RankReport:
        recorder, sent = self._recorder, self._sent()
        if not recorder.counts:  # what the first iterations send is not counted
            sent = self._sent_before
        spans = []
        if with_spans:
            since = self._begins[0] if self._begins else 0.0
            spans = longest(recorder.spans(since))
        served = max(0, self._runtime.iteration - self._first - _STARTING)
        return RankReport(
            iterations=self._num_trained if self._runtime.trains else served,
            left_out=self._num_left_out,
            seconds=seconds_of(recorder),
            waited=dict(recorder.waited),
            received=dict(recorder.received),
            dense_bytes={peer: n - self._sent_before[0].get(peer, 0) for peer, n in sent[0].items()},
            control_bytes={peer: n - self._sent_before[1].get(peer, 0) for peer, n in sent[1].items()},
            agreed=dict(self._agreed),
            spans=spans,
        )

    def _sent(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes sent to each rank for the dense sum and for control, where these are known."""
        groups = self._runtime.groups
        dense, control = (dict(getattr(group, "sent_bytes", {})) for group in groups)
        return dense, control


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
