"""What moves and sums take, as the hot-row model is told; and the settings that ask for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rowhaul.cli.run import topology_flag
from rowhaul.errors import ConfigError
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import CacheSettings, RowSizes, ScheduleSettings, Topology
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.hot import Processors
from rowhaul.simulate.links import Link, Links
from rowhaul.train import TrainConfig
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.tuning.hot_set import watch as hot_watch
from rowhaul.tuning.hot_set.controller import largest
from rowhaul.tuning.hot_set.costs import Line, calibrated, modelled_seconds, processors
from rowhaul.tuning.hot_set.watch import Watch
from rowhaul.tuning.move_costs import CollectiveTimes, Timed, _moving_plan, _plan

COLOCATED = Topology(4, colocated=True)


def times_of(truth: TimeModel, topology: Topology, cpu_per_move: float = 0.0) -> CollectiveTimes:
    """Trials as they would come out on a cluster that behaves like this model."""
    plans = [_moving_plan(topology, np.arange(count), 256) for count in (40, 160, 640)]
    nothing = _moving_plan(topology, np.arange(0), 256).moves
    sums = [_plan(topology, nothing, count, count * 256) for count in (40, 160, 640)]
    return CollectiveTimes(
        tuple(
            Timed(one, modelled_seconds(one, truth), 1e-3 + cpu_per_move * len(one.moves)) for one in plans
        ),
        tuple(Timed(one, modelled_seconds(one, truth), 2e-6 * one.all_reduce_rows) for one in sums),
    )


def test_the_clock_is_set_by_what_was_measured() -> None:
    def some_links(speed: float, latency: float) -> Links:
        return Links((Link(speed, latency),) * 4, ())

    truth = TimeModel(some_links(1e6, 2e-3), (0.0,) * 4, sum_weight=1.7)
    found = calibrated(times_of(truth, COLOCATED), some_links(5e6, 1e-3), COLOCATED)
    assert found.links.workers[0].bytes_per_second == pytest.approx(1e6, rel=0.02)
    assert found.links.workers[0].latency_seconds == pytest.approx(2e-3, rel=0.05)
    assert found.sum_weight == pytest.approx(1.7, rel=0.05)


def test_a_store_is_as_slow_as_it_is_when_all_workers_use_it() -> None:
    topology = Topology(3, num_stores=1)

    def some_links(store: float) -> Links:
        return Links((Link(1e6, 1e-3),) * 3, (Link(store, 1e-3),))

    truth = TimeModel(some_links(1e6), (0.0,) * 3, sum_weight=1.2)
    found = calibrated(times_of(truth, topology), some_links(3e6), topology)  # no pair shows that it is 1e6
    assert found.links.workers[0].bytes_per_second == pytest.approx(1e6)
    assert found.links.stores[0].bytes_per_second == pytest.approx(1e6, rel=0.02)
    assert found.sum_weight == pytest.approx(1.2, rel=0.05)


def test_workers_links_are_no_slower_than_sums_over_them() -> None:
    topology = Topology(3, num_stores=1)
    truth = TimeModel(Links((Link(4e6),) * 3, (Link(3e6),)), (0.0,) * 3)
    held_up = Links((Link(1e6),) * 3, (Link(3e6),))  # by something else, while pairs were measured
    found = calibrated(times_of(truth, topology), held_up, topology)
    assert found.links.workers[0].bytes_per_second == pytest.approx(4e6, rel=0.02)
    assert found.links.stores[0].bytes_per_second == pytest.approx(3e6, rel=0.02)
    assert found.sum_weight == pytest.approx(1.0, rel=0.02)


def test_one_worker_has_nothing_to_calibrate() -> None:
    links = Links((Link(1e6),), ())
    found = calibrated(CollectiveTimes((), ()), links, Topology(1, colocated=True))
    assert found.links == links
    assert processors(CollectiveTimes((), ()), 1.0) == Processors()


def test_cpu_seconds_become_seconds_of_a_host() -> None:
    truth = TimeModel(Links((Link(1e6),) * 4, ()), (0.0,) * 4)
    found = processors(times_of(truth, COLOCATED, cpu_per_move=3e-6), 0.5)
    assert found.per_moved_row == pytest.approx(1.5e-6, rel=1e-3)
    assert found.per_summed_row == pytest.approx(1e-6, rel=1e-3)


def test_a_line_neither_begins_below_nothing_nor_falls() -> None:
    exact = Line.through([1, 2, 4], [3, 5, 9])
    assert (exact.seconds, exact.each) == pytest.approx((1, 2))
    assert Line.through([1, 2, 3], [1, 3, 5]).seconds == 0
    falling = Line.through([1, 2, 3], [5, 4, 3])
    assert falling.seconds == 0
    assert falling.each > 0


def test_a_disturbed_small_trial_does_not_change_the_speed() -> None:
    quantity = np.array([24, 96, 384, 1536])
    calm, disturbed = 1e-3 + 5e-5 * quantity, 1e-3 + 5e-5 * quantity + [5e-3, 0, 0, 0]
    for seconds in (calm, disturbed):
        assert Line.through(quantity.tolist(), seconds.tolist()).each == pytest.approx(5e-5, rel=0.05)


def test_the_rest_is_what_iterations_take_beside_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(hot_watch.time, "perf_counter", lambda: clock[0])
    watch = Watch(num_workers=2, length=8)
    for number in range(10):
        clock[0] += 0.25
        measures = np.zeros((3, len(MEASURES)))
        measures[:, MEASURES.index("cpu")] = number * 0.1  # of each of three ranks
        measures[:2, MEASURES.index("compute")] = 0.02
        measures[:2, MEASURES.index("samples")] = 10
        plan = SimpleNamespace(moves=np.zeros(1000), all_reduce_rows=100)
        watch.observe(SimpleNamespace(measures=measures, plan=plan))
    assert watch.iteration_seconds == pytest.approx(0.25)
    assert watch.compute_seconds() == pytest.approx((0.002, 0.002))
    busy = watch.with_the_rest(Processors(0.0, 1e-5, 1e-4), share=0.5)
    assert busy.seconds == pytest.approx(0.5 * 0.3 - 1000 * 1e-5 - 100 * 1e-4)
    assert watch.seconds_since_rest == pytest.approx([0.25] * 9)
    watch.rested()
    assert watch.iteration_seconds == 0
    assert not watch.seconds_since_rest
    assert watch.with_the_rest(Processors(), share=0.5) == Processors()


def test_half_of_what_a_cache_holds_may_be_hot() -> None:
    settings = ScheduleSettings(
        topology=COLOCATED,
        sizes=RowSizes((64, 128), (0, 0)),
        prices=(1,) * 4,
        cache=CacheSettings((100, 80, 100, 100)),
    )
    assert largest(settings) == 40
    assert largest(replace(settings, cache=CacheSettings(12800, "bytes"))) == 50


def test_hot_rows_are_a_number_or_auto() -> None:
    assert ClusterConfig(hot_rows="auto").hot_is_auto
    assert ClusterConfig(hot_rows="auto").num_hot_rows == 0
    assert ClusterConfig(hot_rows="64").num_hot_rows == 64
    assert TrainConfig.from_dict({"cluster": {"hot_rows": "auto"}}).cluster.hot_is_auto
    assert TrainConfig.from_dict({"cluster": {"hot_rows": 7}}).cluster.hot_rows == 7
    ClusterConfig(sync="static", hot_rows="auto")
    for wrong in ("many", -1, "-1", 1.5):
        with pytest.raises(ConfigError, match="whole number, at least 0, or auto"):
            ClusterConfig(hot_rows=wrong)
    with pytest.raises(ConfigError, match=r"cluster\.hot_rows: expected"):
        TrainConfig.from_dict({"cluster": {"hot_rows": [1]}})


def test_a_topology_may_be_named() -> None:
    assert topology_flag(None, True) == {}
    assert topology_flag("colocated", None) == {"colocated": True}
    assert topology_flag("stores", None) == {"colocated": False}
    with pytest.raises(ConfigError, match="stores or colocated; got 'ring'"):
        topology_flag("ring", None)
    with pytest.raises(ConfigError, match="beside --colocated"):
        topology_flag("stores", True)
