"""What dispatchers count: the expected cost of a sample, the true cost of an assignment, brute force."""

import itertools

import numpy as np
import pytest
from dispatch_cases import make_task, slow_expected_cost, slow_true_cost, tasks, workers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.brute_force import BruteForce
from rowhaul.schedule.dispatch.costs import expected_cost, true_cost

quick = settings(max_examples=100)


@quick
@given(tasks())
def test_expected_cost_equals_the_nested_loops(task):
    np.testing.assert_array_equal(expected_cost(task), slow_expected_cost(task))


def test_expected_cost_worked_by_hand():
    rows = [
        {},  # at home: a pull
        {"owner": 1, "record_size": 3},  # a push by worker 1 and a pull, of 3
        {"latest": [0, 2]},  # clean copies
        {"partial": [0, 1]},  # the pushes happen anyhow: a pull
        {"free": 1},
    ]
    task = make_task([[0], [1], [2], [3], [4], [0, 1, 2, 3, 4], []], rows, [1, 10, 100], [3, 2, 2])
    assert expected_cost(task).tolist() == [
        [1, 10, 100],
        [3 * 11, 0, 3 * 110],
        [0, 10, 0],
        [1, 10, 100],
        [0, 0, 0],
        [35, 30, 530],
        [0, 0, 0],
    ]


def test_a_row_stored_beside_a_worker_costs_both_links_elsewhere():
    rows = [{"home": 1}, {"home": 1, "owner": 0}]
    task = make_task([[0], [1]], rows, [1, 10, 100], [2, 0, 0])
    assert expected_cost(task).tolist() == [[11, 0, 110], [0, 11, 11 + 110]]


@quick
@given(tasks(), st.randoms())
def test_true_cost_equals_the_table_of_moves(task, random):
    worker = np.array([random.randrange(task.num_workers) for _ in range(task.num_samples)], np.int32)
    assert true_cost(task, worker) == slow_true_cost(task, worker)


def test_samples_on_one_worker_share_pulls_and_an_owner_pushes_once():
    task = make_task([[0, 1], [0, 1], [0, 1]], [{}, {"owner": 2}], [1, 10, 100], [3, 3, 3])
    assert true_cost(task, np.array([0, 0, 0], np.int32)) == 1 + (100 + 1)
    assert true_cost(task, np.array([0, 1, 1], np.int32)) == (1 + 10) + (100 + 1 + 10)
    assert true_cost(task, np.array([2, 2, 2], np.int32)) == 100


@quick
@given(tasks(most_samples=1))
def test_a_sample_alone_costs_what_is_expected_and_the_gradients_owed(task):
    if task.num_samples == 0:
        return
    everyone = [true_cost(task, np.array([j], np.int32)) for j in range(task.num_workers)]
    if any(workers_of(task.partial[x]) for x in task.rows):
        owed = everyone[0] - expected_cost(task)[0, 0]
        assert owed >= 0
        everyone = [cost - owed for cost in everyone]
    assert everyone == expected_cost(task)[0].tolist()


def test_sixty_four_workers_have_a_bit_each():
    task = make_task([[0], [1]], [{"owner": 63}, {"latest": [62, 63]}], [2] * 64, [1] * 64)
    assert expected_cost(task)[0].tolist() == [4] * 63 + [0]
    assert expected_cost(task)[1].tolist() == [2] * 62 + [0, 0]
    assert true_cost(task, np.array([63, 63], np.int32)) == 0


@quick
@given(tasks(most_workers=3, most_samples=5))
def test_brute_force_finds_the_first_of_the_cheapest_assignments(task):
    best = min(
        (
            worker
            for worker in itertools.product(range(task.num_workers), repeat=task.num_samples)
            if np.all(np.bincount(worker, minlength=task.num_workers) <= task.capacities)
        ),
        key=lambda worker: slow_true_cost(task, worker),
    )
    assert tuple(BruteForce().assign(task)) == best


def test_brute_force_refuses_what_would_take_for_ever():
    task = make_task([[]] * 100, [], [1, 1], [50, 50])
    with pytest.raises(ConfigError, match="100 samples on 2 workers have more than 1,000,000"):
        BruteForce().assign(task)
