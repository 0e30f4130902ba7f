"""The first test of all: whatever the cluster, data and settings, it trains what one process trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cluster_checks import check_run
from exact_cases import cases, too_small
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from in_process_cluster import RankErrorsError, run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case

from rowhaul.errors import CacheTooSmallError
from slow_cases import mostly_slow

NO_SHRINKING = (Phase.explicit, Phase.generate)  # it takes longer than a test may; cases are small anyway


@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    mostly_slow(
        [("on-demand", False), ("on-demand", True), ("full", False), ("static", False), ("bounded:0", False)],
        ("on-demand", True),
    ),
)
@settings(max_examples=10, derandomize=True, phases=NO_SHRINKING)
@given(data=st.data())
def test_a_cluster_trains_what_one_process_trains(sync: str, peer_to_peer: bool, data: st.DataObject) -> None:
    case = data.draw(cases(sync, peer_to_peer))
    outcome = run_cluster(case)
    assert len(outcome.plans) == len(case.batches)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)


@settings(max_examples=6, derandomize=True, phases=NO_SHRINKING)
@given(st.sampled_from(["on-demand", "full", "bounded:1"]).flatmap(partial(cases, undecided=True)))
def test_a_cache_that_is_a_little_too_small_stops_every_rank(case: Case) -> None:
    smaller = too_small(case)
    assume(smaller is not None)
    assert smaller is not None
    with pytest.raises(RankErrorsError) as caught:
        run_cluster(smaller)
    assert [type(error) for error in caught.value.errors] == [CacheTooSmallError] * len(caught.value.errors)
    assert all("give caches at least" in str(error) for error in caught.value.errors)
