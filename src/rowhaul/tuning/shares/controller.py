"""`ShareController`: watches iterations on rank 0, tries shares, and looks again when conditions change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rowhaul._activity import Activity, doing
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import IdBatch
from rowhaul.schedule.sizes import link_prices
from rowhaul.simulate.links import Link
from rowhaul.train.distributed.left_out import workers_text
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.transport.base import Collective
from rowhaul.tuning.shares.candidates import Costs, Measures, propose
from rowhaul.tuning.shares.drift import SETTLING, Drift
from rowhaul.tuning.shares.links import MeasuredLinks
from rowhaul.tuning.shares.trial import ShareCandidate, ShareTrial

SKIPPED_ITERATIONS = 3  # at the beginning: kernels may compile
OBSERVED_ITERATIONS = 5  # after these, whose compute counts
CHANGED_LINK = 2.0  # the factor by which a link must have changed for another trial
CHECK_SECONDS = 600.0  # between two measurements of the links while workers are left out
CHECK_COST = 0.005  # most of the time that these measurements may take
ALONE = 1.1  # times the compute of one machine in a trial: what it takes alone, dense step and log included

Report = Callable[[str], None]


class ShareController:
    """Decides the shares of a run; every rank has one, and rank 0's decides.

    Args:
        training: the run.
        first_batches: reads the ids of the first global batches of the data.
        links: as measured, the same on all ranks; None where shares are not chosen.
        report: called with lines about the choice.
        decides: whether this rank decides.
        shared_links: whether dense gradients travel over the same links as rows.
    """

    def __init__(
        self,
        training: DistributedTraining,
        first_batches: Callable[[], list[IdBatch]],
        links: MeasuredLinks | None,
        report: Report = lambda text: None,
        *,
        decides: bool = True,
        shared_links: bool = True,
    ) -> None:
        self.decided = False  # the shares of a trial have been chosen
        # Whether another trial is running, which would disturb the times of one of shares; rank 0 asks.
        self.is_disturbed: Callable[[], bool] = lambda: False
        self.may_go_alone = False  # whether one machine goes on without the cluster where it is the quickest
        self.shares_cores = False  # whether others plan on the cores of that machine while it is tried
        self._training, self._first_batches, self._links = training, first_batches, links
        self._report, self._shared_links = report, shared_links
        self._decides = decides and links is not None
        self._links_of_sums = links  # for which ways to sum were chosen; the same on all ranks
        self._dispatcher = str(training.settings.dispatcher)
        self._prices = training.settings.prices  # in force
        self._num_seen = 0
        self._settled_at: int | None = None  # the iteration from which on rows are in place after a trial
        self._observed: deque[Measures] = deque(maxlen=OBSERVED_ITERATIONS)
        self._costs: Costs | None = None
        self._has_begun = False  # to try shares
        self._trial: ShareTrial | None = None
        self._chosen: ShareCandidate | None = None
        self._candidates: list[ShareCandidate] = []  # of the last trial
        self._drift = Drift()
        self._last: float | None = None  # when the iteration before ended
        self._wants_review = False
        self._reason = ""  # for a review, besides links that have changed
        self._too_many: int | None = None  # samples of one worker for which its cache had no room
        self._checked_at, self._check_seconds = time.monotonic(), 0.0

    def resume(self) -> None:
        """Start the clock after a pause: the iteration that comes next cannot be timed."""
        self._last = None

    def is_trying(self) -> bool:
        """Whether shares are being tried in training, will be soon, or were until just now."""
        return self._decides and (self._settled_at is None or self._num_seen < self._settled_at)

    def observe(self, job: Job) -> None:
        """Record an iteration, and decide what follows from it."""
        if not self._decides or job.measures is None:
            return
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last = now
        plan = job.plan
        self._observed.append(job.measures[: plan.num_workers].copy())
        self._num_seen += 1
        samples = np.bincount(plan.worker, minlength=plan.num_workers).tolist()
        if plan.given_up_shares:
            self._give_up(plan.given_up_shares, plan.iteration)
        if self._trial is not None:
            self._try(samples, seconds)
        elif self.is_disturbed():
            pass
        elif not self._has_begun and self._num_seen >= SKIPPED_ITERATIONS + OBSERVED_ITERATIONS:
            self._begin_trial()
        elif self._chosen is not None and seconds is not None and len(plan.worker):
            has_drifted = self._drift.observe(seconds / len(plan.worker))
            if has_drifted:
                self._ask_for_review("iterations take longer than before")

    @property
    def links(self) -> MeasuredLinks | None:
        """As measured last."""
        return self._links

    @property
    def wants_alone(self) -> bool:
        """Whether one machine was found to be the quickest, and may go on alone."""
        return self.may_go_alone and self._trial is None and _is_one(self._chosen)

    def wants_review(self) -> bool:
        """Whether `review` should be called soon: iterations got slower, or links were not measured for long.

        Asked on rank 0 with every plan, in another thread.
        """
        if self.is_disturbed():
            return False
        if self._chosen is not None and self._trial is None and min(self._chosen.shares) == 0:
            rest = seconds_between_checks(self._check_seconds)
            self._wants_review |= time.monotonic() - self._checked_at > rest
        return self._wants_review

    def review(self, control: Collective) -> None:
        """Measure the links again; if they or iterations have changed, begin another trial.

        If links have changed, ways to sum are chosen again, too.

        A collective call of all ranks, between two segments; ``control`` is the group of all ranks.
        """
        began = time.monotonic()
        topology = self._training.settings.topology
        links = self._training.runtime.in_moves(
            lambda mover: MeasuredLinks.measure_over(mover.links, control, topology)
        ).wait()
        self._checked_at, self._check_seconds = time.monotonic(), time.monotonic() - began
        if self._links_of_sums is not None and links.largest_change(self._links_of_sums) >= CHANGED_LINK:
            self._links_of_sums = links
            self._training.runtime.choose_sums_again()
        if self._links is None or not self._decides:
            return
        changed = links.largest_change(self._links)
        reason, self._wants_review, self._reason = self._reason, False, ""
        if not reason and changed < CHANGED_LINK:
            return
        self._report(
            f"shares are looked at again: {reason or 'links have changed'}; the speed of a link changed up "
            f"to {changed:.2f} times"
        )
        self._links = links
        self._begin_trial()

    def _ask_for_review(self, reason: str) -> None:
        self._reason, self._wants_review = reason, True

    def _give_up(self, shares: tuple[int, ...], iteration: int) -> None:
        """Follow the scheduler, which has given up shares."""
        self._too_many = min(max(shares), self._too_many or max(shares))
        self._report(
            f"shares {list(shares)} are given up from iteration {iteration:,} on: a worker needs more rows "
            "than its cache holds; larger caches (--cache) would allow them"
        )
        if self._trial is not None:
            self._trial.give_up(shares)
        if self._chosen is not None and self._chosen.shares == shares:
            self._chosen = None
            if self._trial is None:
                self._ask_for_review("those chosen did not fit into a cache")

    def _begin_trial(self) -> None:
        """Simulate shares while training waits, and post the first candidate."""
        assert self._links is not None
        self._has_begun, self._settled_at = True, None
        known = None
        if self._chosen is not None and self._drift.now < float("inf"):
            known = self._chosen, self._drift.now
        try:
            with doing(Activity.PLANNING):
                self._costs = self._observed_costs()
                settings = replace(self._training.settings, prices=self._latest_prices())
                self._candidates = propose(
                    settings, self._first_batches(), self._links, self._costs, self._too_many
                )
        except Exception as error:  # any shares are correct, only slower
            self._report(f"shares stay as they are: {type(error).__name__}: {error}")
            self._drift.decided(changed=False)
            self._settled_at = self._num_seen
            return
        self.resume()  # the iteration that waited for this is not typical
        self._trial = ShareTrial(self._candidates, known)
        if all(one.num_workers > 1 for one in self._candidates):
            self._report(
                "one machine is not tried: the rows of a batch might not fit into its cache; a larger one "
                "(--cache) would allow it"
            )
        self._report("shares to be tried: " + "; ".join(map(str, self._trial.candidates)))
        if (first := self._trial.next()) is not None:
            self._post(first)
        else:
            self._end_trial(self._trial)

    def _latest_prices(self) -> tuple[int, ...]:
        """Return the prices of links as measured last; post them if they have changed much."""
        assert self._links is not None
        latest = link_prices(self._links.bytes_per_second[: len(self._prices)])
        ratios = np.divide(latest, self._prices)
        if ratios.max() >= CHANGED_LINK * ratios.min():  # only how they compare matters
            self._training.runtime.postbox.post("prices", latest)
            self._prices = latest
        return self._prices

    def _observed_costs(self) -> Costs:
        parameters = self._training.model.parameters()
        dense_bytes = sum(one.numel() * one.element_size() for one in parameters)
        return Costs.observed(
            list(self._observed), dense_bytes, shared_links=self._shared_links, before=self._costs
        )

    def _try(self, samples: Sequence[int], seconds: float | None) -> None:
        """Add an iteration to the trial; post the next candidate, or the quickest in the end."""
        trial = self._trial
        assert trial is not None
        if seconds is not None and self.may_go_alone and np.count_nonzero(samples) == 1:
            # Alone it would only compute: no plans, no messages. Plans of others cost it as much as its rest.
            compute = float(self._observed[-1][0, MEASURES.index("compute")])
            seconds = min(seconds, compute if self.shares_cores else ALONE * compute)
        following = trial.observe(samples, seconds)
        if following is not None:
            self._post(following)
        elif trial.is_over:
            self._end_trial(trial)

    def _end_trial(self, trial: ShareTrial) -> None:
        self._trial = None
        self._settled_at = self._num_seen + SETTLING
        best, before = trial.best(), self._chosen
        self.decided = True
        if best is None:
            self._report("shares stay as they are: no iteration could be timed")
            self._drift.decided(changed=False)
            return
        self._chosen = best
        if trial.candidates:  # otherwise the shares in force were the only ones worth trying
            self._post(best)
        size = sum(best.shares)
        seconds = {one.shares: each * size for one, each in trial.measured()}
        is_new = before is None or before.shares != best.shares
        self._drift.decided(changed=is_new, seconds=seconds[best.shares] / size)
        tried = "; ".join(f"{one}: {each * size * 1e3:.1f} ms" for one, each in trial.measured())
        self._report(
            f"shares {list(best.shares)} with {best.dispatcher} ({best.kind}): "
            f"{seconds[best.shares] * 1e3:.1f} ms an iteration, decided after {trial.iterations} iterations "
            f"of trial. Tried: {tried}"
        )
        self._report_left_out(best, seconds)
        self._wants_review |= self.wants_alone

    def _report_left_out(self, best: ShareCandidate, seconds: dict[tuple[int, ...], float]) -> None:
        """Name the workers that are left out, and say why; those with the same reason together."""
        assert self._links is not None
        alike: dict[tuple[float, str], list[int]] = {}  # by the best time with them, and their link
        for worker, share in enumerate(best.shares):
            if not share:
                with_it = [each for shares, each in seconds.items() if shares[worker]]
                link = str(Link(_short(self._links.bytes_per_second[worker])))
                alike.setdefault((min(with_it, default=0.0), link), []).append(worker)
        for (with_them, link), workers in alike.items():
            one = len(workers) == 1
            is_, it, its = ("is", "it", "its link has") if one else ("are", "them", "their links have")
            why = f"the simulator found no shares with {it} that are worth trying"
            if with_them:
                without = seconds[best.shares]
                why = f"an iteration takes {with_them * 1e3:.1f} ms with {it}, {without * 1e3:.1f} ms without"
            self._report(f"{workers_text(workers)} {is_} left out: {why}; {its} {link}")

    def _post(self, candidate: ShareCandidate) -> None:
        postbox = self._training.runtime.postbox
        if candidate.dispatcher != self._dispatcher:
            postbox.post("dispatcher", candidate.dispatcher)
            self._dispatcher = candidate.dispatcher
        postbox.post("shares", candidate.shares)


def _is_one(candidate: ShareCandidate | None) -> bool:
    return candidate is not None and candidate.num_workers == 1


def seconds_between_checks(check_seconds: float) -> float:
    """How long to wait before links are measured again, if that took ``check_seconds`` the last time."""
    return max(CHECK_SECONDS, check_seconds / CHECK_COST)


def _short(speed: float) -> float:
    """Two digits: a measurement is not more exact."""
    return float(f"{speed:.2g}")
