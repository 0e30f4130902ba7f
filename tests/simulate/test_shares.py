"""Choosing shares on clusters whose times are a formula, so that the best ones are known."""

import numpy as np
import pytest
from simulate_cases import links, outcome

from rowhaul.errors import ConfigError
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.shares import (
    MAX_SUBSETS,
    Objective,
    Runs,
    balance,
    equal_shares,
    nested_subsets,
    subset_candidates,
)


def trials_of(seconds, num_tried=None):
    """Runs in which worker j with m samples is busy for seconds(j, m)."""

    def run(dispatch, shares):
        if num_tried is not None:
            num_tried.append(shares)
        return outcome(
            dispatch, [seconds(worker, share) for worker, share in enumerate(shares)], shares=shares
        )

    return Runs(run, Objective(computes=False))


def model_of(speeds, compute=None):
    return TimeModel(links(speeds), tuple(compute or [0.0] * len(speeds)))


def test_nested_subsets_begin_with_the_quickest():
    assert nested_subsets([3.0, 1.0, 2.0]) == [(1,), (1, 2), (0, 1, 2)]
    assert nested_subsets([1.0]) == [(0,)]


def test_there_are_not_too_many_subsets_and_each_class_of_links_is_one():
    subsets = nested_subsets([1.0] * 20 + [2.0] * 17 + [3.0] * 27)
    assert len(subsets) == MAX_SUBSETS
    assert {20, 37, 64} <= {len(subset) for subset in subsets}


def test_equal_shares_of_a_subset_add_up_to_the_batch():
    assert equal_shares((1, 3), 4, 9) == (0, 5, 0, 4)


def test_subsets_are_ordered_by_what_a_sample_costs():
    # A fast link does not help a worker that computes slowly.
    trials = trials_of(lambda worker, share: share)
    equal = ("laia", (4, 4, 4))
    candidates = subset_candidates(trials, equal, model_of([1.0, 10.0, 1.0], [0.0, 100.0, 0.0]))
    assert candidates == [("laia", (12, 0, 0)), ("laia", (6, 0, 6)), ("laia", (4, 4, 4))]
    candidates = subset_candidates(trials, equal, model_of([1.0, 10.0, 1.0]))
    assert candidates == [("laia", (12, 0, 0)), ("laia", (6, 6, 0)), ("laia", (4, 4, 4))]


def test_worker_0_is_in_every_subset_however_slow_it_is():
    trials = trials_of(lambda worker, share: share)
    candidates = subset_candidates(trials, ("laia", (4, 4, 4)), model_of([1.0, 10.0, 10.0]))
    assert [shares for _, shares in candidates] == [(12, 0, 0), (6, 6, 0), (4, 4, 4)]


@pytest.mark.parametrize(
    ("constant", "slope", "best"),
    [
        ([0, 0, 0, 0], [1, 1, 10, 10], [465, 465, 47, 47]),
        ([0, 0, 0, 0], [1, 1, 1, 1], [256, 256, 256, 256]),
        ([5, 5, 300, 300], [1, 1, 10, 10], [492, 492, 20, 20]),
        ([5, 5, 900, 900], [1, 1, 10, 10], [512, 512, 0, 0]),
    ],
)
def test_balancing_finds_the_shares_that_take_equally_long(constant, slope, best):
    trials = trials_of(lambda worker, share: constant[worker] * (share > 0) + slope[worker] * share)
    steps = balance(trials, "esd:1", (256,) * 4, model_of([10.0, 10.0, 1.0, 1.0]))
    assert all(sum(step) == 1024 for step in steps)
    _, found = trials.ranked(("esd:1", step) for step in steps)[0]

    def slowest(shares):
        return max(constant[j] * (m > 0) + slope[j] * m for j, m in enumerate(shares))

    assert slowest(found) <= slowest(best) * 1.03


def test_balancing_holds_where_times_grow_less_than_shares():
    trials = trials_of(lambda worker, share: (1 if worker < 2 else 8) * share**0.7)
    steps = balance(trials, "esd:1", (256,) * 4, model_of([10.0, 10.0, 1.0, 1.0]))
    times = [[(1, 8)[worker > 1] * share**0.7 for worker, share in enumerate(step)] for step in steps]
    assert min(max(one) for one in times) < 1.05 * np.mean(times[-1])


def test_trials_run_once_and_workers_left_out_stay_out():
    tried = []
    trials = trials_of(lambda worker, share: share, tried)
    steps = balance(trials, "esd:1", (512, 512, 0), model_of([2.0, 1.0, 1.0]))
    assert all(step[2] == 0 for step in steps)
    balance(trials, "esd:1", (512, 512, 0), model_of([2.0, 1.0, 1.0]))
    assert len(tried) == len(set(tried))


def test_shares_that_cannot_run_are_passed_over():
    def run(dispatch, shares):
        if shares[0] > 4:
            raise ConfigError("the cache is too small")
        return outcome(dispatch, [1.0, 1.0], shares=shares)

    trials = Runs(run, Objective(computes=False))
    assert trials.ranked([("esd:1", (8, 0)), ("esd:1", (4, 4))]) == [("esd:1", (4, 4))]


def test_what_is_chosen_for_depends_on_compute():
    one = outcome("x", [1.0, 2.0], compute_seconds=[5.0, 0.0])
    assert Objective(computes=False)(one) == 2.0
    assert Objective(computes=True)(one) == 6.0
