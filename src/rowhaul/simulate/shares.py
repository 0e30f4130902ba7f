"""How many samples each worker should train: subsets of workers, and shares that even out their times.

The rows that a worker moves depend on its share, the dispatcher and the data, in a way that only
trials show. So candidates are tried on the first iterations of the trace itself: worker 0 and those
with the best links alone, in equal shares, for several sizes of the subset; then, from there, a few
steps that give more samples to those who are done early and fewer to those who are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.sizes import apportion
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Floats
from rowhaul.simulate.results import Outcome

MAX_SUBSETS = 8  # tried at most
BALANCING_STEPS = 5
_POWERS = (0.1, 2.0)  # with which a worker's time is believed to grow with its share
_APPORTION_STEPS = 1 << 20  # real-valued shares are rounded to this fineness before they become samples

Shares = tuple[int, ...]
Candidate = tuple[str, Shares]  # a dispatcher, and samples per worker


@dataclass(frozen=True)
class Objective:
    """What shares are chosen for: the modelled iteration, or, if only bytes take time, the slowest link."""

    computes: bool

    def __call__(self, outcome: Outcome) -> float:
        """Seconds an iteration; smaller is better."""
        return outcome.iteration_seconds if self.computes else outcome.slowest_link_seconds

    def __str__(self) -> str:
        return "modelled iteration time" if self.computes else "slowest link"


class Runs:
    """Runs a trace, or its beginning, with different shares, each once, and remembers what came out.

    Args:
        run: the outcome of a dispatcher with some shares; a `ConfigError` where they cannot run, such as a
            cache that is too small for its worker's share.
        objective: what counts.
    """

    def __init__(self, run: Callable[[str, Shares], Outcome], objective: Objective) -> None:
        self._run = run
        self._objective = objective
        self._outcomes: dict[Candidate, Outcome | ConfigError] = {}

    def outcome(self, candidate: Candidate) -> Outcome | None:
        """What these shares give; None where they cannot run."""
        try:
            return self.require(candidate)
        except ConfigError:
            return None

    def require(self, candidate: Candidate) -> Outcome:
        """What these shares give, or the error that says why they cannot run."""
        if candidate not in self._outcomes:
            try:
                self._outcomes[candidate] = self._run(*candidate)
            except ConfigError as error:
                self._outcomes[candidate] = error
        result = self._outcomes[candidate]
        if isinstance(result, ConfigError):
            raise result
        return result

    def ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates that can run, best first; of equals, the earlier one."""
        scored = {
            candidate: self._objective(outcome)
            for candidate in candidates
            if (outcome := self.outcome(candidate)) is not None
        }
        return sorted(scored, key=scored.__getitem__)


def nested_subsets(seconds_per_sample: Sequence[float]) -> list[tuple[int, ...]]:
    """The one quickest worker, the two quickest, ... all: every size, or `MAX_SUBSETS` of them.

    Sizes at which the next worker is slower than the ones before are always among those kept.
    """
    num_workers = len(seconds_per_sample)
    order = sorted(range(num_workers), key=lambda worker: (seconds_per_sample[worker], worker))
    ordered = [seconds_per_sample[worker] for worker in order]
    steps = [size for size in range(1, num_workers) if ordered[size] > ordered[size - 1]]
    spread = np.unique(np.geomspace(1, num_workers, MAX_SUBSETS).round().astype(int)).tolist()
    wanted = [num_workers, *steps, *spread, *range(1, num_workers)]
    sizes = sorted(list(dict.fromkeys(wanted))[:MAX_SUBSETS])
    return [tuple(sorted(order[:size])) for size in sizes]


def equal_shares(workers: Sequence[int], num_workers: int, batch_size: int) -> Shares:
    """The batch divided equally among some of the workers."""
    chosen = [1 if worker in workers else 0 for worker in range(num_workers)]
    return tuple(apportion(batch_size, chosen).tolist())


def subset_candidates(trials: Runs, equal: Candidate, model: TimeModel) -> list[Candidate]:
    """Equal shares on nested subsets of the workers, in order of the time that an equal share takes each.

    Worker 0 is in all of them: it takes part in sums even without a share, so training keeps it.
    """
    dispatch, shares = equal
    num_workers, batch_size = len(shares), sum(shares)
    outcome = trials.outcome(equal)
    speeds = np.array(model.links.worker_speeds)
    # Bytes that a sample moves, from all workers: a worker's own would be noise between equals.
    moved = 0.0 if outcome is None else float(outcome.link_seconds @ speeds)
    seconds = np.array(model.compute_seconds) * batch_size + (moved or 1.0) / speeds
    seconds = seconds / num_workers + _message_seconds(model)
    seconds[0] = 0.0
    subsets = nested_subsets(seconds.tolist())
    return [(dispatch, equal_shares(subset, num_workers, batch_size)) for subset in subsets]


def _message_seconds(model: TimeModel) -> Floats:
    """What messages cost each worker, however small they are: it sends one and receives one."""
    return 2 * model.links.rank_latencies()[: len(model.compute_seconds)]


def balance(trials: Runs, dispatch: str, start: Shares, model: TimeModel) -> list[Shares]:
    """Shares on the way from ``start`` to equal times of all workers, a few steps of it, ``start`` first.

    Workers of equal speed keep equal shares. A worker's time is taken to grow with a power of its
    share: proportionally at first, then as its last two trials say (rows that are needed
    anyway make it grow more slowly). Each step solves for equal times.
    """
    kinds = _kinds(model, start)
    counts = np.array([len(kind) for kind in kinds])
    steps = [start]
    growth: _Growth | None = None
    for _ in range(BALANCING_STEPS):
        outcome = trials.outcome((dispatch, steps[-1]))
        if outcome is None:
            break
        seconds = outcome.link_seconds + outcome.compute_seconds + _message_seconds(model)
        samples_of_kind = np.array([np.mean([steps[-1][worker] for worker in kind]) for kind in kinds])
        seconds_of_kind = np.array([seconds[list(kind)].mean() for kind in kinds])
        if not seconds_of_kind.any():
            break  # nothing takes any time
        growth = _Growth.seen(samples_of_kind, seconds_of_kind, growth)
        weights = np.zeros(len(start))
        for kind, share in zip(kinds, growth.even_out(counts, sum(start)), strict=True):
            weights[list(kind)] = share
        rounded = (weights / weights.max() * _APPORTION_STEPS).round().astype(int).tolist()
        step = tuple(apportion(sum(start), rounded).tolist())
        if step in steps:
            break
        steps.append(step)
    return steps


@dataclass(frozen=True)
class _Growth:
    """What a worker of each kind takes for how many samples: seconds at the latest trial, and a power."""

    samples: Floats
    seconds: Floats
    power: Floats

    @classmethod
    def seen(cls, samples: Floats, seconds: Floats, before: _Growth | None) -> _Growth:
        """Learn from a trial."""
        # A kind that has idled gets the benefit of the doubt: a small time, so that it is given more.
        seconds = np.maximum(seconds, seconds.max() / 100)
        if before is None:
            return cls(samples, seconds, np.ones(len(samples)))
        moved = (samples > 0) & (samples != before.samples)  # without samples there is nothing to learn
        samples, seconds = np.where(moved, samples, before.samples), np.where(moved, seconds, before.seconds)
        growth = np.log(samples / before.samples, where=moved, out=np.ones(len(samples)))
        power = np.log(seconds / before.seconds) / growth
        return cls(samples, seconds, np.where(moved, power.clip(*_POWERS), before.power))

    def even_out(self, counts: npt.NDArray[np.int64], batch_size: int) -> Floats:
        """Samples for a worker of each kind that take all the same time, given how many there are."""

        def samples_in(seconds: float) -> Floats:
            return np.asarray(self.samples * (seconds / self.seconds) ** (1 / self.power))

        low, high = 0.0, float(self.seconds.max())
        while counts @ samples_in(high) < batch_size:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if counts @ samples_in(middle) < batch_size else (low, middle)
        return samples_in(high)


def _kinds(model: TimeModel, start: Shares) -> list[tuple[int, ...]]:
    """The workers that train, grouped by link and compute speed."""
    by_speed: dict[object, list[int]] = {}
    for worker, (link, seconds) in enumerate(zip(model.links.workers, model.compute_seconds, strict=True)):
        if start[worker]:
            by_speed.setdefault((link, seconds), []).append(worker)
    return [tuple(workers) for workers in by_speed.values()]
