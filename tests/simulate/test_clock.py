"""The time model on plans small enough to compute by hand.

Two workers of 100 and 10 bytes a second and one store (rank 2), unless a test says otherwise.
"""

import numpy as np
import pytest
from simulate_cases import links, plan, pull, push

from rowhaul.errors import ConfigError
from rowhaul.schedule.plan import Kind, Payload
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.links import Link, Links


def seconds_of(plans, model, training=(0, 1)):
    """Seconds of each iteration."""
    clock = Clock(model, training)
    seconds = [clock.observe(one) for one in plans]
    assert seconds[0] is None
    return [*seconds[1:], clock.finish()]


def model(workers=(100.0, 10.0), stores=(1000.0,), latency=0.0, compute=(0.0, 0.0), **others):
    return TimeModel(links(workers, stores, latency), tuple(compute), **others)


def test_an_iteration_without_moves_takes_what_the_slowest_worker_computes():
    plans = [plan(0, worker=[0, 0, 0, 1])]
    assert seconds_of(plans, model(compute=(0.5, 2.0))) == [2.0]
    assert seconds_of(plans, model(compute=(0.5, 1.0))) == [1.5]


def test_a_phase_lasts_as_long_as_its_busiest_link():
    late = plan(0, [pull(0, 300, 0), pull(0, 200, 0), pull(1, 40, 0)])
    assert seconds_of([late], model()) == [5.0]
    late = plan(0, [pull(0, 300, 0), pull(1, 40, 0)])
    assert seconds_of([late], model()) == [4.0]


def test_pushes_and_pulls_of_other_rows_travel_together_before_compute():
    late = plan(0, [push(0, 300, 0), pull(1, 40, 0), (Kind.EVICT_PUSH, 0, 2, 200, 0)], worker=[1])
    assert seconds_of([late], model(compute=(0.0, 3.0))) == [4 + 3]


def test_a_pull_waits_for_the_push_of_its_row():
    late = plan(0, [push(0, 300, 0, key=7), pull(1, 40, 0, key=7)], worker=[1])
    assert seconds_of([late], model(compute=(0.0, 3.0))) == [3 + 4 + 3]


def test_a_home_goes_on_when_all_pushes_of_a_turn_are_there():
    # The fast worker's own row is there after a second; the home still receives from the slow one.
    moves = [push(1, 40, 0), push(0, 100, 0, key=7), pull(0, 100, 0, key=7)]
    assert seconds_of([plan(0, moves)], model()) == [4 + 1]
    # Of two homes only the one that is pushed to waits.
    moves = [push(1, 40, 0, store=3), push(0, 100, 0, key=7), pull(0, 100, 0, key=7)]
    assert seconds_of([plan(0, moves, worker=[0])], model(stores=(1000.0,) * 2, compute=(9.0, 0.0))) == [
        2 + 9
    ]


def test_nobody_waits_for_what_it_sends():
    slow_push = plan(0, [push(1, 100, 0)], worker=[1])
    assert seconds_of([slow_push], model(compute=(0.0, 12.0))) == [12.0]
    assert seconds_of([slow_push], model(compute=(0.0, 2.0))) == [
        10.0
    ]  # the home waits, and the next iteration


def test_peers_get_a_row_from_the_one_that_gathered_it():
    # Worker 1 gathers: it receives a gradient, then sends the record on.
    gradient = (Kind.PEER_SEND, 0, 1, 40, 0, 7, 0)
    record = (Kind.PEER_SEND, 1, 0, 60, 0, 7, 0)
    gathered = plan(0, [gradient, record], worker=[0])
    gathered.moves.payload[:] = Payload.GRADIENT, Payload.VALUES
    gathered.moves.second[:] = 0, 1
    assert seconds_of([gathered], model(compute=(1.0, 0.0))) == [4 + 6 + 1]


def test_a_worker_computes_once_it_has_its_own_rows():
    moves = [pull(0, 100, 0), pull(1, 40, 0)]
    assert seconds_of([plan(0, moves, worker=[0])], model(compute=(2.0, 0.0))) == [4.0]
    assert seconds_of([plan(0, moves, worker=[0])], model(compute=(5.0, 0.0))) == [6.0]
    # A busy store may serve it last.
    assert seconds_of([plan(0, moves, worker=[0])], model(stores=(20.0,), compute=(5.0, 0.0))) == [12.0]


def test_links_are_full_duplex():
    both = plan(0, [(Kind.PEER_SEND, 0, 1, 40, 0), (Kind.PEER_SEND, 1, 0, 40, 0)])
    assert seconds_of([both], model()) == [4.0]
    same_way = plan(0, [(Kind.PEER_SEND, 0, 1, 40, 0), (Kind.MISS_PULL, 2, 1, 40, 0)])
    assert seconds_of([same_way], model()) == [8.0]


def test_a_store_can_be_what_an_iteration_waits_for():
    late = plan(0, [pull(0, 100, 0), pull(1, 10, 0)])
    assert seconds_of([late], model()) == [1.0]
    assert seconds_of([late], model(stores=(11.0,))) == [pytest.approx(10.0)]


def test_several_stores_serve_side_by_side():
    late = plan(0, [pull(0, 100, 0, store=2), pull(1, 10, 0, store=3)])
    assert seconds_of([late], model(stores=(20.0, 20.0))) == [5.0]


def test_every_message_takes_the_latencies_of_both_ends():
    late = plan(0, [pull(0, 100, 0), pull(0, 100, 0)])  # one message
    assert seconds_of([late], model(latency=0.25)) == [2.25]
    late = plan(0, [pull(0, 100, 0, store=2), pull(0, 100, 0, store=3)])  # two
    assert seconds_of([late], model(stores=(1000.0, 1000.0), latency=0.25)) == [2.5]
    among_workers = plan(0, [(Kind.PEER_SEND, 0, 1, 40, 0)])
    assert seconds_of([among_workers], model(latency=0.25)) == [4.5]


def test_messages_that_start_together_share_a_link_and_the_shorter_is_there_first():
    # At 20 bytes a second the store serves both equally: 10 bytes to each in a second, then one alone.
    late = plan(0, [pull(0, 10, 0), pull(1, 50, 0)], worker=[0])
    assert seconds_of([late], model(workers=(100.0, 100.0), stores=(20.0,), compute=(9.0, 0.0))) == [10.0]
    assert seconds_of([late], model(workers=(100.0, 100.0), stores=(20.0,), compute=(1.0, 0.0))) == [3.0]


@pytest.mark.parametrize(("compute", "first"), [(6.0, 7.0), (4.0, 5.0), (1.0, 4.0)])
def test_early_moves_travel_beside_the_compute_before_and_late_ones_after_it(compute, first):
    plans = [plan(0, worker=[0]), plan(1, [pull(1, 40, 0), pull(0, 100, 1)], worker=[0])]
    assert seconds_of(plans, model(compute=(compute, 0.0))) == [first, compute]


def test_late_moves_travel_beside_the_sum_before_unless_it_has_replicated_rows():
    # Compute 1 s; the sum: 4 s on the slow link, 0.4 s on the fast one, which has room for another second.
    dense = model(dense_bytes=40, compute=(1.0, 0.0))
    late = plan(1, [pull(0, 100, 1)])
    assert seconds_of([plan(0, worker=[0]), late], dense)[0] == 1 + 4
    slow = plan(1, [pull(1, 20, 1)])
    assert seconds_of([plan(0, worker=[0]), slow], dense)[0] == 1 + 4 + 1  # it began a second sooner
    replicated = plan(0, worker=[0], all_reduce_bytes=20)
    assert seconds_of([replicated, late], dense)[0] == 1 + 6 + 1


def test_early_moves_have_two_turns_too():
    early = [push(0, 100, 0, key=5), pull(1, 40, 0, key=5)]
    plans = [plan(0, worker=[0]), plan(1, early)]
    assert seconds_of(plans, model(compute=(3.0, 0.0))) == [1 + 4, 0]
    assert seconds_of(plans, model(compute=(8.0, 0.0))) == [8, 0]


def test_a_rank_comes_to_early_moves_once_its_own_rows_are_there():
    # The slow worker has its rows after 4 s and receives the early one then; the fast one need not wait.
    late = plan(0, [pull(1, 40, 0)], worker=[0])
    assert seconds_of([late, plan(1, [pull(1, 20, 0)])], model(compute=(5.0, 0.0)))[0] == 4 + 2
    assert seconds_of([late, plan(1, [pull(0, 300, 0)])], model(compute=(5.0, 0.0)))[0] == 5


def test_moves_of_the_first_iteration_have_nothing_to_travel_beside():
    assert seconds_of([plan(0, [pull(1, 40, -1)])], model()) == [4.0]
    assert seconds_of([plan(0, [pull(1, 40, -1), pull(1, 10, 0)], worker=[1])], model(compute=(0, 2.0))) == [
        7
    ]


def test_rows_pushed_after_training_come_last():
    after = plan(0, [pull(0, 100, 0), push(0, 300, 0, after=1)], worker=[0])
    assert seconds_of([after], model(compute=(2.0, 0.0))) == [1 + 2 + 3]
    # The home comes to them once it has what is pushed early.
    assert seconds_of([after, plan(1, [push(1, 50, 0)])], model(compute=(2.0, 0.0)))[0] == 5 + 3
    assert seconds_of([after, plan(1, [pull(1, 50, 0)])], model(compute=(2.0, 0.0)))[0] == 6


def test_a_sum_of_two_is_an_exchange():
    # 40 bytes at 10 a second, and the latencies of both ends.
    dense = model(dense_bytes=40, latency=0.5)
    assert seconds_of([plan(0)], dense) == [4.0 + 1.0]
    assert seconds_of([plan(0, all_reduce_bytes=20)], dense) == [6.0 + 1.0]
    assert seconds_of([plan(0)], dense, training=(0,)) == [0.0]
    three = model(workers=(100.0, 10.0, 100.0), compute=(0.0,) * 3, dense_bytes=30)
    assert seconds_of([plan(0, num_workers=3)], three, training=(0, 2)) == [pytest.approx(0.3)]


@pytest.mark.parametrize(
    ("speeds", "latencies", "num_bytes", "seconds"),
    [
        # In slices each of three sends two thirds of the bytes, twice.
        ((10.0, 10.0, 10.0), (0.0,) * 3, 30, 4.0),
        # Of unequal links the slow one carries the bytes once each way; in eight buckets, 9/8 of that time.
        ((1000.0, 1000.0, 10.0), (0.0,) * 3, 40_000, 4000 * 9 / 8),
        # Where latency is dear, everything to everyone: two messages of 3 bytes at each end, one trip.
        ((10.0, 10.0, 10.0), (1.0,) * 3, 3, 2 * 1.3 + 1),
        # By way of a quick first one, the others send and receive one message each.
        ((1000.0, 10.0, 10.0, 10.0), (0.0, 0.5, 0.5, 0.5), 20, 2 * (2 + 0.5)),
    ],
)
def test_a_sum_goes_the_quickest_way(speeds, latencies, num_bytes, seconds):
    workers = tuple(map(Link, speeds, latencies))
    together = TimeModel(Links(workers, ()), (0.0,) * len(speeds), dense_bytes=num_bytes)
    empty = plan(0, num_workers=len(speeds))
    assert seconds_of([empty], together, range(len(speeds))) == [pytest.approx(seconds, rel=1e-4)]


def test_a_sum_begins_when_the_last_worker_has_computed():
    dense = model(dense_bytes=40, compute=(1.0, 3.0))
    assert seconds_of([plan(0, worker=[0, 1])], dense) == [3 + 4]


def test_a_sum_may_have_links_or_seconds_of_its_own():
    early = [plan(0, worker=[0]), plan(1, [pull(1, 20, 0)], worker=[0])]
    shared = model(dense_bytes=40, compute=(1.0, 0.0))
    assert seconds_of(early, shared)[0] == 2 + 4
    apart = model(dense_bytes=40, compute=(1.0, 0.0), dense_links=links((20.0, 20.0)))
    assert seconds_of(early, apart)[0] == 1 + 2
    measured = model(dense_bytes=40, compute=(1.0, 0.0), dense_seconds=0.5)
    assert seconds_of(early, measured) == [2, 1.5]
    assert measured.computes


def test_early_moves_share_the_links_with_the_sum():
    # The sum: 4 s on the slow link, 0.4 s on the fast one; compute 1 s.
    dense = model(dense_bytes=40, compute=(1.0, 0.0))
    slow = [plan(0, worker=[0]), plan(1, [pull(1, 20, 0)], worker=[0])]
    assert seconds_of(slow, dense)[0] == 2 + 4  # 1 s longer than compute and sum
    fast = [plan(0, worker=[0]), plan(1, [pull(0, 400, 0)], worker=[0])]
    assert seconds_of(fast, dense)[0] == 5.0  # the fast link has room for 4 s beside them


def test_evening_out_uses_the_room_of_earlier_iterations():
    compute = (2.0, 0.0)
    plans = [plan(t, worker=[0]) for t in range(3)] + [plan(3, [pull(1, 50, 0)], worker=[0])]
    assert seconds_of(plans, model(compute=compute)) == [2, 2, 5, 2]
    assert seconds_of(plans, model(compute=compute, early_reach=2)) == [2, 2, 3, 2]
    assert seconds_of(plans, model(compute=compute, early_reach=3)) == [2, 2, 2, 2]
    not_yet = [*plans[:3], plan(3, [pull(1, 50, 1)], worker=[0])]
    assert seconds_of(not_yet, model(compute=compute, early_reach=3)) == [2, 2, 3, 2]


def test_evening_out_serves_the_earlier_need_first():
    compute = (2.0, 0.0)
    plans = [
        plan(0, worker=[0]),
        plan(1, [pull(1, 15, 0)], worker=[0]),  # 1.5 s of the 2 s beside iteration 0
        plan(2, [pull(1, 30, 0)], worker=[0]),  # the remaining 0.5 s, then 2 s and half a second too long
    ]
    assert seconds_of(plans, model(compute=compute, early_reach=2)) == [2, 2.5, 2]


def test_evening_out_never_takes_longer():
    random = np.random.default_rng(0)
    plans = []
    for t in range(40):
        moves = [
            pull(
                int(random.integers(2)),
                int(random.integers(1, 30)),
                int(random.integers(max(0, t - 5), t + 1)),
            )
            for _ in range(random.integers(0, 6))
        ]
        plans.append(plan(t, moves, worker=[0]))
    totals = [sum(seconds_of(plans, model(compute=(1.0, 1.0), early_reach=reach))) for reach in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < totals[0]


def test_total_cost_counts_every_worker_link_that_is_crossed():
    moves = [pull(0, 100, 0), push(1, 20, -1), (Kind.PEER_SEND, 0, 1, 50, 0)]
    clock = Clock(model(), (0, 1))
    assert clock.link_seconds(plan(0, moves)).tolist() == [1.5, 7.0]
    # Each of two workers sends the bytes once and receives them once.
    assert clock.link_seconds(plan(0, all_reduce_bytes=50)).tolist() == [1.0, 10.0]


def test_co_located_stores_use_their_workers_link():
    together = TimeModel(links((100.0, 10.0)), (0.0, 0.0))
    remote = plan(0, [pull(1, 40, 0, store=0)])
    assert seconds_of([remote], together) == [4.0]
    assert Clock(together, (0, 1)).link_seconds(remote).tolist() == [0.4, 4.0]


def test_wrong_models_are_refused():
    with pytest.raises(ConfigError, match="1 workers, but there are 2"):
        model(compute=(1.0,))
    with pytest.raises(ConfigError, match="finite"):
        model(compute=(1.0, float("nan")))
    with pytest.raises(ConfigError, match="negative"):
        model(dense_bytes=-1)
    with pytest.raises(ConfigError, match="dense links name 1 workers, but there are 2"):
        model(dense_links=links((1.0,)))
    with pytest.raises(ConfigError, match="dense sum must be finite"):
        model(dense_seconds=float("inf"))
