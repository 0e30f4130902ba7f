"""The clock says what a plain simulation of every event says, on plans drawn at random and real ones."""

import numpy as np
import pytest
from event_clock import FairLinks, seconds_by_events
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import plan

from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    Kind,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
)
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.links import Link, Links

# Powers of two, so that seconds add up without rounding and what starts together is seen to.
SPEEDS = [2.0**power for power in (3, 6, 7, 10)]
LATENCIES = [0.0, 2.0**-4, 0.5]
# Bytes that 2, 3 or 4 workers can slice, and halves of them, too.
TWELVES = st.integers(0, 50).map(lambda number: 24 * number)


def seconds_of(plans, model, training):
    clock = Clock(model, training)
    return [*(clock.observe(one) for one in plans), clock.finish()][1:]


def drawn_links(draw, num_workers, num_stores):
    link = st.builds(Link, st.sampled_from(SPEEDS), st.sampled_from(LATENCIES))
    workers, stores = (
        tuple(draw(st.lists(link, min_size=count, max_size=count))) for count in (num_workers, num_stores)
    )
    return Links(workers, stores)


@st.composite
def drawn_moves(draw, iteration, num_workers, num_ranks):
    kind = draw(st.sampled_from(list(Kind)))
    worker = draw(st.integers(0, num_workers - 1))
    others = [rank for rank in range(num_ranks) if rank != worker]
    if kind == Kind.PEER_SEND:
        others = [rank for rank in others if rank < num_workers]
    other = draw(st.sampled_from(others))
    ends = (other, worker) if kind == Kind.MISS_PULL else (worker, other)
    after = draw(st.sampled_from([0, 0, 0, 1])) if kind == Kind.UPDATE_PUSH else 0
    key, ready = draw(st.integers(0, 3)), iteration - draw(st.integers(0, 1))
    return kind, *ends, draw(st.integers(1, 200)), ready, key, after


@st.composite
def drawn_cases(draw):
    num_workers, num_stores = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    plans = [
        plan(
            iteration,
            draw(st.lists(drawn_moves(iteration, num_workers, num_workers + num_stores), max_size=12)),
            draw(st.lists(st.integers(0, num_workers - 1), max_size=6)),
            num_workers,
            draw(TWELVES),
        )
        for iteration in range(draw(st.integers(1, 4)))
    ]
    sums = draw(st.sampled_from(["shared", "apart", "measured"]))
    each = st.sampled_from([0.0, 0.25, 2.0])
    model = TimeModel(
        drawn_links(draw, num_workers, num_stores),
        tuple(draw(st.lists(each, min_size=num_workers, max_size=num_workers))),
        dense_bytes=draw(TWELVES),
        dense_links=drawn_links(draw, num_workers, 0) if sums == "apart" else None,
        dense_seconds=1.5 if sums == "measured" else None,
        half_sum_after=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    training = draw(st.sets(st.integers(0, num_workers - 1), min_size=1))
    return plans, model, sorted(training)


@settings(max_examples=150)
@given(drawn_cases())
def test_any_plans_take_what_their_events_take(case):
    plans, model, training = case
    assert seconds_of(plans, model, training) == seconds_by_events(plans, model, training)


TOPOLOGIES = {
    "store": Topology(4),
    "stores": Topology(4, num_stores=2),
    "co-located": Topology(4, colocated=True),
    "peers": Topology(4, peer_to_peer=True),
}


def real_plans(topology, sync="on-demand", look_ahead=1):
    random = np.random.default_rng(0)
    batches = [
        IdBatch.from_features([0, 1], random.zipf(1.3, 128) % 200, np.ones((2, 64), np.int32))
        for _ in range(20)
    ]
    scheduler = Scheduler(
        ScheduleSettings(
            topology=topology,
            sizes=RowSizes((64, 32), (0, 32)),
            prices=(1, 1, 8, 8),
            cache=CacheSettings(60),
            dispatcher="esd:1",
            sync=sync,
            look_ahead=look_ahead,
            hot=HotRows(np.zeros(2, np.int32), np.arange(1, 3)) if sync == "static" else None,
        ),
        batches,
    )
    plans = []
    while scheduler.fill():
        plans.append(scheduler.plan())
    return plans


def real_model(topology, **others):
    """Two fast workers and two slow ones; times of moving and computing are of the same order."""
    workers = tuple(Link(2.0**power, 2.0**-8) for power in (14, 14, 11, 11))
    stores = () if topology.colocated else (Link(2.0**15, 2.0**-9),) * topology.num_stores
    return TimeModel(Links(workers, stores), (2.0**-6,) * 4, **others)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("dense_bytes", [0, 768])
def test_real_plans_take_what_their_events_take(name, dense_bytes):
    plans = real_plans(TOPOLOGIES[name])
    model = real_model(TOPOLOGIES[name], dense_bytes=dense_bytes)
    assert seconds_of(plans, model, range(4)) == seconds_by_events(plans, model, range(4))


@pytest.mark.parametrize(
    ("sync", "look_ahead"), [("on-demand", 0), ("full", 1), ("bounded:1", 1), ("static", 1)]
)
def test_real_plans_of_other_synchronisations_take_what_their_events_take(sync, look_ahead):
    plans, model = real_plans(Topology(4), sync, look_ahead), real_model(Topology(4))
    assert seconds_of(plans, model, range(4)) == seconds_by_events(plans, model, range(4))


@pytest.mark.parametrize(
    ("name", "tolerance"), [("store", 0.01), ("stores", 0.1), ("co-located", 0.1), ("peers", 0.1)]
)
@pytest.mark.parametrize("dense_bytes", [0, 768])
def test_links_that_all_messages_share_fairly_give_nearly_the_same(name, tolerance, dense_bytes):
    """Serving first what starts first is simpler than what networks do, and makes little difference."""
    plans = real_plans(TOPOLOGIES[name])
    model = real_model(TOPOLOGIES[name], dense_bytes=dense_bytes)
    served, shared = seconds_of(plans, model, range(4)), seconds_by_events(plans, model, range(4), FairLinks)
    assert sum(served) == pytest.approx(sum(shared), rel=tolerance if not dense_bytes else 0.1)
