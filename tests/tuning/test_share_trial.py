"""How shares are decided: on clusters whose times are a formula, hundreds of them."""

from __future__ import annotations

import numpy as np
import pytest

from rowhaul.schedule.sizes import apportion
from rowhaul.tuning.shares.controller import OBSERVED_ITERATIONS, SKIPPED_ITERATIONS
from rowhaul.tuning.shares.drift import FIRST_PATIENCE, SETTLING, WINDOW, Drift
from rowhaul.tuning.shares.trial import JUDGED, TIE, TURN, ShareCandidate, ShareTrial

NUM_WORKERS, BATCH = 8, 256
DELAYS = (
    4,
    5,
    6,
    7,
)  # iterations from the one after which a record is posted to the first one it is in force


def candidate(shares) -> ShareCandidate:
    return ShareCandidate(tuple(apportion(BATCH, shares).tolist()), "joint", "some")


class Run:
    """Iterations whose times are given by the shares in force, and records that need a while."""

    def __init__(self, rng, seconds, settling=2.0, noise=0.01, spikes=0.0) -> None:
        self.rng, self.seconds = rng, seconds  # by shares
        self.settling, self.noise, self.spikes = settling, noise, spikes
        self.shares = candidate([1] * NUM_WORKERS).shares
        self.number, self.since = 0, 0
        self.due: list[tuple[int, tuple[int, ...]]] = []
        self.history: list[tuple[int, ...]] = []

    def post(self, one: ShareCandidate | None) -> None:
        if one is not None:
            self.due.append((self.number - 1 + int(self.rng.choice(DELAYS)), one.shares))

    def iterate(self) -> tuple[list[int], float]:
        while self.due and self.due[0][0] <= self.number:
            self.shares, self.since = self.due.pop(0)[1], self.number
        moving = 3 * np.exp(-(self.number - self.since) / self.settling)  # rows move into place
        factor = (1 + moving) * (1 + self.noise * abs(self.rng.standard_normal()))
        factor *= 5 if self.rng.random() < self.spikes else 1
        self.number += 1
        self.history.append(self.shares)
        return list(self.shares), self.seconds[self.shares] * factor


def random_candidates(rng) -> list[ShareCandidate]:
    subset = [1] * int(rng.integers(2, NUM_WORKERS + 1))
    subset += [0] * (NUM_WORKERS - len(subset))
    unequal = [int(rng.integers(1, 9)) if one else 0 for one in subset]
    unequal[0] = 11  # another one than equal shares
    found = [candidate([1] + [0] * (NUM_WORKERS - 1)), candidate(subset), candidate(unequal)]
    return [found[place] for place in rng.permutation(3)[: rng.integers(1, 4)]]


def decide(run: Run, trial: ShareTrial, beginning: int) -> ShareCandidate | None:
    for _ in range(beginning):
        run.iterate()
    run.post(trial.next())
    while not trial.is_over:
        run.post(trial.observe(*run.iterate()))
    return trial.best()


def test_the_choice_is_within_five_percent_of_the_best_and_made_within_sixty_iterations() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        some = random_candidates(rng)
        times = rng.choice([1.0, 1.5, 40.0], len(some)) * rng.uniform(0.9, 1.1, len(some))
        seconds = {candidate([1] * NUM_WORKERS).shares: 5.0}
        seconds |= {one.shares: each for one, each in zip(some, times, strict=True)}
        run = Run(rng, seconds, settling=rng.uniform(0.3, 1.2), noise=rng.uniform(0, 0.01), spikes=0.03)
        trial = ShareTrial(some)
        chosen = decide(run, trial, SKIPPED_ITERATIONS + OBSERVED_ITERATIONS)
        assert chosen is not None
        measured = {one.shares: each for one, each in trial.measured()}
        assert measured[chosen.shares] <= 1.05 * min(measured.values())
        assert seconds[chosen.shares] <= 1.05 * min(seconds[one.shares] for one in some)
        assert run.number <= 60
        order = [one for one in dict.fromkeys(run.history) if one in measured]
        assert sorted(order, key=lambda one: -sum(share > 0 for share in one)) == order
        for one in some:  # every turn was long enough
            assert run.history.count(one.shares) >= TURN


def test_of_equals_the_fewest_machines_win() -> None:
    one, two, four = (candidate([1] * count + [0] * (8 - count)) for count in (1, 2, 4))
    for times, expected in (
        ((TIE - 0.001, 1.0, 1.0), one),
        ((TIE + 0.01, 1.0, 0.99), two),
        ((2.0, 1.2, 1.0), four),
        ((1.0, 1.2, 2.0), one),
    ):
        trial = ShareTrial([one, two, four])
        seconds = dict(zip((one.shares, two.shares, four.shares), times, strict=True))
        seconds[candidate([1] * 8).shares] = 1.0
        run = Run(np.random.default_rng(1), seconds, settling=1e-9, noise=0)
        assert decide(run, trial, 8) == expected


def test_only_the_last_iterations_of_a_turn_count() -> None:
    one = candidate([1] + [0] * 7)
    trial = ShareTrial([one])
    assert trial.next() == one
    for number in range(TURN):
        assert not trial.is_over
        trial.observe(one.shares, 1000.0 if number < TURN - JUDGED else 256.0)
    assert trial.is_over
    assert trial.measured() == [(one, 1.0)]


def test_what_is_known_is_not_tried_again() -> None:
    one, two = candidate([1] + [0] * 7), candidate([1, 1] + [0] * 6)
    trial = ShareTrial([one, two], known=(two, 1.0))
    assert trial.candidates == [one]
    assert trial.next() == one
    for _ in range(TURN):
        trial.observe(one.shares, 2.0 * BATCH)
    assert trial.is_over
    assert trial.best() == two
    assert ShareTrial([two], known=(two, 1.0)).is_over


def test_iterations_that_were_not_timed_or_are_short_do_not_keep_a_trial_from_ending() -> None:
    one = candidate([3, 1] + [0] * 6)
    trial = ShareTrial([one])
    trial.next()
    for _ in range(TURN):
        trial.observe(one.shares, None)
    assert trial.is_over
    assert trial.best() is None
    trial = ShareTrial([one])
    trial.next()
    for _ in range(TURN):  # the last batch of an epoch, again and again
        trial.observe([6, 2, 0, 0, 0, 0, 0, 0], 8.0)
    assert trial.measured() == [(one, 1.0)]


def times_until_another_look(drift: Drift, seconds, most=10_000) -> int | None:
    return next((number for number in range(most) if drift.observe(seconds(number))), None)


def test_slower_iterations_are_noticed_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)

    def noisy(number: int) -> float:
        return (1 + 4 * np.exp(-number / 30)) * rng.lognormal(0, 0.1) * (8 if rng.random() < 0.1 else 1)

    assert times_until_another_look(Drift(), noisy) is None
    found = times_until_another_look(Drift(), lambda number: noisy(number) * (1 if number < 500 else 1.6))
    assert found is not None
    assert 500 < found <= 500 + WINDOW


def test_what_was_slower_right_after_its_trial_is_noticed_too() -> None:
    drift = Drift()
    drift.decided(changed=True, seconds=1.0)
    assert times_until_another_look(drift, lambda number: 1.5) == FIRST_PATIENCE - 1
    drift.decided(changed=True, seconds=1.0)
    assert times_until_another_look(drift, lambda number: 1.2, most=1000) is None


def test_a_look_in_vain_makes_the_next_one_wait_longer() -> None:
    drift, waited = Drift(), []
    for _ in range(4):
        steps = times_until_another_look(drift, lambda number: 1.0 if number < SETTLING + WINDOW else 2.0)
        waited.append(steps + 1)
        drift.decided(changed=False)
    assert waited[0] == pytest.approx(FIRST_PATIENCE, abs=WINDOW)
    assert waited[1:] == [2 * FIRST_PATIENCE, 4 * FIRST_PATIENCE, 8 * FIRST_PATIENCE]
    drift.decided(changed=True)
    again = times_until_another_look(drift, lambda number: 1.0 if number < SETTLING + WINDOW else 2.0)
    assert again + 1 == waited[0]
