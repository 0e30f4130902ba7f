"""The same trace under several mechanisms: what `rowhaul simulate` does once the data can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rowhaul.errors import ConfigError
from rowhaul.schedule import Scheduler, ScheduleSettings
from rowhaul.schedule.sizes import apportion
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.measure import Batches, MakeScheduler, Span, compile_kernels, measure
from rowhaul.simulate.results import BEST_SUBSET, EQUAL, Outcome
from rowhaul.simulate.shares import (
    Candidate,
    Objective,
    Runs,
    Shares,
    balance,
    equal_shares,
    subset_candidates,
)

TRIAL_ITERATIONS = 30  # after the warm-up, for each candidate of shares
FINALISTS = 3  # that run over the whole trace: its beginning is not all of it

Progress = Callable[[str, int, int], None]  # what is under way, iterations of it done, and in all


@dataclass(frozen=True)
class Simulation:
    """A trace, a cluster and the settings that all mechanisms have in common.

    Args:
        batches: gives the trace from its beginning, each time it is called.
        batch_size: samples of a whole batch, over all workers.
        schedule: the settings of the scheduler; its dispatcher and shares are replaced by those that are run.
        model: links and compute speed.
        iterations: batches of the trace to run, the warm-up included; fewer where it ends earlier.
        warmup: iterations at the beginning that no average counts.
        progress: called with what is under way.
        decision_budget: seconds that a decision may take, for dispatchers that can adapt to it.
        make_scheduler: of another kind than usual.
    """

    batches: Batches
    batch_size: int
    schedule: ScheduleSettings
    model: TimeModel
    iterations: int
    warmup: int
    progress: Progress = lambda stage, done, total: None
    decision_budget: float | None = None
    make_scheduler: MakeScheduler = Scheduler

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"a batch needs at least 1 sample; got {self.batch_size}")
        if not 0 <= self.warmup < self.iterations:
            raise ConfigError(
                f"a warm-up of {self.warmup:,} leaves none of {self.iterations:,} iterations to measure; "
                "it must be at least 0 and below the number of iterations"
            )

    def run(
        self, mechanisms: Sequence[str], shares: Shares | Literal["auto"] | None = None, compare: bool = True
    ) -> tuple[Outcome, ...]:
        """The outcome of every mechanism, in order.

        Args:
            mechanisms: names of dispatchers.
            shares: a weight per worker; None divides equally; "auto" finds the best ones.
            compare: after each mechanism also the same with equal shares on all workers (where
                ``shares`` are others) and on the subset of workers that is best for it.
        """
        repeated = sorted({name for name in mechanisms if mechanisms.count(name) > 1})
        if repeated:
            raise ConfigError(f"the mechanism {repeated[0]!r} is named twice; name each once")
        for name in mechanisms:
            self.schedule.with_dispatcher(name)  # complains before anything has run
        return tuple(outcome for name in mechanisms for outcome in self._run_one(name, shares, compare))

    def _run_one(self, name: str, shares: Shares | Literal["auto"] | None, compare: bool) -> list[Outcome]:
        """A mechanism and its comparisons."""
        compile_kernels(self.batches, self.schedule.with_dispatcher(name), self.make_scheduler)
        objective = Objective(self.model.computes)
        trials, whole = Runs(self._try, objective), Runs(self._measure, objective)
        num_workers = self.schedule.topology.num_workers
        equal = (name, equal_shares(range(num_workers), num_workers, self.batch_size))
        if shares == "auto":
            subset = self._best_subset(equal, trials, whole)
            outcomes = {"": self._best_shares(name, trials, whole, [equal[1], subset.shares])}
        else:
            given = (name, tuple(apportion(self.batch_size, shares).tolist())) if shares else equal
            outcomes = {"": whole.require(given)}
        if compare:
            outcomes |= {EQUAL: whole.require(equal)} if shares else {}
            outcomes[BEST_SUBSET] = self._best_subset(equal, trials, whole)
        return [replace(outcome, name=name + suffix) for suffix, outcome in outcomes.items()]

    def _best_subset(self, equal: Candidate, trials: Runs, whole: Runs) -> Outcome:
        """The mechanism with equal shares on the workers where that is best: some, or all of them.

        Worker 0 is always among them, as in training.
        """
        subsets = trials.ranked(subset_candidates(trials, equal, self.model))
        best = whole.ranked([*subsets[:FINALISTS], equal])
        return whole.require(best[0] if best else equal)  # whose error says what is wrong

    def _best_shares(self, name: str, trials: Runs, whole: Runs, known: list[Shares]) -> Outcome:
        """The mechanism with the best shares found, never worse than those already known."""
        candidates = [
            (dispatch, shares)
            for dispatch in _variants(name)
            for start in known
            for shares in balance(trials, dispatch, start, self.model)
        ]
        finalists = [(name, shares) for shares in known] + trials.ranked(candidates)[:FINALISTS]
        return whole.require(whole.ranked(finalists)[0])

    def _measure(self, dispatch: str, shares: Shares) -> Outcome:
        return self._outcome(dispatch, shares, dispatch, Span(self.iterations, self.warmup))

    def _try(self, dispatch: str, shares: Shares) -> Outcome:
        num_training = sum(share > 0 for share in shares)
        stage = f"{dispatch}: trying {num_training} workers"
        span = Span(min(self.iterations, self.warmup + TRIAL_ITERATIONS), self.warmup)
        return self._outcome(dispatch, shares, stage, span)

    def _outcome(self, dispatch: str, shares: Shares, stage: str, span: Span) -> Outcome:
        schedule = replace(self.schedule, dispatcher=dispatch, shares=shares)
        return measure(
            self.batches,
            self.batch_size,
            schedule,
            self.model,
            span,
            lambda done: self.progress(stage, done, span.iterations),
            self.decision_budget,
            self.make_scheduler,
        )


def names_compared(
    mechanisms: Sequence[str], shares: Shares | Literal["auto"] | None, compare: bool
) -> list[str]:
    """The names of the outcomes that `Simulation.run` gives."""
    suffixes = ["", *([EQUAL] if shares is not None else []), BEST_SUBSET] if compare else [""]
    return [name + suffix for name in mechanisms for suffix in suffixes]


def _variants(name: str) -> tuple[str, ...]:
    """The dispatchers to try for a mechanism whose shares are free."""
    if name.partition(":")[0] == "joint" and "objective=" not in name:
        return name, f"{name}:objective=makespan"
    return (name,)
