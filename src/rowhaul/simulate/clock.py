"""How long the iterations of a schedule would take: the time model.

A `Clock` is shown plan after plan and answers with seconds. It follows what the runtime does, phase by
phase (`rowhaul.schedule.phases`), on links that are fluid (`rowhaul.simulate.timeline`); what it assumes
is written in `ASSUMPTIONS`, which every table and report of the simulator repeats. In short:

    compute -> sum of dense gradients ->                            next iteration
            -> after -> late first, late second of the next one ->
    early first, early second of the next one ->
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowhaul.errors import ConfigError
from rowhaul.schedule.phases import Phase, phases_of
from rowhaul.schedule.plan import Plan
from rowhaul.simulate.links import Floats, Links
from rowhaul.simulate.smoothing import EvenOut
from rowhaul.simulate.timeline import Messages, Network, Sums, Timeline

ASSUMPTIONS = (
    "Every worker and store has one full-duplex link; nothing between the links is a bottleneck.",
    "A message is all that one rank sends to another in one phase. It takes the latencies of both ends, and "
    "its bytes over the speed of the slower one. A link works through its messages without gaps, in the "
    "order in which they start; those that start together have equal parts of it.",
    "An iteration has phases. A message starts when both of its ends have reached its phase; a rank enters "
    "the next phase when it has received everything of this one, and does not wait for what it sends. A "
    "worker computes, seconds per sample times samples. Then come two phases of rows that the next iteration "
    "needs. First: pushes, and pulls of rows that nobody pushes. Second: pulls of the pushed rows, and what "
    "gatherers send to peers.",
    "Moves of rows at rest are early: they have two phases of their own before these, which each rank enters "
    "when the iteration begins, and share the links with everything else. The first iteration has none "
    "before it: all its moves come first.",
    "Beside the moves, worker 0 and all that train sum dense gradients and replicated rows (moves wait "
    "for the sum if there are such rows), in the quickest of several ways: everyone sends everything to "
    "everyone; or each adds up a part and sends the sum to all others, parts as large as its link is "
    "fast: over equal links 2(n-1)/n of the bytes travel each way over each, over a slow one the bytes "
    "once, in buckets whose sums travel beside the next one's parts. Rows that are pushed after training "
    "(full synchronisation, no look-ahead) have a phase before those of the next iteration.",
    "All start an iteration together: when all have trained and have its rows.",
    "Steps at the stores, memory copies, serialisation and the decision itself take no time: decisions are "
    "made beside the iteration before, and their time is shown for comparison.",
    "Total cost adds up bytes over bandwidth for every move and every worker link that it crosses, as if "
    "nothing happened at the same time (the papers' measure); the slowest link is the largest part of it on "
    "one worker's link.",
)

EVENED_OUT = (
    "Evened out: early moves may use the room that links have in any iteration since their rows are at rest, "
    "as far back as the look-ahead reaches, those needed first going first. Training does not do this.",
)


@dataclass(frozen=True)
class TimeModel:
    """What the clock knows of the cluster besides the plan."""

    links: Links
    compute_seconds: tuple[float, ...]  # per sample, of each worker
    dense_bytes: int = 0  # summed over the workers in every iteration
    early_reach: int = 1  # iterations before its own in which an early move may travel
    dense_links: Links | None = None  # of the workers, for sums; None: they share the links of the rows
    dense_seconds: float | None = None  # that a sum takes, as measured, on links of its own; None: modelled
    sum_weight: float = 1.0  # what a byte of a sum costs, as measured, of a byte that travels
    half_sum_after: float = 1.0  # the part of its compute after which a worker sums half of its gradients

    def __post_init__(self) -> None:
        num_workers = len(self.links.workers)
        if len(self.compute_seconds) != num_workers:
            raise ConfigError(
                f"compute times name {len(self.compute_seconds)} workers, but there are {num_workers}"
            )
        if not all(0 <= seconds < math.inf for seconds in self.compute_seconds):
            raise ConfigError(f"compute times must be finite and not negative; got {self.compute_seconds}")
        if self.dense_bytes < 0:
            raise ConfigError(f"the bytes of the dense model must not be negative; got {self.dense_bytes}")
        if self.early_reach < 1:
            raise ConfigError(f"early moves need 1 iteration or more to travel in; got {self.early_reach}")
        if self.dense_links is not None and len(self.dense_links.workers) != num_workers:
            raise ConfigError(
                f"dense links name {len(self.dense_links.workers)} workers, but there are {num_workers}"
            )
        if self.dense_seconds is not None and not 0 <= self.dense_seconds < math.inf:
            raise ConfigError(
                f"seconds of the dense sum must be finite and not negative; got {self.dense_seconds}"
            )
        if not 0 <= self.half_sum_after <= 1:
            raise ConfigError(f"half a sum begins in the compute, from 0 to 1; got {self.half_sum_after}")

    @property
    def computes(self) -> bool:
        """Whether anything takes time besides bytes on links: computing, or the latency of messages."""
        latencies = self.links.rank_latencies()
        return any(self.compute_seconds) or bool(self.dense_seconds) or bool(latencies.any())

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on, for reports."""
        return ASSUMPTIONS + (EVENED_OUT if self.early_reach > 1 else ())


# The phases of a `Timeline`; those of a kind come one after the other.
_BEFORE, _EARLY, _HALF_SUMS, _SUMS, _LATE = (0, 1, 2, 3), (4, 5), (6, 7, 8), (9, 10, 11), (12, 13, 14)


@dataclass(frozen=True)
class _Iteration:
    """What an iteration does by itself, whatever travels beside it."""

    number: int
    before: tuple[Messages, ...]  # its own moves, where there is no iteration that they travel beside
    compute_seconds: Floats  # workers
    sums: tuple[Messages, ...]  # of the half that begins early, if one does, and of the others
    after: Messages
    has_replicated: bool  # rows, whose gradients are in the sum


class Clock:
    """Turns plans, shown in order, into seconds.

    An iteration's time is known once the next plan has shown what travels beside it, so `observe` answers
    for the iteration before, and `finish` for the last.

    Args:
        model: links and compute speed.
        training: the workers that take part in sums: those that train at all, and in training also worker 0
            without a share (`Plan.summing_workers`).
    """

    def __init__(self, model: TimeModel, training: Sequence[int]) -> None:
        self._model = model
        self._rows = Network(model.links)
        self._dense = self._rows if model.dense_links is None else Network(model.dense_links, self._rows.end)
        self._num_ranks = len(self._rows.speeds)
        self._training = np.array(training, np.int64)
        self._sums = Sums(self._dense, training if model.dense_seconds is None else ())
        self._even_out = EvenOut(self._rows, model.early_reach - 1) if model.early_reach > 1 else None
        # One worker has nothing to sum.
        self._dense_seconds = (model.dense_seconds or 0.0) if len(self._training) > 1 else 0.0
        self._open: _Iteration | None = None  # observed last

    def observe(self, plan: Plan) -> float | None:
        """Seconds of the iteration before this plan's, or None before the first."""
        moves, phases = plan.moves, phases_of(plan).moves
        pair = moves.source.astype(np.int64) * self._num_ranks + moves.target
        num_bytes = moves.num_bytes.astype(np.float64)
        first, second, late_first, late_second, after = (
            Messages.between(pair[phases == phase], num_bytes[phases == phase], self._num_ranks)
            for phase in Phase
        )
        previous, before = None, (Messages.none(),) * len(_BEFORE)
        if self._open is None:
            before = (first, second, late_first, late_second)
        else:
            if self._even_out:
                first, second = self._even_out.left(moves, phases)
            previous, timeline = self._close(self._open, (first, second), (late_first, late_second))
            if self._even_out:
                self._even_out.add(self._open.number, self._room(previous, timeline))
        samples = np.bincount(plan.worker, minlength=plan.num_workers)
        self._open = _Iteration(
            plan.iteration,
            before,
            samples * np.array(self._model.compute_seconds),
            self._summed(plan.all_reduce_bytes),
            after,
            plan.all_reduce_bytes > 0,
        )
        return previous

    def _summed(self, all_reduce_bytes: int) -> tuple[Messages, ...]:
        num_bytes = round(self._model.sum_weight * (self._model.dense_bytes + all_reduce_bytes))
        early = num_bytes // 2 if self._model.half_sum_after < 1 else 0
        return (*self._sums.exchanges(early), *self._sums.exchanges(num_bytes - early))

    def finish(self) -> float:
        """Seconds of the iteration observed last, with no moves of another beside it."""
        assert self._open is not None
        nothing = Messages.none(), Messages.none()
        return self._close(self._open, nothing, nothing)[0]

    def link_seconds(self, plan: Plan) -> Floats:
        """Each worker's part of the total cost: bytes of rows that cross its link, over bandwidth."""
        moves, num_ranks = plan.moves, self._num_ranks
        crossing = np.zeros(num_ranks)
        for end in (moves.source, moves.target):
            crossing += np.bincount(end, moves.num_bytes, num_ranks)
        # Of a sum, every part that is sent crosses its sender's and its receiver's link; counted as if equal.
        count = len(self._training)
        crossing[self._training] += 4 * (count - 1) / max(count, 1) * plan.all_reduce_bytes
        return np.asarray((crossing / self._rows.speeds)[: plan.num_workers])

    def _close(
        self, iteration: _Iteration, early: tuple[Messages, Messages], late: tuple[Messages, Messages]
    ) -> tuple[float, Timeline]:
        """Seconds of an iteration beside which these moves of the next one travel."""
        timeline = Timeline(
            [(messages, self._rows) for messages in (*iteration.before, *early)]
            + [(messages, self._dense) for messages in iteration.sums]
            + [(messages, self._rows) for messages in (iteration.after, *late)]
        )
        workers = slice(len(iteration.compute_seconds))

        def end() -> float:
            ready = self._ready(timeline)
            computed = ready.copy()
            computed[workers] += iteration.compute_seconds
            summed = ready.copy()
            summed[workers] += self._model.half_sum_after * iteration.compute_seconds
            for phase in _HALF_SUMS:
                summed = timeline.arrivals(phase, summed)
            summed = np.maximum(summed, computed)
            for phase in _SUMS:
                summed = timeline.arrivals(phase, summed)
            trained = summed[workers].max() + self._dense_seconds
            moved = ready
            for phase in _EARLY:
                moved = timeline.arrivals(phase, moved)
            moved = moved.copy()
            moved[workers] = np.maximum(moved, trained if iteration.has_replicated else computed)[workers]
            for phase in _LATE:
                moved = timeline.arrivals(phase, moved)
            return float(max(moved.max(), trained))

        return timeline.solve(end), timeline

    def _room(self, seconds: float, timeline: Timeline) -> Floats:
        """The seconds of an iteration that each link of the rows has nothing to do beside the training."""
        busy = timeline.busy_seconds((*_EARLY, *_HALF_SUMS, *_SUMS, *_LATE))
        return np.asarray(seconds - np.tile(self._ready(timeline), 2) - busy[: self._rows.end])

    def _ready(self, timeline: Timeline) -> Floats:
        """When each rank has the rows of the iteration: at once, but in the first."""
        begin = np.zeros(self._num_ranks)
        for phase in _BEFORE:
            begin = timeline.arrivals(phase, begin)
        return begin
