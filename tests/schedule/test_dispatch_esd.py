"""ESD's hybrid of optimal and greedy dispatch, against listings and SciPy."""

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from dispatch_cases import make_task, slow_expected_cost, tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.costs import expected_cost
from rowhaul.schedule.dispatch.esd import Esd

quick = settings(max_examples=100)
CRITERIA = ["min2-min", "min3-min", "min3-min2", "mean"]


def criterion_of(costs, criterion):
    if criterion == "mean":
        return Fraction(sum(costs), len(costs))
    ordered = sorted(costs)
    least = {
        name: ordered[min(place, len(ordered) - 1)] for place, name in enumerate(["min", "min2", "min3"])
    }
    larger, smaller = criterion.split("-")
    return least[larger] - least[smaller]


def split(task, alpha, criterion):
    """The samples for the optimum and for the greedy part, and the room of both, by the listing."""
    cost = slow_expected_cost(task)
    usable = [j for j in range(task.num_workers) if task.capacities[j] > 0]
    order = sorted(
        range(task.num_samples),
        key=lambda i: criterion_of([int(cost[i, j]) for j in usable], criterion),
        reverse=True,  # keeps the order of equals
    )
    optimal_room = [floor(int(m) * alpha) for m in task.capacities]
    greedy_room = [int(m) - q for m, q in zip(task.capacities, optimal_room, strict=True)]
    return cost, order[: sum(optimal_room)], order[sum(optimal_room) :], optimal_room, greedy_room


def greedy(cost, samples, room):
    chosen = {}
    for i in samples:
        chosen[i] = min((j for j in range(len(room)) if room[j] > 0), key=lambda j: cost[i, j])
        room[chosen[i]] -= 1
    return chosen


def optimal_cost(cost, samples, room):
    expanded = np.repeat(cost[samples], room, axis=1)
    at = linear_sum_assignment(expanded)
    return expanded[at].sum()


@quick
@given(tasks(), st.fractions(0, 1), st.sampled_from(CRITERIA))
def test_the_first_samples_are_placed_optimally_and_the_others_greedily(task, alpha, criterion):
    cost, first, rest, optimal_room, greedy_room = split(task, alpha, criterion)
    worker = Esd(alpha, criterion).assign(task)
    assert {i: worker[i] for i in rest} == greedy(cost, rest, greedy_room)
    assert np.all(np.bincount(worker[first], minlength=task.num_workers) <= optimal_room)
    assert cost[first, worker[first]].sum() == optimal_cost(cost, first, optimal_room)


@quick
@given(tasks())
def test_alpha_one_is_the_transportation_optimum(task):
    cost = slow_expected_cost(task)
    total = cost[range(task.num_samples), Esd(Fraction(1)).assign(task)].sum()
    assert total == optimal_cost(cost, list(range(task.num_samples)), task.capacities)


@quick
@given(tasks())
def test_alpha_zero_is_greedy_by_regret(task):
    cost, _, order, _, room = split(task, 0, "min2-min")
    assert dict(enumerate(Esd(Fraction(0)).assign(task))) == greedy(cost, order, room)


def test_equal_regrets_keep_the_order_of_the_batch():
    task = make_task([[0]] * 4, [{"latest": [1]}], [1, 1], [2, 2])
    assert Esd(Fraction(0)).assign(task).tolist() == [1, 1, 0, 0]


def test_the_criterion_decides_who_goes_first():
    # Costs of the samples: (0, 1, 9) and (0, 4, 5).
    both, near = {"latest": [0], "record_size": 1}, {"latest": [0, 1], "record_size": 8}
    rows = [both, near, {**both, "record_size": 4}, {**near, "record_size": 1}]
    task = make_task([[0, 1], [2, 3]], rows, [1, 1, 1], [1, 1, 1])
    first = {criterion: Esd(Fraction(0), criterion).assign(task).tolist().index(0) for criterion in CRITERIA}
    assert first == {"min2-min": 1, "min3-min": 0, "min3-min2": 0, "mean": 0}


@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_worker_takes_all(criterion):
    task = make_task([[0], []], [{}], [3], [2])
    assert Esd(Fraction(1, 2), criterion).assign(task).tolist() == [0, 0]


def test_alpha_is_the_decimal_number_that_was_written():
    assert Esd(0.3).alpha == Esd("0.3").alpha == Fraction(3, 10)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan"), float("inf"), "x", "1/0"])
def test_alpha_outside_its_range_is_an_error(alpha):
    with pytest.raises(ConfigError, match="from 0 to 1; got"):
        Esd(alpha)


def test_an_unknown_criterion_is_an_error():
    with pytest.raises(
        ConfigError, match="unknown criterion 'max'; known are min2-min, min3-min, min3-min2, mean"
    ):
        Esd(Fraction(1), "max")


@pytest.mark.parametrize("alpha", [1, Fraction(1, 2)])
def test_costs_beyond_what_the_solver_takes_are_told_apart_by_their_first_bits(alpha):
    generator = np.random.default_rng(3)
    samples = [generator.choice(400, 20, replace=False).tolist() for _ in range(128)]
    holders = generator.integers(-1, 64, 400).tolist()

    def cost_at(size, price):
        rows = [{"owner": one, "record_size": size} for one in holders]
        task = make_task(samples, rows, [price + price // 2 * (j % 3) for j in range(64)], [2] * 64)
        worker = Esd(alpha).assign(task)
        assert np.bincount(worker, minlength=64).tolist() == [2] * 64
        return int(expected_cost(task)[np.arange(128), worker].sum())

    assert cost_at(1 << 19, 1 << 29) == cost_at(1, 2) << 47
