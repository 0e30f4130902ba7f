import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule.sizes import RowSizes, apportion, link_prices
from rowhaul.schedule.topology import Topology, home_of, homes_of


@given(st.integers(0, 5000), st.lists(st.integers(0, 300), min_size=1, max_size=64).filter(any))
def test_apportioned_samples_add_up_and_stay_within_one_of_the_exact_share(num_samples, shares):
    samples = apportion(num_samples, shares)
    assert samples.sum() == num_samples
    for got, share in zip(samples.tolist(), shares, strict=True):
        assert abs(got - num_samples * share / sum(shares)) < 1
        assert share > 0 or got == 0


def test_shares_without_anyone_are_refused():
    with pytest.raises(ConfigError, match=r"one positive; got \[0, 0\]"):
        apportion(3, [0, 0])


@pytest.mark.parametrize(
    ("speeds", "prices"),
    [([5e9] * 4 + [0.5e9] * 4, (1, 1, 1, 1, 10, 10, 10, 10)), ([3.0], (1,)), ([3.0, 2.0], (2, 3))],
)
def test_prices_are_the_smallest_integers_with_the_links_ratio(speeds, prices):
    assert link_prices(speeds) == prices


@pytest.mark.parametrize("speeds", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_links_without_a_speed_are_refused(speeds):
    with pytest.raises(ConfigError, match="speed"):
        link_prices(speeds)


def test_sizes_count_in_their_common_unit():
    sizes = RowSizes(values=(64, 96), state=(4, 0))
    assert sizes.records == (68, 96)
    assert sizes.unit == 4
    with pytest.raises(ConfigError, match="2 tables have values, 1 a state"):
        RowSizes(values=(1, 1), state=(1,))
    with pytest.raises(ConfigError, match="at least one byte"):
        RowSizes(values=(0,), state=(1,))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"num_workers": 0}, "1 to 64; got 0"),
        ({"num_workers": 65}, "got 65"),
        ({"num_workers": 2, "num_stores": 0}, "at least 1; got 0"),
    ],
)
def test_impossible_clusters_are_refused(topology, message):
    with pytest.raises(ConfigError, match=message):
        Topology(**topology)


def test_rows_spread_evenly_over_stores():
    topology = Topology(num_workers=2, num_stores=3)
    homes = np.bincount([home_of(t, key, topology) for t in range(3) for key in range(2000)], minlength=5)
    assert homes[:2].tolist() == [0, 0]
    assert homes[2:].min() > 1800
    colocated = Topology(num_workers=2, colocated=True)
    assert colocated.num_ranks == 2
    assert {home_of(0, key, colocated) for key in range(100)} == {0, 1}


@pytest.mark.parametrize("topology", [Topology(3), Topology(3, num_stores=5), Topology(7, colocated=True)])
def test_many_rows_are_at_home_where_each_of_them_is(topology):
    tables = np.repeat(np.arange(3), 50)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(tables))
    homes = homes_of(tables, keys, topology)
    assert homes.dtype == np.int16
    assert homes.tolist() == [home_of(t, k, topology) for t, k in zip(tables, keys, strict=True)]
    assert homes_of([], [], topology).tolist() == []


def test_rows_without_a_table_have_no_home():
    with pytest.raises(DataError, match=r"one table for each key is needed; got \(1,\) tables and \(2,\)"):
        homes_of([0], [1, 2], Topology(2))
