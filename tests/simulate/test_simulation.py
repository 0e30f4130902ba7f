"""Whole simulations of small traces with the real scheduler."""

from dataclasses import replace

import numpy as np
import pytest

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    RowPolicy,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
    link_prices,
)
from rowhaul.schedule.plan import RowCounts
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Links, parse_links
from rowhaul.simulate.measure import adapted_setting
from rowhaul.simulate.run import Simulation, names_compared

NUM_WORKERS, BATCH = 4, 64


def trace(num_batches, seed=0, batch=BATCH):
    random = np.random.default_rng(seed)
    return [
        IdBatch.from_features([0, 1], random.zipf(1.4, 2 * batch) % 300, np.ones((2, batch), np.int32))
        for _ in range(num_batches)
    ]


def simulation(
    batches=None, compute=0.0, warmup=3, iterations=12, progress=None, links="5gbit*2,0.5gbit*2", **schedule
):
    topology = Topology(NUM_WORKERS)
    links = Links.make(topology, parse_links(links, NUM_WORKERS, "links"))
    batches = trace(12) if batches is None else batches
    return Simulation(
        batches=lambda: batches,
        batch_size=BATCH,
        schedule=ScheduleSettings(
            topology=topology,
            sizes=RowSizes(values=(64, 64), state=(0, 0)),
            prices=link_prices(links.worker_speeds),
            cache=schedule.pop("cache", CacheSettings(150)),
            **{"first_touch": False, **schedule},
        ),
        model=TimeModel(links, (compute,) * NUM_WORKERS),
        iterations=iterations,
        warmup=warmup,
        **({"progress": progress} if progress else {}),
    )


def test_averages_are_those_of_the_plans_after_the_warm_up():
    one = simulation()
    (outcome,) = one.run(["laia"], compare=False)
    scheduler = Scheduler(one.schedule.with_dispatcher("laia"), trace(12))
    plans = []
    while scheduler.fill():
        plans.append(scheduler.plan())
    counted = [plan.counts() for plan in plans[3:]]
    assert outcome.iterations == 9
    np.testing.assert_allclose(outcome.rows, sum(rows for rows, _ in counted) / 9)
    np.testing.assert_allclose(outcome.bytes, sum(num_bytes for _, num_bytes in counted) / 9)
    hits, lookups = (sum(getattr(plan, name).sum() for plan in plans[3:]) for name in ("hits", "lookups"))
    assert outcome.hit_ratio == pytest.approx(hits / lookups)
    # With parameter servers every row crosses one worker's link.
    seconds = outcome.bytes.sum(axis=0) / one.model.links.worker_speeds
    np.testing.assert_allclose(outcome.link_seconds, seconds)
    assert outcome.cost_seconds == pytest.approx(seconds.sum())
    assert outcome.slowest_link_seconds >= seconds.max() * (1 - 1e-12)
    assert len(outcome.cost_series) == len(outcome.decision_series) == len(outcome.iteration_series) == 12


def test_the_same_numbers_every_time():
    first, second = (simulation().run(["random", "esd:1"]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.name, one.shares) == (other.name, other.shares)
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_array_equal(one.iteration_series, other.iteration_series)


def test_every_mechanism_is_followed_by_its_comparisons():
    for shares, expected in [
        (None, ["laia", "laia@best-subset"]),
        ((20, 20, 12, 12), ["laia", "laia@equal", "laia@best-subset"]),
        ("auto", ["laia", "laia@equal", "laia@best-subset"]),
    ]:
        outcomes = simulation().run(["laia"], shares)
        assert [one.name for one in outcomes] == expected == names_compared(["laia"], shares, True)
        assert all(sum(one.shares) == BATCH for one in outcomes)
        subset = [share for share in outcomes[-1].shares if share]
        assert max(subset) - min(subset) <= 1
    assert outcomes[1].shares == (16,) * 4
    assert names_compared(["laia"], "auto", False) == ["laia"]


def test_the_best_subset_leaves_slow_links_out_where_only_transfers_count():
    laia, subset = simulation().run(["laia"])
    assert subset.slowest_link_seconds < laia.slowest_link_seconds
    assert subset.shares[2:] == (0, 0)
    assert not subset.rows[:, 2:].any()


@pytest.mark.parametrize("mechanism", ["random", "laia", "esd:1", "joint"])
@pytest.mark.parametrize("compute", [0.0, 2e-6])
def test_auto_never_loses_to_the_best_subset(mechanism, compute):
    auto, equal, subset = simulation(compute=compute).run([mechanism], "auto")
    measure = "iteration_seconds" if compute else "slowest_link_seconds"
    assert getattr(auto, measure) <= getattr(subset, measure)
    assert getattr(auto, measure) <= getattr(equal, measure)
    assert auto.name == mechanism


def test_auto_gives_slow_workers_a_share_where_compute_counts():
    # Compute outweighs transfers by far, so all workers are worth having.
    (auto,) = simulation(compute=1e-3).run(["esd:1"], "auto", compare=False)
    assert auto.shares == (16,) * 4


def test_given_shares_are_followed():
    (outcome,) = simulation().run(["esd:1"], (3, 1, 0, 0), compare=False)
    assert outcome.shares == (48, 16, 0, 0)
    assert outcome.workers_used == 2


def test_worker_0_takes_part_in_sums_even_without_a_share():
    """As in training: its slow link carries 10 MB of gradients even where it trains nothing."""
    one = simulation(links="0.01gbit,5gbit*3", compute=1e-6)
    one = replace(one, model=replace(one.model, dense_bytes=10_000_000))
    (outcome,) = one.run(["laia"], (0, 1, 1, 1), compare=False)
    assert outcome.iteration_seconds > 8
    assert (outcome.workers_used, outcome.num_summing) == (3, 4)
    auto, _, subset = one.run(["laia"], "auto")
    for found in (auto, subset):  # one machine has nothing to sum
        assert found.shares == (BATCH, 0, 0, 0)
        assert found.iteration_seconds < 1


def test_sums_of_replicated_rows_that_worker_0_takes_part_in_are_counted():
    hot = HotRows(tables=np.zeros(5, np.int32), keys=np.arange(5))
    (outcome,) = simulation(hot=hot).run(["laia"], (0, 1, 1, 0), compare=False)
    sums = outcome.moved_bytes - float(outcome.bytes.sum())
    assert sums == pytest.approx(2 * (3 - 1) * outcome.all_reduce_bytes)
    assert sums > 0


def test_alone_the_quickest_machine_is_worker_0_or_any_other():
    one = simulation()
    one = replace(one, model=replace(one.model, compute_seconds=(4e-3, 1e-3, 2e-3, 2e-3)))
    (outcome,) = one.run(["laia"], (1, 0, 1, 0), compare=False)
    assert outcome.alone_seconds == pytest.approx(BATCH * 1e-3)


def test_a_short_last_batch_is_averaged_into_what_one_machine_takes_like_into_iterations():
    (outcome,) = simulation([*trace(4), *trace(1, batch=16)], compute=1e-3).run(["laia"], compare=False)
    assert outcome.alone_seconds == pytest.approx((BATCH + 16) / 2 * 1e-3)


@pytest.mark.parametrize(
    ("dispatcher", "setting"),
    [
        ("joint:auto", "passes"),
        ("two-batch:joint:auto", "passes"),
        ("joint:5", None),
        ("laia-adaptive", "tables_scored"),
        ("two-batch:laia-adaptive", "tables_scored"),
        ("two-batch:two-batch:laia-adaptive", "tables_scored"),
        ("laia-adaptive:5", None),
        ("laia", None),
    ],
)
def test_what_a_decision_budget_changes(dispatcher, setting, monkeypatch):
    assert adapted_setting(dispatcher) == setting
    posted = []
    monkeypatch.setattr(Scheduler, "post", lambda scheduler, name, value: posted.append((name, value)))
    one = replace(simulation(dispatcher=dispatcher), decision_budget=1e-9)
    one.run([dispatcher], compare=False)
    assert posted == ([] if setting is None else [(setting, 0)])


def test_links_of_the_highest_prices_are_weighed_like_all_others():
    """The makespan changes weights by costs: times a weight, 1e18 exceeds 64 bits."""
    random, ones = np.random.default_rng(0), np.ones((2, 320), np.int32)
    batches = [IdBatch.from_features([0, 0], random.integers(0, 500, 640), ones) for _ in range(6)]
    plans = []
    for factor in (1, 8):
        schedule = replace(
            simulation(cache=CacheSettings(1000)).schedule,
            sizes=RowSizes(values=(20_000_001, 1), state=(0, 0)),
            prices=tuple(factor * price for price in (10_000_000, 40_000_000, 20_000_000, 50_000_000)),
            dispatcher="joint:objective=makespan",
        )
        scheduler = Scheduler(schedule, batches)
        plans.append([scheduler.plan().worker.tolist() for _ in batches if scheduler.fill()])
    assert plans[0] == plans[1]


def test_progress_is_told_of_every_iteration():
    told = []
    simulation(progress=lambda *state: told.append(state)).run(["laia"])
    stages = {stage for stage, _, _ in told}
    assert any("trying 2 workers" in stage for stage in stages)
    assert ("laia", 12, 12) in told


def test_a_trace_that_ends_early_counts_what_there_is():
    (outcome,) = simulation(trace(7)).run(["laia"], compare=False)
    assert outcome.iterations == 4
    with pytest.raises(DataError, match=r"holds 3 batches of 64 samples.*warm-up of 3"):
        simulation(trace(3)).run(["laia"], compare=False)


def test_a_cache_too_small_for_a_subset_leaves_it_out():
    needed = max(len(np.unique(batch.keys + 1000 * batch.tables)) for batch in trace(12))
    _, subset = simulation(cache=CacheSettings(needed // 2)).run(["esd:1"])
    assert subset.workers_used > 1
    with pytest.raises(ConfigError, match="cache"):
        simulation(cache=CacheSettings(3)).run(["esd:1"])


@pytest.mark.parametrize(("warmup", "iterations"), [(12, 12), (20, 12), (-1, 12), (0, 0)])
def test_something_must_be_left_to_measure(warmup, iterations):
    with pytest.raises(ConfigError, match="warm-up"):
        simulation(warmup=warmup, iterations=iterations)


def test_wrong_mechanisms_are_refused_before_anything_runs():
    ran = []
    one = simulation(progress=lambda *state: ran.append(state))
    with pytest.raises(ConfigError, match="known are random"):
        one.run(["laia", "magic"])
    with pytest.raises(ConfigError, match="named twice"):
        one.run(["laia", "laia"])
    assert not ran


@pytest.mark.parametrize("sync", ["full", "bounded:2", "static"])
def test_other_synchronisations_run(sync):
    (outcome,) = simulation(sync=sync).run(["esd:1"], compare=False)
    assert outcome.cost_seconds > 0
    assert outcome.iteration_seconds > 0


def test_workers_whose_messages_take_long_are_left_out():
    chosen, equal, subset = simulation(links="0.5gbit*2,5gbit@50ms*2").run(["laia"], shares="auto")
    assert chosen.shares[2:] == subset.shares[2:] == (0, 0)
    assert chosen.iteration_seconds < equal.iteration_seconds / 100


def test_the_best_subset_is_never_worse_than_all_workers():
    """At first all samples name one row, so one worker alone is best; later each names its own."""
    same = IdBatch.from_features([0], np.zeros(BATCH, np.int64), np.ones((1, BATCH), np.int32))
    own = [
        IdBatch.from_features([0], np.arange(BATCH) + 1000 * t, np.ones((1, BATCH), np.int32))
        for t in range(60)
    ]
    batches = [same] * 40 + own
    one = simulation(batches, iterations=100, links="1gbit", cache=CacheSettings(150))
    everyone, subset = one.run(["random"])
    assert subset.slowest_link_seconds <= everyone.slowest_link_seconds


def test_what_policies_of_tables_do_is_counted():
    policies = (RowPolicy(2, ttl=2), RowPolicy(max_rows=20))
    one = simulation(policies=policies)
    (outcome,) = one.run(["random"], compare=False)
    scheduler = Scheduler(one.schedule.with_dispatcher("random"), trace(12))
    counts = RowCounts()
    while scheduler.fill():
        plan = scheduler.plan()
        counts += RowCounts.of_plan(plan) if plan.iteration >= 3 else RowCounts()
    assert outcome.row_counts == {name: pytest.approx(count / 9) for name, count in vars(counts).items()}
    assert min(vars(counts).values()) > 0
    assert outcome.to_dict()["policies"] == outcome.row_counts
