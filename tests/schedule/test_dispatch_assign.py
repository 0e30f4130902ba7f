"""What holds for every dispatcher, and the plain ones: random, round-robin, laia."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from dispatch_cases import make_task, samples_of, tasks, workers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch import make_dispatcher
from rowhaul.schedule.dispatch.adaptive import LaiaAdaptive, rank_tables
from rowhaul.schedule.dispatch.laia import Laia

quick = settings(max_examples=100)
NAMES = [
    "random",
    "round-robin",
    "laia",
    "laia:threads=3",
    "laia-adaptive:1",
    "esd:0",
    "esd:0.5:mean",
    "esd:1",
    "two-batch:laia",
    "joint",
    "joint:0",
    "joint:3:0",
    "joint:objective=makespan",
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(task=tasks())
def test_every_sample_gets_a_worker_with_room_and_always_the_same(name, task):
    worker = make_dispatcher(name).assign(task)
    assert worker.dtype == np.int32
    assert worker.shape == (task.num_samples,)
    assert np.all(np.bincount(worker, minlength=task.num_workers) <= task.capacities)
    np.testing.assert_array_equal(make_dispatcher(name).assign(task), worker)


def plain_task(num_samples, capacities, seed=0):
    return make_task([[]] * num_samples, [], [1] * len(capacities), capacities, seed=seed)


def test_random_deals_every_place_and_depends_on_the_seed():
    random = make_dispatcher("random")
    dealt = [random.assign(plain_task(60, [30, 0, 10, 20], seed)) for seed in range(50)]
    assert all(np.bincount(worker).tolist() == [30, 0, 10, 20] for worker in dealt)
    assert len({tuple(worker) for worker in dealt}) == 50
    assert {worker[0] for worker in dealt} == {worker[-1] for worker in dealt} == {0, 2, 3}


@pytest.mark.parametrize(("num_samples", "capacities"), [(12, [4, 4, 4]), (11, [4, 4, 3]), (2, [1, 1, 0])])
def test_round_robin_is_sample_modulo_workers(num_samples, capacities):
    worker = make_dispatcher("round-robin").assign(plain_task(num_samples, capacities))
    assert worker.tolist() == [i % 3 for i in range(num_samples)]


def test_round_robin_leaves_full_workers_out():
    worker = make_dispatcher("round-robin").assign(plain_task(8, [4, 0, 1, 3]))
    assert worker.tolist() == [0, 2, 3, 0, 3, 0, 3, 0]


def assert_follows_algorithm_1(task, worker, samples, room):
    """In order, every sample went to a best-scoring worker among those with room."""
    for i in samples:
        score = [
            sum(j in workers_of(task.latest[x]) for x in samples_of(task)[i]) for j in range(task.num_workers)
        ]
        assert room[worker[i]] > 0
        assert score[worker[i]] == max(score[j] for j in range(task.num_workers) if room[j] > 0)
        room[worker[i]] -= 1


@quick
@given(tasks())
def test_laia_follows_algorithm_1(task):
    worker = Laia().assign(task)
    assert_follows_algorithm_1(task, worker, range(task.num_samples), task.capacities.tolist())


@quick
@given(tasks(), st.integers(2, 5))
def test_threads_of_laia_each_follow_algorithm_1_on_their_part(task, threads):
    worker = Laia(threads=threads).assign(task)
    room = np.minimum(task.capacities, task.num_samples)
    places = [j for j in range(task.num_workers) for _ in range(room[j])]
    for thread in range(threads):
        own_places = Counter(places[thread::threads])
        assert_follows_algorithm_1(task, worker, range(thread, task.num_samples, threads), own_places)


def test_laia_breaks_ties_at_random():
    task = make_task([[0], [0]], [{"latest": [1, 2, 4]}], [1] * 5, [1] * 5)
    pairs = {tuple(Laia().assign(replace(task, seed=seed))) for seed in range(200)}
    assert pairs == {(a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a != b}


def test_no_threads_is_an_error():
    with pytest.raises(ConfigError, match="laia takes 1 to 64 threads; got threads=0"):
        Laia(threads=0)


@quick
@given(tasks(), st.integers(0, 5), st.permutations(range(4)))
def test_laia_adaptive_sees_the_rows_of_the_best_tables_only(task, tables_scored, ranking):
    adaptive = LaiaAdaptive(tables_scored, ranking=tuple(ranking))
    visible = [table in ranking[:tables_scored] for table in task.tables]
    reduced = replace(task, latest=np.where(visible, task.latest, np.uint64(0)).astype(np.uint64))
    np.testing.assert_array_equal(adaptive.assign(task), Laia().assign(reduced))


@quick
@given(tasks())
def test_laia_adaptive_scores_all_tables_until_told_and_taught(task):
    for adaptive in (LaiaAdaptive(), LaiaAdaptive(2), LaiaAdaptive(ranking=(1,))):
        np.testing.assert_array_equal(adaptive.assign(task), Laia().assign(task))


def test_laia_adaptive_learns_periodically():
    adaptive = LaiaAdaptive(tables_scored=1, refresh_every=3)
    assert [iteration for iteration in range(10) if adaptive.learns_at(iteration)] == [3, 6, 9]
    taught = adaptive.learn(np.array([0, 1], np.int32), np.array([9, 1], np.int32), samples_per_worker=5)
    assert taught == replace(adaptive, ranking=(1, 0))


def test_tables_rank_by_their_share_of_infrequent_cached_rows():
    tables = np.array([0, 0, 1, 1, 1, 3, 3, 4, 5], np.int32)
    appearances = np.array([9, 10, 1, 1, 99, 1, 1, 10, 9], np.int32)
    # Infrequent: under 10. Degrees: 1/2, 2/3, none cached, 2/2, 0, 1.
    assert rank_tables(tables, appearances, samples_per_worker=10) == (3, 5, 1, 0, 4)
    assert rank_tables(tables[:0], appearances[:0], samples_per_worker=10) == ()
