"""How long the iterations of a schedule would take: the time model.

A `Clock` is shown plan after plan and answers with seconds. What it assumes is written in
`ASSUMPTIONS`, which every table and report of the simulator repeats. In short: an iteration is

    late pushes of all; then each worker pulls its late rows and computes; then all-reduce

with the early moves of the next iteration beside the last two. A move is late if the plan says
that it can only be made now (`Moves.ready` is the running iteration), and early otherwise. Links
are fluid: a node sends and receives at full speed, both at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan
from rowhaul.simulate.links import Floats, Links

ASSUMPTIONS = (
    "Every worker and store has one full-duplex link; nothing between the links is a bottleneck.",
    "A message is all that one rank sends to another in one phase. It keeps each of its two ends busy for "
    "that end's latency plus bytes over bandwidth; a link works through its messages without gaps.",
    "An iteration has phases. Late pushes: all wait until the busiest link is done with them. Late pulls and "
    "compute: each worker computes once it has its rows, seconds per sample times samples. All-reduce, when "
    "the last worker is done: a ring over the workers that train, 2(n-1)/n of the bytes over their slowest "
    "link, and 2(n-1) latencies. Where rows are pushed after training (full synchronisation, no "
    "look-ahead) the pushes come last; the sum is the same.",
    "Early moves, of rows at rest since an earlier iteration, run beside pulls, compute and all-reduce of "
    "the iteration before and share the links with them; only what is left of them then is waited for.",
    "Steps at the stores, memory copies, serialisation and the decision itself take no time: decisions are "
    "made beside the iteration before, and their time is shown for comparison.",
    "Total cost adds up bytes over bandwidth for every move and every worker link that it crosses, as if "
    "nothing happened at the same time (the papers' measure); the slowest link is the largest part of it on "
    "one worker's link.",
)

EVENED_OUT = (
    "Evened out: early moves may use the room that links have in any iteration since their rows are at rest, "
    "as far back as the look-ahead reaches, those needed first going first.",
)


@dataclass(frozen=True)
class TimeModel:
    """What the clock knows of the cluster besides the plan."""

    links: Links
    compute_seconds: tuple[float, ...]  # per sample, of each worker
    dense_bytes: int = 0  # all-reduced in every iteration
    early_reach: int = 1  # iterations before its own in which an early move may travel

    def __post_init__(self) -> None:
        if len(self.compute_seconds) != len(self.links.workers):
            raise ConfigError(
                f"compute times name {len(self.compute_seconds)} workers, "
                f"but there are {len(self.links.workers)}"
            )
        if not all(0 <= seconds < math.inf for seconds in self.compute_seconds):
            raise ConfigError(f"compute times must be finite and not negative; got {self.compute_seconds}")
        if self.dense_bytes < 0:
            raise ConfigError(f"the bytes of the dense model must not be negative; got {self.dense_bytes}")
        if self.early_reach < 1:
            raise ConfigError(f"early moves need 1 iteration or more to travel in; got {self.early_reach}")

    @property
    def computes(self) -> bool:
        """Whether anything takes time besides bytes on links: computing, or the latency of messages."""
        return any(self.compute_seconds) or bool(self.links.rank_latencies().any())

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on, for whoever reads them."""
        return ASSUMPTIONS + (EVENED_OUT if self.early_reach > 1 else ())


@dataclass
class _Window:
    """The part of an iteration in which the early moves of later ones may travel."""

    iteration: int
    push_seconds: float  # before it
    seconds: float
    busy: Floats  # 2 x ranks: seconds that each rank has sent and received in it


class Clock:
    """Turns plans, shown in order, into seconds.

    An iteration's time is known once the next plan has shown what travels early beside it, so
    `observe` answers for the iteration before, and `finish` for the last.

    Args:
        model: links and compute speed.
        training: the workers that train at all; they take part in the all-reduce.
    """

    def __init__(self, model: TimeModel, training: Sequence[int]) -> None:
        self._model = model
        self._speeds = model.links.rank_speeds()
        self._latencies = model.links.rank_latencies()
        self._compute_seconds = np.array(model.compute_seconds)
        self._training = np.array(training, np.int64)
        self._windows: deque[_Window] = deque(maxlen=model.early_reach)  # the last one is still open

    def observe(self, plan: Plan) -> float | None:
        """Seconds of the iteration before this plan's, or None before the first."""
        moves = plan.moves
        early = moves.ready < plan.iteration
        gradients = (moves.payload & Payload.GRADIENT) != 0  # peers put split rows together before they send
        pushed = (moves.kind == Kind.UPDATE_PUSH) | (moves.kind == Kind.EVICT_PUSH) | gradients
        previous = None
        if self._windows:
            self._place_early(moves, early)
            previous = self.finish()
        else:
            early[:] = False  # nothing runs beside which they could travel
        push_seconds = float(self._busy(self._pair_bytes(moves, ~early & pushed)).max())
        pulled = self._pair_bytes(moves, ~early & ~pushed)
        samples = np.bincount(plan.worker, minlength=plan.num_workers)
        computed = float((self._received(pulled)[: plan.num_workers] + samples * self._compute_seconds).max())
        all_reduce, busy = self._all_reduce(self._model.dense_bytes + plan.all_reduce_bytes)
        self._windows.append(
            _Window(plan.iteration, push_seconds, computed + all_reduce, busy + self._busy(pulled))
        )
        return previous

    def finish(self) -> float:
        """Seconds of the iteration observed last, nothing early travelling beside it any more."""
        last = self._windows[-1]
        return last.push_seconds + max(last.seconds, float(last.busy.max()))

    def link_seconds(self, plan: Plan) -> Floats:
        """Each worker's part of the total cost: bytes of rows that cross its link, over bandwidth."""
        moves, num_ranks = plan.moves, len(self._speeds)
        crossing = np.zeros(num_ranks)
        for end in (moves.source, moves.target):
            crossing += np.bincount(end, moves.num_bytes, num_ranks)
        # In a ring every part that is sent crosses its sender's and its receiver's link.
        crossing[self._training] += 2 * _ring_share(len(self._training)) * plan.all_reduce_bytes
        return np.asarray((crossing / self._speeds)[: plan.num_workers])

    def _pair_bytes(self, moves: Moves, chosen: npt.NDArray[np.bool_]) -> Floats:
        """Bytes of the chosen moves, source x target."""
        num_ranks = len(self._speeds)
        pair = moves.source[chosen].astype(np.int64) * num_ranks + moves.target[chosen]
        summed = np.bincount(pair, moves.num_bytes[chosen].astype(np.float64), num_ranks**2)
        return summed.astype(np.float64).reshape(num_ranks, num_ranks)

    def _busy(self, pair_bytes: Floats) -> Floats:
        """Seconds that each rank's link sends (first row) and receives (second row)."""
        sent = np.stack([pair_bytes.sum(axis=1), pair_bytes.sum(axis=0)])
        messages = np.stack([np.count_nonzero(pair_bytes, axis=axis) for axis in (1, 0)])
        return np.asarray(sent / self._speeds + messages * self._latencies)

    def _received(self, pair_bytes: Floats) -> Floats:
        """Seconds until each rank has all that is sent to it: its link and its senders' are done."""
        sending, receiving = self._busy(pair_bytes)
        last_sender = np.where(pair_bytes > 0, sending[:, np.newaxis], 0.0).max(axis=0)
        return np.asarray(np.maximum(receiving, last_sender))

    def _all_reduce(self, num_bytes: int) -> tuple[float, Floats]:
        """Seconds of a ring all-reduce, and how long it keeps each link busy, sending and receiving."""
        busy, training = np.zeros((2, len(self._speeds))), self._training
        if len(training) < 2 or not num_bytes:
            return 0.0, busy
        sent = _ring_share(len(training)) * num_bytes
        latency = 2 * (len(training) - 1) * self._latencies[training]
        busy[:, training] = sent / self._speeds[training] + latency
        return float(sent / self._speeds[training].min() + latency.max()), busy

    def _place_early(self, moves: Moves, early: npt.NDArray[np.bool_]) -> None:
        """Put the early moves of an iteration into the windows before it; the last one waits for the rest."""
        num_ranks = len(self._speeds)
        waiting = np.zeros((num_ranks, num_ranks))
        first = np.maximum(moves.ready, self._windows[0].iteration)
        for window in list(self._windows)[:-1]:
            waiting += self._pair_bytes(moves, early & (first == window.iteration))
            self._fill(window, waiting)
        last = self._windows[-1]
        waiting += self._pair_bytes(moves, early & (first >= last.iteration))
        last.busy += self._busy(waiting)
        last.seconds = max(last.seconds, float(last.busy.max()))

    def _fill(self, window: _Window, waiting: Floats) -> None:
        """Let what is waiting use the room that both ends of it have left in a window."""
        for source, target in np.argwhere(waiting):
            ends = ((0, source), (1, target))
            room = min(
                (window.seconds - window.busy[end] - self._latencies[end[1]]) * self._speeds[end[1]]
                for end in ends
            )
            travels = min(room, waiting[source, target])
            if travels > 0:
                waiting[source, target] -= travels
                for end in ends:
                    window.busy[end] += travels / self._speeds[end[1]] + self._latencies[end[1]]


def _ring_share(num_workers: int) -> float:
    """What part of its bytes each member of a ring all-reduce sends, and receives."""
    return 2 * (num_workers - 1) / num_workers
