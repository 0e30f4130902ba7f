"""Replicated rows, and other ones after a segment: training does not notice, whatever the cluster."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from cluster_checks import check_run
from exact_cases import KEYS, cases, least_capacity, most_capacity, with_capacity
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import rows_of, run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case

from rowhaul.schedule import HotRows, Scheduler
from rowhaul.schedule.row_states import State
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Link, Links
from rowhaul.simulate.measure import Span, measure
from rowhaul.transport.dense.gradients import DenseGradients, SharedGradients
from slow_cases import mostly_slow


@st.composite
def hot_sets(draw: st.DrawFn, num_tables: int, least: int = 0) -> HotRows:
    """Some rows, most of them often trained; one of the last keys may never be."""
    row = st.tuples(st.integers(0, num_tables - 1), st.sampled_from(KEYS[:8]))
    rows = sorted(draw(st.sets(row, min_size=least, max_size=6)))
    return HotRows(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))


@st.composite
def changing_cases(draw: st.DrawFn, sync: str, peer_to_peer: bool) -> Case:
    """A case in segments, after each of which other rows are replicated."""
    case = draw(cases(sync, peer_to_peer, undecided=True))
    num_tables, num_workers = len(case.tables), case.settings.topology.num_workers
    ends = sorted(draw(st.lists(st.integers(0, len(case.batches)), min_size=1, max_size=4)))
    counts = np.diff([0, *ends]).tolist()
    hot = draw(st.one_of(st.none(), hot_sets(num_tables, least=1)))
    case = with_capacity(case, most_capacity(case))
    case = replace(
        case,
        settings=replace(case.settings, hot=hot),
        segments=(*counts, None),
        replicated=tuple(draw(st.one_of(st.none(), hot_sets(num_tables))) for _ in counts),
    )
    # Rows that leave a set need room in caches that they did not need before.
    return with_capacity(case, least_capacity(case), (draw(st.integers(0, 2)),) * num_workers)


@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    mostly_slow(
        [("on-demand", False), ("on-demand", True), ("full", False), ("static", False)],
        ("on-demand", True),
    ),
)
@settings(max_examples=6, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_rows_may_enter_and_leave_the_replicated_set(
    sync: str, peer_to_peer: bool, data: st.DataObject
) -> None:
    case = data.draw(changing_cases(sync, peer_to_peer))
    outcome = run_cluster(case)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)
    _check_replicated(case, outcome.plans)


def _check_replicated(case: Case, plans: list) -> None:
    """In every iteration the rows of the set in force, and no others, are replicated."""
    hot, number = rows_of(case.settings.hot), 0
    for segment, count in enumerate(case.segments):
        for plan in plans[number:] if count is None else plans[number : number + count]:
            rows = zip(plan.tables.tolist(), plan.keys.tolist(), strict=True)
            assert [row in hot for row in rows] == (plan.states == State.REPLICATED).tolist()
            assert plan.all_reduce_rows == (plan.states == State.REPLICATED).sum()
            number += 1
        if (after := case.hot_after(segment)) is not None:
            hot = rows_of(after)


@settings(max_examples=5, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_the_simulator_counts_what_is_really_summed_and_moved(data: st.DataObject) -> None:
    case = data.draw(cases("on-demand", data.draw(st.booleans()), undecided=True))
    hot = data.draw(hot_sets(len(case.tables), least=1))
    case = with_capacity(case, most_capacity(case))
    case = replace(case, segments=(None,), settings=replace(case.settings, hot=hot))
    summed: Counter[threading.Thread] = Counter()
    begin = DenseGradients.begin

    def counted(self: DenseGradients, size: int, dtype: torch.dtype) -> SharedGradients:
        shared = begin(self, size, dtype)
        summed[threading.current_thread()] += shared.replicated.nbytes
        return shared

    with mock.patch.object(DenseGradients, "begin", counted):
        outcome = run_cluster(case)
    topology, count = case.settings.topology, len(case.batches)
    links = Links.make(topology, (Link(1e6),) * topology.num_workers)
    simulated = measure(
        lambda: list(case.id_batches()),
        max(len(one) for one in case.batches),
        case.settings,
        TimeModel(links, (0.0,) * topology.num_workers),
        Span(count, 0),
    )
    assert len(summed) == topology.num_workers
    for num_bytes in summed.values():
        assert num_bytes == pytest.approx(simulated.all_reduce_bytes * count)
    assert sum(outcome.posted.values()) == pytest.approx(simulated.bytes.sum() * count)


@settings(max_examples=10, derandomize=True)
@given(data=st.data())
def test_a_scheduler_goes_on_from_a_state_with_the_rows_that_were_replicated_last(
    data: st.DataObject,
) -> None:
    case = data.draw(
        st.sampled_from(["on-demand", "full", "static"]).flatmap(lambda sync: changing_cases(sync, False))
    )
    plans, scheduler = [], Scheduler(case.settings, case.id_batches())
    for count, hot in zip(case.segments, (*case.replicated, None), strict=False):
        end = None if count is None else len(plans) + count
        while len(plans) != end and scheduler.fill():
            plans.append(scheduler.plan())
        if hot is None:
            continue
        if data.draw(st.booleans()):
            scheduler.fill()  # rows of batches that are read ahead enter and leave, too
        scheduler.replicate(hot)
        again = Scheduler(scheduler.settings, list(case.id_batches())[len(plans) :])
        again.restore(scheduler.export())
        for name, column in scheduler.states().items():
            assert np.array_equal(column, again.states()[name]), name
        scheduler = again  # whose plans must be those of a scheduler that was never saved
    assert [plan.digest() for plan in plans] == [plan.digest() for plan in case.plans()]
