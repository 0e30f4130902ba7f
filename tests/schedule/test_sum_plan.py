"""Ways to sum: against the bound that none can beat, and against all parts there are on a grid."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.schedule.sum_plan import NEGLIGIBLE, SCALE, SumPlan, least_seconds, ways_to_sum

SPEEDS = st.lists(st.sampled_from([1.0, 1.5, 3.0, 8.0, 10.0, 80.0, 1000.0]), min_size=2, max_size=9)


def bytes_by_message(plan: SumPlan, num_ranks: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """What each rank sends and receives, message by message."""
    sent, received = np.zeros(num_ranks), np.zeros(num_ranks)
    for source, target in product(range(num_ranks), repeat=2):
        if source == target:
            continue
        for bucket in range(plan.buckets):
            begin, end = num_bytes * bucket // plan.buckets, num_bytes * (bucket + 1) // plan.buckets
            if plan.parts:
                bounds = plan.bounds(begin, end)
                size = bounds[target + 1] - bounds[target]  # a part, to be added there
                size += bounds[source + 1] - bounds[source]  # the sum of another
            else:
                size = end - begin
            sent[source] += size
            received[target] += size
    return sent, received


@given(SPEEDS, st.integers(1, 10**6))
def test_links_carry_what_the_plan_says(speeds: list[float], num_bytes: int) -> None:
    num_ranks = len(speeds)
    for way in ways_to_sum(speeds, num_bytes):
        assert not way.parts or sum(way.parts) == SCALE
        sent, received = bytes_by_message(way, num_ranks, num_bytes)
        planned = sum(way.loads(num_ranks)) * num_bytes
        most_rounding = 2 * num_ranks * way.buckets  # less than a byte for each message
        np.testing.assert_allclose(sent, planned, rtol=0, atol=most_rounding)
        np.testing.assert_allclose(received, planned, rtol=0, atol=most_rounding)
        assert way.seconds(speeds, num_bytes) >= least_seconds(speeds, num_bytes) * (1 - 1e-12)


@given(SPEEDS)
def test_the_best_way_comes_near_the_bound(speeds: list[float]) -> None:
    num_bytes = 10.0**8  # far more than messages cost
    best = min(way.seconds(speeds, num_bytes) for way in ways_to_sum(speeds, num_bytes))
    # Parts in proportion meet it while sums travel beside parts; the first and the last of 8 buckets do not.
    assert best <= least_seconds(speeds, num_bytes) * (1 + 1 / 8) * (1 + 1.1 * NEGLIGIBLE)


@pytest.mark.parametrize(
    "speeds", [(1.0, 1.0, 1.0), (10.0, 10.0, 1.0), (8.0, 3.0, 2.0), (9.0, 5.0, 5.0, 4.0)]
)
def test_no_parts_of_a_grid_are_quicker(speeds: tuple[float, ...]) -> None:
    best = min(way.seconds(speeds, 1e8) for way in ways_to_sum(speeds, 1e8))
    for parts in product(range(0, SCALE + 1, SCALE // 16), repeat=len(speeds)):
        if sum(parts) == SCALE:
            for buckets in (1, 2, 4, 8):
                assert best <= SumPlan(parts, buckets).seconds(speeds, 1e8) * (1 + 1.1 * NEGLIGIBLE)


def test_equal_links_share_the_work() -> None:
    best = ways_to_sum([12.5e6] * 4, 770_000)[0]
    assert best == SumPlan((SCALE // 4,) * 4)
    np.testing.assert_allclose(sum(best.loads(4)), 2 * 3 / 4)  # tensors each way over each link


def test_slow_links_are_leaves() -> None:
    best = ways_to_sum([10e6] * 4 + [1e6] * 4, 770_000)[0]
    assert best.buckets > 1
    assert best.parts[4:] == (0,) * 4
    np.testing.assert_allclose(sum(best.loads(8))[4:], 1)  # its values once, and the sum once


def test_two_ranks_swap() -> None:
    assert ways_to_sum([3.0, 1.0], 10**6) == [SumPlan()]
    assert SumPlan().seconds([3.0, 1.0], 10) == 10
