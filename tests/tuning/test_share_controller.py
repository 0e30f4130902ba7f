"""How shares are chosen: from measured pairs of ranks to links, and by trying candidates in training."""

from types import SimpleNamespace

import numpy as np
import torch

from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import CacheSettings, RowSizes, ScheduleSettings, Topology, link_prices
from rowhaul.transport.calibration import LinkMeasurements
from rowhaul.tuning.shares import controller
from rowhaul.tuning.shares.links import MeasuredLinks, _own_speeds
from rowhaul.tuning.shares.trial import ShareCandidate


def pairs(own):
    """What pairs of ranks with such links would be measured at."""
    own = np.array(own, float)
    speeds = np.minimum(own[:, None], own[None, :])
    np.fill_diagonal(speeds, np.inf)
    return LinkMeasurements(np.zeros_like(speeds), speeds, speeds)


def test_workers_are_as_fast_as_their_pairs_with_the_store_and_the_store_as_all_of_them():
    found = _own_speeds(pairs([50, 50, 5, 500]), Topology(3, 1))
    assert found == (50, 50, 5, 105)


def test_a_slow_store_is_not_taken_for_slow_workers():
    found = _own_speeds(pairs([50, 50, 5, 10]), Topology(3, 1))
    assert found == (50, 50, 5, 10)


class FakeRun:
    """A controller on rank 0 of a run whose times are given; records are in force a few iterations later."""

    def __init__(self, monkeypatch, seconds, proposed, links=(1e7, 1e7, 1e6)):
        self.seconds, self.posted, self.told, self.clock = seconds, [], [], 0.0
        self.measured = links_of(links)  # what `review` will find
        self.simulated = []  # the settings of each proposal
        self.chosen_again = []  # when ways to sum were

        def propose(settings, *given):
            self.simulated.append(settings)
            return [candidate(one) for one in proposed()]

        monkeypatch.setattr(controller, "propose", propose)
        monkeypatch.setattr(controller.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(controller.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(MeasuredLinks, "measure_over", lambda *given: self.measured)
        postbox = SimpleNamespace(post=lambda name, value: self.posted.append((name, value)))
        in_moves = lambda call: SimpleNamespace(wait=lambda: call(SimpleNamespace(links=None)))  # noqa: E731
        settings = ScheduleSettings(
            Topology(len(links), 1), RowSizes((64,), (4,)), link_prices(links), CacheSettings(100)
        )
        self.training = SimpleNamespace(
            settings=settings,
            runtime=SimpleNamespace(
                postbox=postbox,
                in_moves=in_moves,
                choose_sums_again=lambda: self.chosen_again.append(self.number),
            ),
            model=torch.nn.Linear(2, 2),
        )
        self.keeper = controller.ShareController(self.training, list, self.measured, self.told.append)
        self.active, self.due, self.number = (4, 4, 4), [], 0

    def go(self, count, too_many=None):
        """Some iterations; returns the shares of each. Caches have no room for ``too_many`` samples."""
        history = []
        for _ in range(count):
            while self.due and self.due[0][0] <= self.number:
                self.active = self.due.pop(0)[1]
            given_up = ()
            if too_many is not None and max(self.active) >= too_many:
                given_up, self.active = self.active, (4, 4, 4)
            self.clock += self.seconds[self.active]
            known = len(self.posted)
            self.keeper.observe(job(self.active, given_up))
            for name, value in self.posted[known:]:
                self.due += [(self.number + 5, value)] if name == "shares" else []
            self.number += 1
            history.append(self.active)
            if self.keeper.wants_review():
                known = len(self.posted)
                self.keeper.review(None)
                self.keeper.resume()
                for name, value in self.posted[known:]:
                    self.due += [(self.number + 3, value)] if name == "shares" else []
        return history


ONE, TWO, ALL, UNEQUAL = (12, 0, 0), (6, 6, 0), (4, 4, 4), (7, 4, 1)


def test_one_machine_is_judged_by_its_compute_if_it_may_go_on_alone(monkeypatch):
    """It computes for a second of 1.5; two machines take 1.2 seconds."""
    chosen = {}
    for may_go_alone in (False, True):
        run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 1.5, TWO: 1.2}, lambda: [ONE, TWO])
        run.keeper.may_go_alone = may_go_alone
        run.go(60)
        chosen[may_go_alone] = run.keeper.wants_alone, run.active
    assert chosen == {False: (False, TWO), True: (True, ONE)}


def test_the_quickest_candidate_stays_and_those_left_out_are_named(monkeypatch):
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 1.5, TWO: 1.0, UNEQUAL: 2.0}, lambda: [ONE, TWO, UNEQUAL])
    history = run.go(60)
    assert run.keeper.decided
    assert list(dict.fromkeys(history)) == [ALL, UNEQUAL, TWO, ONE]  # the most workers first
    run.go(1)
    assert run.active == TWO
    assert "shares to be tried: some [7, 4, 1]; some [6, 6, 0]; some [12, 0, 0]" in run.told
    (chosen,) = (
        text for text in run.told if text.startswith("shares [6, 6, 0] with joint (some): 1000.0 ms")
    )
    assert "Tried: some [6, 6, 0]: 1000.0 ms; some [12, 0, 0]: 1500.0 ms; some [7, 4, 1]: 2000.0 ms" in chosen
    assert run.told[-1] == (
        "worker 2 is left out: an iteration takes 2000.0 ms with it, 1000.0 ms without; its link has 8mbit"
    )
    run.go(500)
    assert run.active == TWO
    assert len(run.told) == 3


def test_workers_that_no_candidate_uses_are_named_too(monkeypatch):
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 2.0, TWO: 1.0}, lambda: [ONE, TWO])
    run.go(60)
    assert run.told[-1].startswith(
        "worker 2 is left out: the simulator found no shares with it that are worth"
    )
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 1.0}, lambda: [ONE, ALL], links=(1e7, 1e6, 1e6))
    run.go(60)
    assert run.told[-1] == (
        "workers 1, 2 are left out: an iteration takes 3000.0 ms with them, 1000.0 ms without; "
        "their links have 8mbit"
    )


def test_shares_are_looked_at_again_when_a_link_is_throttled(monkeypatch):
    proposals = iter([[ONE, TWO], [ONE, UNEQUAL]])
    seconds = {ALL: 3.0, ONE: 2.0, TWO: 1.0, UNEQUAL: 1.8}
    run = FakeRun(monkeypatch, seconds, lambda: next(proposals))
    run.go(100)
    assert run.active == TWO
    run.measured, run.seconds = links_of([1e7, 1e5, 1e6]), {**seconds, TWO: 5.0}
    history = run.go(100)
    assert list(dict.fromkeys(history)) == [TWO, UNEQUAL, ONE]
    assert run.active == UNEQUAL
    assert [value for name, value in run.posted if name == "prices"] == [(1, 100, 10)]
    assert [one.prices for one in run.simulated] == [(1, 1, 10), (1, 100, 10)]
    assert len(run.chosen_again) == 1
    again = next(text for text in run.told if "again" in text)
    assert again == (
        "shares are looked at again: iterations take longer than before; the speed of a link changed up to "
        "100.00 times"
    )
    assert any("Tried: some [7, 4, 1]" in text and "some [6, 6, 0]: 5000.0 ms" in text for text in run.told)


def test_prices_follow_links_that_change_little_by_little(monkeypatch):
    seconds = {ALL: 3.0, ONE: 2.0, TWO: 1.0}
    run = FakeRun(monkeypatch, seconds, lambda: [ONE, TWO], links=(1e7, 1e7, 1e7))
    run.go(100)
    for speed in (6e6, 4e6, 2.5e6):
        run.measured = links_of([1e7, speed, 1e7])
        run.seconds = {name: 2 * each for name, each in run.seconds.items()}
        run.go(200)
    posted = [value for name, value in run.posted if name == "prices"]
    assert posted == [(2, 5, 2)]
    assert [one.prices for one in run.simulated] == [(1, 1, 1)] * 2 + posted * 2
    assert len(run.chosen_again) == 1


def test_all_ranks_choose_ways_to_sum_again_at_the_same_reviews(monkeypatch):
    """Rank 0 knows more than the others: whether iterations take longer."""
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 2.0, TWO: 1.0}, lambda: [ONE, TWO], links=(1e7, 1e7, 1e7))
    chosen_again = []
    others = SimpleNamespace(
        settings=run.training.settings,
        runtime=SimpleNamespace(
            in_moves=run.training.runtime.in_moves,
            choose_sums_again=lambda: chosen_again.append(run.number),
        ),
    )
    other = controller.ShareController(others, list, run.measured, decides=False)
    review = run.keeper.review
    monkeypatch.setattr(run.keeper, "review", lambda control: (review(control), other.review(control)))
    run.go(100)
    for speed in (6e6, 4e6, 3.5e6, 1.8e6):
        run.measured = links_of([1e7, speed, 1e7])
        run.seconds = {name: 2 * each for name, each in run.seconds.items()}
        run.go(200)
    assert len(chosen_again) == 2
    assert run.chosen_again == chosen_again


def test_links_of_workers_that_are_left_out_are_measured_now_and_then(monkeypatch):
    proposals = iter([[ONE, TWO], [ONE, TWO]])
    seconds = {ALL: 3.0, ONE: 1.0, TWO: 2.0}
    run = FakeRun(monkeypatch, seconds, lambda: next(proposals))
    run.go(500)
    assert run.active == ONE
    assert not any("again" in text for text in run.told)
    run.measured, run.seconds = links_of([1e7, 1e8, 1e6]), {**seconds, TWO: 0.5}
    run.go(int(controller.CHECK_SECONDS) + 60)
    assert run.active == TWO
    assert any("again: links have changed; " in text for text in run.told)


def test_shares_that_are_given_up_in_their_trial_are_not_chosen(monkeypatch):
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 0.5, TWO: 1.0}, lambda: [ONE, TWO])
    history = run.go(100, too_many=12)
    assert ONE not in history
    assert run.active == TWO
    assert (
        "shares [12, 0, 0] are given up from iteration 7 on: a worker needs more rows than its cache holds; "
        "larger caches (--cache) would allow them"
    ) in run.told
    (chosen,) = (text for text in run.told if text.startswith("shares [6, 6, 0] with joint"))
    assert "[12, 0, 0]" not in chosen


def test_chosen_shares_that_are_given_up_later_are_replaced(monkeypatch):
    asked = []

    def propose(*given):
        asked.append(given[-1])
        return [candidate(one) for one in ((TWO,) if asked[-1] else (ONE, TWO))]

    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 0.5, TWO: 1.0}, list)
    monkeypatch.setattr(controller, "propose", propose)
    run.go(100)
    assert run.active == ONE
    history = run.go(60, too_many=12)
    assert list(dict.fromkeys(history)) == [ALL, TWO]
    assert asked == [None, 12]
    again = "shares are looked at again: those chosen did not fit into a cache; "
    assert any(text.startswith(again) for text in run.told)
    assert any(text.startswith("one machine is not tried: ") for text in run.told)
    assert run.active == TWO


def test_one_trial_waits_for_another(monkeypatch):
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 2.0, TWO: 1.0}, lambda: [ONE, TWO])
    disturbed = [True]
    run.keeper.is_disturbed = lambda: disturbed[0]
    assert set(run.go(50)) == {ALL}
    assert run.told == []
    assert run.keeper.is_trying()  # soon
    disturbed[0] = False
    run.go(60)
    assert run.active == TWO
    assert not run.keeper.is_trying()

    disturbed[0], run.seconds[TWO] = True, 9.0  # others try something that takes long
    run.go(200)
    disturbed[0], run.seconds[TWO] = False, 1.0
    run.go(200)
    assert run.active == TWO
    assert not any("again" in text for text in run.told)


def test_a_trial_has_ended_once_rows_are_in_place(monkeypatch):
    run = FakeRun(monkeypatch, {ALL: 3.0, ONE: 2.0, TWO: 1.0}, lambda: [ONE, TWO])
    trying = []
    for _ in range(100):
        run.go(1)
        trying.append((run.keeper.is_trying(), run.keeper.decided))
    until = [decided for _, decided in trying].index(True) + controller.SETTLING
    assert [one for one, _ in trying] == [True] * until + [False] * (100 - until)
    run = FakeRun(monkeypatch, {ALL: 3.0}, lambda: 1 / 0)
    run.go(20)
    assert not run.keeper.is_trying()


def test_a_proposal_that_fails_leaves_the_shares_as_they_are(monkeypatch):
    def fails():
        raise ValueError("no such luck")

    run = FakeRun(monkeypatch, {ALL: 3.0}, fails)
    run.go(100)
    assert run.active == ALL
    assert run.told == ["shares stay as they are: ValueError: no such luck"]


def links_of(speeds):
    return MeasuredLinks(tuple(speeds), (0.0,) * len(speeds))


def candidate(given):
    return ShareCandidate(given, "joint", "some")


def job(given, given_up=()):
    measures = np.ones((len(given) + 1, len(MEASURES)))
    worker = np.repeat(np.arange(len(given)), given)
    plan = SimpleNamespace(worker=worker, num_workers=len(given), given_up_shares=given_up, iteration=7)
    return SimpleNamespace(measures=measures, plan=plan)
