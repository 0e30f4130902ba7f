"""The wrapper that looks at the next batch before it decides."""

from dataclasses import dataclass, replace

import numpy as np
from dispatch_cases import make_task, tasks
from hypothesis import given, settings

from rowhaul.schedule.dispatch import make_dispatcher, with_settings
from rowhaul.schedule.dispatch.adaptive import LaiaAdaptive
from rowhaul.schedule.dispatch.costs import true_cost
from rowhaul.schedule.dispatch.laia import Laia
from rowhaul.schedule.dispatch.task import Learns, LooksAhead
from rowhaul.schedule.dispatch.two_batches import TwoBatches


@dataclass(frozen=True)
class BySeed:
    """All samples to worker 0 or 1, as the seed is even or odd."""

    name = "by-seed"

    def assign(self, task):
        return np.full(task.num_samples, task.seed % 2, np.int32)


# Worker 0 is cheaper now by 8.
TASK = make_task([[0], [1]], [{}, {}], [1, 5], [2, 2], seed=6)


def following(owner):
    """A next batch that worker 0 trains: free if it owns the row, else dearer by 9 times its size."""
    return make_task([[0]], [{"owner": owner, "record_size": 3}], [1, 5], [1, 1], seed=6)


def test_the_better_pair_wins_even_if_its_first_part_is_dearer():
    ahead = TwoBatches(BySeed())
    assert ahead.assign_ahead(TASK, lambda worker: following(owner=worker[0])).tolist() == [0, 0]
    assert ahead.assign_ahead(TASK, lambda worker: following(owner=1 - worker[0])).tolist() == [1, 1]


def test_at_the_end_of_the_stream_the_cheaper_assignment_wins():
    assert TwoBatches(BySeed()).assign_ahead(TASK, lambda worker: None).tolist() == [0, 0]
    assert TwoBatches(BySeed()).assign_ahead(replace(TASK, seed=7), lambda worker: None).tolist() == [0, 0]


def test_without_a_choice_the_next_batch_is_not_asked_for():
    def follow(worker):
        raise AssertionError("asked")

    task = make_task([[0], [0]], [{}], [1, 1], [2, 0])
    assert TwoBatches(Laia()).assign_ahead(task, follow).tolist() == [0, 0]


@settings(max_examples=60)
@given(tasks())
def test_it_fills_places_like_the_inner_dispatcher_and_is_never_dearer(task):
    for name in ("laia", "esd:1"):
        ahead = make_dispatcher(f"two-batch:{name}")
        worker = ahead.assign_ahead(task, lambda worker: None)
        assert np.all(np.bincount(worker, minlength=task.num_workers) <= task.capacities)
        assert true_cost(task, worker) <= true_cost(task, ahead.inner.assign(task))
        np.testing.assert_array_equal(ahead.assign(task), ahead.inner.assign(task))


def test_equal_expected_costs_still_give_a_choice():
    # Any two samples together are optimal one by one; sharing a row decides.
    task = make_task([[0], [1], [0], [1]], [{}, {}], [1, 1], [2, 2])
    costs = {
        true_cost(
            task, make_dispatcher("two-batch:esd").assign_ahead(replace(task, seed=seed), lambda _: None)
        )
        for seed in range(20)
    }
    assert 2 in costs


def test_the_scheduler_can_tell_who_looks_ahead_and_who_learns():
    assert isinstance(TwoBatches(Laia()), LooksAhead)
    assert not isinstance(Laia(), LooksAhead)
    assert isinstance(LaiaAdaptive(), Learns)
    assert not isinstance(Laia(), Learns)


def test_the_inner_dispatcher_learns_and_is_set():
    ahead = make_dispatcher("two-batch:laia-adaptive:2:refresh-every=5")
    assert ahead.learns_at(5)
    assert not ahead.learns_at(6)
    assert not TwoBatches(Laia()).learns_at(5)
    taught = ahead.learn(np.array([1], np.int32), np.array([1], np.int32), samples_per_worker=5)
    assert taught.inner == replace(ahead.inner, ranking=(1,))
    assert with_settings(taught, tables_scored=1).inner == replace(taught.inner, tables_scored=1)
