"""Predictions equal the simulator's, and what must hold at the ends of the scale."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.advising.costs import Costs, Line
from rowhaul.advising.costs import given as given_costs
from rowhaul.advising.predict import HALF_SUM_AFTER, SPEEDS, Machines, predict, predict_alone, seconds_at
from rowhaul.advising.trace import Trace
from rowhaul.data.schema import Schema
from rowhaul.errors import DataError
from rowhaul.schedule import Topology
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Link, Links
from rowhaul.simulate.measure import Span, measure
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, TrainConfig

CLUSTER = ClusterConfig(cache="100000")
CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=8, options={"top": [16]}), batch_size=250, cluster=CLUSTER
)
LINK = Link(2e6)


@pytest.fixture(scope="module")
def trace(log_folder):
    schema = Schema.read(log_folder / "schema.yaml")
    return Trace.read(CONFIG, schema, f"{log_folder}/*.parquet", 16)


@pytest.mark.slow
def test_a_prediction_is_what_the_simulator_says(trace):
    costs, machines = given_costs(20e-6), Machines((LINK,) * 2, 2)
    found = predict(trace, CLUSTER, 2, "laia", None, machines, costs)
    topology = Topology(2, 0, colocated=True, peer_to_peer=True)
    settings = trace.layout.schedule_settings(replace(CLUSTER, dispatcher="laia"), topology, speeds=[2e6] * 2)
    compute = (20e-6,) * 2
    model = TimeModel(
        Links.make(topology, (LINK,) * 2), compute, trace.dense_bytes, half_sum_after=HALF_SUM_AFTER
    )
    outcome = measure(lambda: trace.batches, 250, settings, model, Span(len(trace.batches), 0))
    skipped = len(trace.batches) // 3
    assert found.seconds == pytest.approx(outcome.iteration_series[skipped:-1].mean())
    assert found.seconds == pytest.approx(found.compute + found.rows + found.dense)


def test_links_without_end_leave_only_compute(trace):
    fast = Machines((Link(1e15),) * 4, 64)
    found = predict(trace, CLUSTER, 4, "round-robin", None, fast, Costs(Line(0, 1e-3), Line(0, 1e-3)))
    alone = predict_alone(trace, given_costs(1e-3))
    assert alone.seconds / found.seconds == pytest.approx(4, rel=0.02)  # shares of 62 and 63 samples


def test_shared_cores_take_turns(trace):
    fast = Machines((Link(1e15),) * 4, 2, share_cores=True)
    found = predict(trace, CLUSTER, 4, "round-robin", None, fast, given_costs(1e-2))
    assert found.seconds == pytest.approx(250 * 1e-2 / 2, rel=0.1)


def test_slower_links_never_help_and_hot_rows_are_summed(trace):
    machines = Machines((LINK,) * 2, 2)
    plain = predict(trace, CLUSTER, 2, "round-robin", None, machines, given_costs(1e-6))
    assert list(plain.at_speed) == sorted(plain.at_speed, reverse=True)
    assert seconds_at(plain, 1.0) == pytest.approx(plain.seconds)
    hot = predict(trace, CLUSTER, 2, "round-robin", trace.most_frequent(50), machines, given_costs(1e-6))
    assert (hot.hot_rows, hot.name) == (50, "round-robin, 50 hot rows")
    assert hot.row_bytes < plain.row_bytes
    assert hot.dense_bytes > plain.dense_bytes
    assert len(hot.at_speed) == len(SPEEDS)


def test_rows_that_are_not_admitted_do_not_move(trace, log_folder):
    config = replace(CONFIG, tables={"default": {"admit_after": 3}})
    waiting = Trace.read(config, Schema.read(log_folder / "schema.yaml"), f"{log_folder}/*.parquet", 16)
    machines = Machines((LINK,) * 2, 2)
    plain, fewer = (
        predict(one, CLUSTER, 2, "round-robin", None, machines, given_costs(1e-6)) for one in (trace, waiting)
    )
    assert 0 < fewer.row_bytes < 0.9 * plain.row_bytes


def test_the_most_frequent_rows_are_those_counted_one_by_one(trace):
    pairs = np.concatenate([np.stack([one.tables, one.keys], axis=1) for one in trace.batches])
    rows, counts = np.unique(pairs, axis=0, return_counts=True)
    hot = trace.most_frequent(30)
    chosen = {(int(table), int(key)) for table, key in zip(hot.tables, hot.keys, strict=True)}
    by_row = {tuple(map(int, row)): count for row, count in zip(rows, counts, strict=True)}
    assert sorted(by_row[row] for row in chosen) == sorted(counts)[-30:]


def test_planning_takes_time_from_training_where_a_machine_has_one_core(trace):
    links, costs = (Link(1e15),) * 2, given_costs(1e-3)
    one, two = (
        predict(trace, CLUSTER, 2, "round-robin", None, Machines(links, cores), costs) for cores in (1, 2)
    )
    assert one.compute == two.compute == pytest.approx(0.125)
    assert one.planning == pytest.approx(one.planning_cpu, rel=1e-3)
    assert two.planning == 0  # done beside training, which takes longer
    slow = predict(trace, CLUSTER, 2, "round-robin", None, Machines((LINK,) * 2, 1), costs)
    assert slow.planning == 0  # done while it waits for the links
    for found in (one, two, slow):
        parts = found.compute + found.rows + found.dense + found.planning
        assert found.seconds == pytest.approx(parts)


def test_every_machine_reads_the_whole_batch(trace):
    machines = Machines((Link(1e15),) * 2, 1)
    costs = given_costs(1e-3)
    plain, reads = (
        predict(trace, CLUSTER, 2, "round-robin", None, machines, one)
        for one in (costs, replace(costs, reading=1e-3))
    )
    assert reads.planning_cpu - plain.planning_cpu == pytest.approx(0.25, rel=0.1)
    assert reads.seconds - plain.seconds == pytest.approx(0.25, rel=0.1)


def test_planning_beside_training_takes_longer_than_by_itself(trace):
    machines, costs = Machines((Link(1e15),) * 2, 1), given_costs(1e-3)
    plain, dearer = (
        predict(trace, CLUSTER, 2, "round-robin", None, machines, one)
        for one in (costs, replace(costs, planning=1000.0))
    )
    assert dearer.planning_cpu > 100 * plain.planning_cpu
    assert dearer.planning == pytest.approx(dearer.planning_cpu, rel=1e-3)


def test_too_little_data_is_refused(log_folder):
    schema = Schema.read(log_folder / "schema.yaml")
    with pytest.raises(DataError, match="a smaller --batch-size"):
        Trace.read(replace(CONFIG, batch_size=4000), schema, f"{log_folder}/*.parquet", 16)


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 10), st.floats(0, 10))
def test_a_line_never_falls_nor_goes_below_zero(small, more, first, second):
    line = Line.through({small: first, small + more: second})
    assert line.fixed >= 0
    assert line.per_sample >= 0
    if first <= second and first * (small + more) >= second * small:  # both points can lie on it
        assert line(small) == pytest.approx(first, abs=1e-9)
        assert line(small + more) == pytest.approx(second, abs=1e-9)
