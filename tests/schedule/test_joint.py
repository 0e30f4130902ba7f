"""Joint dispatch: its prices are the true ones, its bookkeeping is exact, its answers are hard to beat."""

from itertools import product

import numpy as np
import pytest
from dispatch_cases import make_task, move_cost, samples_of, slow_true_cost, tasks, workers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch import make_dispatcher, text_of, with_settings
from rowhaul.schedule.dispatch.brute_force import BruteForce
from rowhaul.schedule.dispatch.costs import link_costs, true_cost
from rowhaul.schedule.dispatch.esd import Esd
from rowhaul.schedule.dispatch.joint import Joint, search
from rowhaul.schedule.dispatch.joint.growth import grow
from rowhaul.schedule.dispatch.joint.problem import EVERYWHERE, LARGEST, UNIT, problem_of
from rowhaul.schedule.dispatch.joint.search import improve
from rowhaul.schedule.dispatch.joint.spread import cost_of, make_spread, move, price_elsewhere

DEBT = 3 * UNIT // 8  # what a sole trainer's later push counts
quick = settings(max_examples=100)


def long_run_cost(task, worker, future=UNIT):
    problem = problem_of(task, future, 0)
    return int(cost_of(problem, make_spread(problem, worker), worker))


def slow_future_cost(task, worker):
    """What an assignment leaves to later iterations, in sixteenths, row by row."""
    cost = 0
    for x in range(len(task.latest)):
        users = [int(worker[i]) for i, sample in enumerate(samples_of(task)) if x in sample]
        if not users or task.free[x]:
            continue
        home, owner = int(task.home[x]), int(task.owner[x])
        values, record = int(task.value_size[x]), int(task.record_size[x])
        if len(set(users)) == 1:
            cost += DEBT * move_cost(task, users[0], home, record)
        else:
            cost += sum(UNIT * move_cost(task, user, home, values) for user in set(users))
        previous = {owner} if owner >= 0 else workers_of(task.partial[x])
        for user in users:
            if user in previous:
                cost -= DEBT * move_cost(task, user, home, record) // len(previous)
    return cost


def exactly_priced(task):
    """Only the owner's choice of who gets the optimizer state is not in the prices."""
    return not task.peer_to_peer or np.array_equal(task.record_size, task.value_size)


@quick
@given(tasks(), st.data())
def test_differences_of_the_cost_are_those_of_the_moves_now_and_of_the_debts_left(task, data):
    if not exactly_priced(task):
        task = make_like(task, record_size=task.value_size)
    workers = st.integers(0, task.num_workers - 1)
    both = [
        np.array(data.draw(st.lists(workers, min_size=task.num_samples, max_size=task.num_samples)), np.int32)
        for _ in range(2)
    ]
    now = [slow_true_cost(task, worker) for worker in both]
    later = [slow_future_cost(task, worker) for worker in both]
    assert long_run_cost(task, both[1], 0) - long_run_cost(task, both[0], 0) == UNIT * (now[1] - now[0])
    total = [UNIT * n + f for n, f in zip(now, later, strict=True)]
    assert long_run_cost(task, both[1]) - long_run_cost(task, both[0]) == total[1] - total[0]


def make_like(task, **changes):
    return type(task)(**{**vars(task), **changes})


@quick
@given(tasks(exact=True, most_workers=8), st.data())
def test_rows_kept_up_to_date_equal_rows_counted_anew(task, data):
    problem = problem_of(task, UNIT, 0)
    workers = st.integers(0, task.num_workers - 1)
    worker = np.array([data.draw(workers) for _ in range(task.num_samples)], np.int32)
    spread = make_spread(problem, worker)
    for _ in range(data.draw(st.integers(0, 10)) if task.num_samples else 0):
        i, j = data.draw(st.integers(0, task.num_samples - 1)), data.draw(workers)
        price = np.empty(problem.linear.shape[1], np.int32)
        price_elsewhere(problem, spread, i, worker[i], price)
        before = long_run_cost(task, worker)
        own = worker[i]
        if j == own:
            continue
        move(problem, spread, i, own, j)
        worker[i] = j
        assert int(price[j]) - int(price[own]) == long_run_cost(task, worker) - before
        for kept, anew in zip(spread, make_spread(problem, worker), strict=True):
            np.testing.assert_array_equal(kept, anew)


@quick
@given(tasks(exact=True, most_samples=40), st.integers(0, 9), st.sampled_from([1, 4, 512]))
def test_the_search_knows_what_its_moves_have_changed(task, passes, windows):
    problem = problem_of(task, UNIT, 0)
    worker = grow(problem, task.prices, task.capacities)
    spread = make_spread(problem, worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "WINDOWS", windows)
        improve(problem, spread, worker, task.capacities, passes)
    assert np.bincount(worker, minlength=task.num_workers).tolist() == task.capacities.tolist()
    for kept, anew in zip(spread, make_spread(problem, worker), strict=True):
        np.testing.assert_array_equal(kept, anew)


@quick
@given(tasks(exact=True))
def test_passes_never_make_it_worse_than_the_start(task):
    start = grow(problem_of(task, UNIT, 0), task.prices, task.capacities)
    assert long_run_cost(task, Joint().assign(task)) <= long_run_cost(task, start)


@quick
@given(tasks(exact=True))
def test_the_makespan_is_never_longer_than_with_the_least_sum(task):
    def makespan(worker):
        sent, received = link_costs(task, worker)
        return sent.max() + received.max()

    least_sum = makespan(Joint().assign(task))
    assert makespan(Joint(objective="makespan").assign(task)) <= least_sum


@quick
@given(tasks(exact=True), st.data())
def test_what_the_links_carry_adds_up_to_the_true_cost(task, data):
    worker = np.array([data.draw(st.integers(0, task.num_workers - 1)) for _ in range(task.num_samples)])
    sent, received = link_costs(task, worker.astype(np.int32))
    assert sent.sum() + received.sum() == slow_true_cost(task, worker)


def random_task(seed, num_samples, num_rows, rows_of_a_sample, capacities, prices):
    """A batch with rows that some samples share, as a running system finds them."""
    random = np.random.default_rng(seed)
    num_workers = len(prices)
    rows = []
    for _ in range(num_rows):
        state = random.integers(4)
        rows.append({} if state == 0 else {"owner": random.integers(num_workers)})
        if state == 1:
            rows[-1] = {"partial": random.choice(num_workers, 2, replace=False).tolist()}
    chance = 1 / np.arange(1, num_rows + 1)
    samples = [
        random.choice(num_rows, rows_of_a_sample, replace=False, p=chance / chance.sum())
        for _ in range(num_samples)
    ]
    return make_task([sorted(sample) for sample in samples], rows, prices, capacities, seed=seed)


def test_tiny_batches_are_often_solved_and_never_beaten():
    solved = all_found = all_least = 0
    for seed in range(100):
        task = random_task(seed, 7, 6, 2, [3, 2, 2], [1, 1, 10])
        least = true_cost(task, BruteForce().assign(task))
        found = true_cost(task, Joint(passes=20, future=0).assign(task))
        assert found >= least
        solved += found == least
        all_found, all_least = all_found + found, all_least + least
    assert solved >= 50
    assert all_found < 1.1 * all_least


def test_tiny_batches_come_close_to_the_least_long_run_cost():
    found = least = 0
    for seed in range(30):
        task = random_task(seed, 6, 6, 2, [2, 2, 2], [1, 1, 10])
        places = (np.array(worker, np.int32) for worker in product(range(3), repeat=6))
        room = (worker for worker in places if np.array_equal(np.bincount(worker, minlength=3), [2, 2, 2]))
        least += min(long_run_cost(task, worker) for worker in room)
        found += long_run_cost(task, Joint(passes=20).assign(task))
    assert least <= found <= least + abs(least) // 4


@pytest.mark.parametrize("prices", [[1] * 4 + [10] * 4, [1] * 8, [3, 4, 5, 6, 7, 8, 9, 100]])
def test_batches_of_usual_size_cost_less_than_with_esd(prices):
    for seed in range(3):
        task = random_task(seed, 256, 400, 8, [32] * 8, prices)
        assert long_run_cost(task, Joint().assign(task)) < long_run_cost(task, Esd().assign(task))
        now = Joint(future=0).assign(task)
        assert true_cost(task, now) < 0.9 * true_cost(task, Esd().assign(task))


@pytest.mark.parametrize(
    "capacities", [[1500, 0, 600, 400], [1380, 1, 1240, 841], [1, 2, 1, 531, 1380, 1347]]
)
def test_batches_larger_than_a_stratum_of_growth_fill_every_place(capacities):
    prices = [1, 2, 1, 10, 3, 1][: len(capacities)]
    task = random_task(0, sum(capacities), 300, 3, capacities, prices)
    start = grow(problem_of(task, UNIT, 0), task.prices, task.capacities)
    assert np.bincount(start, minlength=len(capacities)).tolist() == capacities
    worker = Joint(passes=2).assign(task)
    assert np.bincount(worker, minlength=len(capacities)).tolist() == capacities


def test_rows_that_all_workers_train_anyway_are_left_out():
    half = EVERYWHERE + 1  # samples of each of two workers; pairs of samples share a row, too

    def num_shared_rows(uses, capacities):
        samples = [[0, 1 + i // 2] if i < uses else [1 + i // 2] for i in range(2 * half)]
        task = make_task(samples, [{}] * (1 + half), [1, 10], capacities)
        return len(problem_of(task, UNIT, 0).sole)

    assert num_shared_rows(2 * EVERYWHERE - 1, [half, half]) == 1 + half
    assert num_shared_rows(2 * EVERYWHERE, [half, half]) == half
    assert num_shared_rows(2 * EVERYWHERE, [2 * half - 1, 1]) == 1 + half  # the second may do without


def test_dear_rows_fit_into_32_bits():
    sizes = {"record_size": 10**6, "value_size": 10**5}
    task = make_task([[0, 1], [1, 2], [2, 0], [3]], [sizes] * 4, [1, 10**5], [2, 2])
    problem = problem_of(task, UNIT, 0)
    assert 0 < problem.sole.max() < LARGEST
    assert problem.linear[:, :2].max() < LARGEST
    Joint().assign(task)


@quick
@given(tasks())
def test_small_batches_never_cost_more_than_with_esd(task):
    assert long_run_cost(task, Joint().assign(task)) <= long_run_cost(task, Esd().assign(task))


def test_as_many_passes_as_the_records_say():
    fixed, auto = make_dispatcher("joint:3"), make_dispatcher("joint:auto")
    assert with_settings(auto, passes=3) == fixed
    assert make_dispatcher(text_of(auto)) == auto
    task = random_task(0, 64, 100, 4, [8] * 8, [1] * 8)
    np.testing.assert_array_equal(auto.assign(task), make_dispatcher("joint").assign(task))


def test_samples_that_share_a_row_meet_on_one_worker():
    # Four pairs, mixed up; no row is anywhere yet, so nothing but sharing decides.
    task = make_task([[0], [1], [2], [3], [0], [1], [2], [3]], [{}] * 4, [1, 1, 1, 1], [2, 2, 2, 2])
    worker = Joint().assign(task)
    assert np.array_equal(worker[:4], worker[4:])


def test_a_place_too_many_stays_empty_where_the_link_is_dear():
    task = make_task([[0], [1], [2]], [{}] * 3, [1, 1, 10], [2, 2, 2])
    assert 2 not in Joint().assign(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("joint:-1", "passes must not be negative; got -1"),
        ("joint:fast", "sets passes to 'fast'; a whole number or auto is needed"),
        ("joint:future=1.5", "future is a weight from 0 to 1; got 1.5"),
        ("joint:objective=mean", "sum or makespan is needed"),
        ("joint:blocks=3", "joint takes passes"),
    ],
)
def test_a_wrong_setting_says_what_is_right(text, message):
    with pytest.raises(ConfigError) as error:
        make_dispatcher(text)
    assert message in str(error.value)


def test_an_unknown_objective_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known are sum, makespan"):
        Joint(objective="mean")
