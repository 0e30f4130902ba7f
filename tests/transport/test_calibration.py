"""Measured links: positive, the same on all ranks, each pair once."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rowhaul.schedule import link_prices
from rowhaul.transport.base import Collective, Links
from rowhaul.transport.calibration import LinkMeasurements, measure_links, rounds_of_pairs
from rowhaul.transport.in_process import InProcessNetwork
from transport_ranks import run_processes, run_threads


def measure_quickly(links: Links, collective: Collective) -> LinkMeasurements:
    return measure_links(links, collective, seconds_per_pair=0.05, bytes_per_pair=2**20)


@pytest.mark.parametrize("run", [pytest.param(run_processes, marks=pytest.mark.slow), run_threads])
def test_everyone_has_the_same_positive_numbers(run) -> None:  # type: ignore[no-untyped-def]  # a fixture without types
    results = run(3, measure_quickly)
    first = results[0]
    others = ~np.eye(3, dtype=bool)
    for matrix in ("latency_seconds", "bytes_per_second", "both_ways_bytes_per_second"):
        values = getattr(first, matrix)
        assert values.shape == (3, 3)
        assert (values[others] > 0).all()
        assert np.isfinite(values[others]).all()
        for other in results[1:]:
            np.testing.assert_array_equal(getattr(other, matrix), values)
    np.testing.assert_array_equal(first.latency_seconds, first.latency_seconds.T)
    np.testing.assert_array_equal(first.both_ways_bytes_per_second, first.both_ways_bytes_per_second.T)
    assert len(link_prices(first.rank_speeds())) == first.num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 9])
def test_every_pair_has_its_turn_and_no_rank_two_at_once(num_ranks: int) -> None:
    rounds = list(rounds_of_pairs(num_ranks))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(num_ranks), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(rounds) == (num_ranks - 1 if num_ranks % 2 == 0 else num_ranks if num_ranks > 1 else 1)


def test_one_rank_alone_has_nothing_to_measure() -> None:
    network = InProcessNetwork(1)
    measured = measure_links(network.links(0), network.collective(0))
    assert measured.num_ranks == 1
    assert measured.latency_seconds.tolist() == [[0.0]]


def test_a_link_is_as_fast_as_the_fastest_pair_it_is_in() -> None:
    own = np.array([100.0, 10.0, 50.0, 80.0])
    pairs = np.minimum(own[:, None], own[None, :])
    np.fill_diagonal(pairs, np.inf)
    measured = LinkMeasurements(np.zeros((4, 4)), pairs, pairs)
    assert measured.rank_speeds() == (80.0, 10.0, 50.0, 80.0)


def test_groups_of_other_ranks_and_too_few_bytes_are_refused() -> None:
    network = InProcessNetwork(2)
    with pytest.raises(ValueError, match="2 ranks and the collective 1"):
        measure_links(network.links(0), network.collective(0, [0]))
    with pytest.raises(ValueError, match="at least 98,304 bytes; got 5"):
        measure_links(network.links(1), network.collective(1), bytes_per_pair=5)
