"""The model that says how many rows to replicate: its counts are the scheduler's, its choice the best."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import links, plan

from rowhaul.errors import DataError
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.simulate import hot
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.hot import Beginning, HotModel, Processors

WORKERS = 3
SCHEDULE = ScheduleSettings(
    topology=Topology(WORKERS, num_stores=1),
    sizes=RowSizes(values=(64, 64), state=(0, 0)),
    prices=(1,) * WORKERS,
    cache=CacheSettings(500),
    dispatcher="round-robin",
    first_touch=False,
)
SLOW_STORE = TimeModel(links([1e6] * WORKERS, [1e6]), (0.0,) * WORKERS)


def skewed_batches(count: int = 12, size: int = 30, seed: int = 0) -> list[IdBatch]:
    rng = np.random.default_rng(seed)
    tables = [0, 1]
    return [
        IdBatch.from_features(tables, np.minimum(rng.zipf(1.3, 2 * size), 400), np.ones((2, size), np.int32))
        for _ in range(count)
    ]


def model(batches: list[IdBatch], time: TimeModel = SLOW_STORE, **given: object) -> HotModel:
    return HotModel(batches, SCHEDULE, time, len(batches), 2, **given)


def test_predicted_counts_are_those_of_the_scheduler() -> None:
    batches = skewed_batches()
    made = model(batches)
    for count in (0, 5, 40):
        predicted = made.predict(count)
        hot_rows = made.rows_before(count)
        scheduler = Scheduler(replace(SCHEDULE, hot=hot_rows if count else None), batches)
        plans = []
        while scheduler.fill():
            plans.append(scheduler.plan())
        assert predicted.num_rows == count
        assert predicted.summed_rows == pytest.approx(np.mean([one.all_reduce_rows for one in plans[2:]]))
        assert predicted.summed_bytes == pytest.approx(np.mean([one.all_reduce_bytes for one in plans[2:]]))
        assert predicted.moved_rows == pytest.approx(np.mean([len(one.moves) for one in plans[2:]]))
        assert predicted.moved_bytes == pytest.approx(
            np.mean([one.moves.num_bytes.sum() for one in plans[2:]])
        )


def test_coverage_is_the_share_of_accesses() -> None:
    batches = skewed_batches()
    made = model(batches)
    hot_rows = made.rows_before(7)
    chosen = set(zip(hot_rows.tables.tolist(), hot_rows.keys.tolist(), strict=True))
    named = [row for one in batches[2:] for row in zip(one.tables.tolist(), one.keys.tolist(), strict=True)]
    assert made.predict(7).coverage == pytest.approx(sum(row in chosen for row in named) / len(named))
    assert made.predict_rows(made.rows(10**9)).coverage == 1.0


def test_rows_are_not_ranked_by_the_batches_that_they_are_predicted_on() -> None:
    """Rows of one batch each, never to return: none of those counted will ever be summed."""
    ones = np.ones((1, 30), np.int32)
    batches = [IdBatch.from_features([0], 30 * one + np.arange(30), ones) for one in range(12)]
    made = HotModel(batches, SCHEDULE, SLOW_STORE, 8, 2)
    assert made.most(10**9) == 30 * 6
    assert made.predict(30 * 6).summed_rows == made.predict(30 * 6).coverage == 0
    assert made.predict_rows(made.rows(30 * 12)).summed_rows == 30
    assert made.choose(10**9).num_rows == 0


@pytest.mark.parametrize("hot_now", [0, 9])
def test_a_run_under_way_is_predicted_from_where_it_is(hot_now: int) -> None:
    """Plans of a scheduler that trained on, and then was given other rows, are those that are predicted."""
    batches = skewed_batches(16)
    now = model(batches[:6]).rows(hot_now) if hot_now else None
    run = Scheduler(replace(SCHEDULE, hot=now), batches)
    for _ in range(6):
        assert run.fill()
        run.plan()
    beginning = Beginning(6, run.export(), now)
    made = HotModel(batches, SCHEDULE, SLOW_STORE, 10, 3, beginning=beginning)
    predicted = made.predict(20)
    chosen = made.rows(20)
    assert np.array_equal(chosen.keys, made.rows_before(20).keys), "rows are ranked by batches still to come"
    run.replicate(chosen)
    plans = []
    while run.fill():
        plans.append(run.plan())
    assert predicted.moved_rows == pytest.approx(np.mean([len(one.moves) for one in plans[3:]]))
    assert predicted.summed_rows == pytest.approx(np.mean([one.all_reduce_rows for one in plans[3:]]))
    with pytest.raises(DataError, match="must begin where the run is"):
        HotModel(batches, SCHEDULE, SLOW_STORE, 9, 3, beginning=beginning)


def test_workers_that_training_has_left_out_sum_nothing_in_predictions() -> None:
    """The shares of the settings are those of the beginning: the run's own are in its scheduler."""
    batches = skewed_batches(16)
    run = Scheduler(SCHEDULE, batches)
    run.fill()
    run.post("shares", (1, 1, 0))
    for _ in range(6):
        assert run.fill()
        run.plan()
    slow = TimeModel(links([1e6, 1e6, 1e3], [1e6]), (0.0,) * WORKERS, dense_bytes=10_000)
    made = HotModel(batches, SCHEDULE, slow, 10, 3, beginning=Beginning(6, run.export(), None))
    assert made.predict(0).seconds < 1  # worker 2 would need 10 for its part of a sum
    clock, seconds = Clock(slow, training=(0, 1)), []
    while run.fill():
        seconds.append(clock.observe(run.plan()))
    assert made.predict(0).seconds == pytest.approx(np.mean(seconds[4:]))


def test_a_busy_store_is_relieved_by_hot_rows() -> None:
    made = model(skewed_batches())
    chosen = made.choose(10**6)
    assert chosen.num_rows > 0
    assert chosen.seconds < made.predict(0).seconds
    assert chosen.seconds <= hot.AS_GOOD * min(one.seconds for one in made.tried)


def test_nothing_is_replicated_where_sums_are_dear_or_memory_is_short() -> None:
    assert model(skewed_batches(), replace(SLOW_STORE, sum_weight=1000.0)).choose(10**6).num_rows == 0
    assert model(skewed_batches()).choose(0).num_rows == 0
    assert model(skewed_batches()).choose(20).num_rows <= 20


def test_processors_bound_an_iteration_from_below() -> None:
    busy = Processors(1.0, 0.001, 0.01)
    made = model(skewed_batches(), processors=busy)
    one = made.predict(10)
    assert one.seconds == pytest.approx(busy.busy(one.moved_rows, one.summed_rows))


def test_caches_that_are_too_small_without_hot_rows_do_not_end_the_search() -> None:
    schedule = replace(SCHEDULE, cache=CacheSettings(14))
    batches = skewed_batches()
    made = HotModel(batches, schedule, SLOW_STORE, len(batches), 2)
    assert made.predict(0).seconds == math.inf
    assert made.choose(10**6).seconds < math.inf


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(DataError, match="of 3 batches 4 cannot be scheduled"):
        HotModel(skewed_batches(3), SCHEDULE, SLOW_STORE, 4, 1)


@settings(max_examples=100)
@given(st.integers(1, 5000), st.integers(0, 60), st.floats(0.1, 10), st.integers(0, 60))
def test_ternary_search_finds_the_bottom(most: int, bottom: int, steepness: float, too_few: int) -> None:
    """Caches may be too small for the first sizes: an iteration with these never ends."""
    sizes = hot._sizes(most)
    assert sizes[-1] == most
    values = {size: abs(place - bottom) * steepness for place, size in enumerate(sizes)}
    values |= dict.fromkeys(sizes[:too_few], math.inf)
    found = hot._ternary(sizes, values.__getitem__)
    assert values[sizes[found]] == min(values.values())
    assert all(sizes[0] <= near <= most for near in hot._near(sizes, found))


def test_a_weight_of_two_makes_a_sum_take_as_long_as_one_of_twice_the_bytes() -> None:
    def seconds(weight: float, num_bytes: int) -> float:
        clock = Clock(TimeModel(links([10.0, 10.0], [10.0]), (0.0, 0.0), sum_weight=weight), training=(0, 1))
        clock.observe(plan(0, all_reduce_bytes=num_bytes))
        return clock.finish()

    assert seconds(2.0, 400) == seconds(1.0, 800) > seconds(1.0, 400)
