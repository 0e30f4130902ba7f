"""Where things are in memory is a secret of each process, and decides nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exact_cases import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Outcome, Rank, run_cluster
from pruned_cluster import PrunedRank
from test_exact_pruning import pruned_cases
from training_case import Case

from secrets_of_positions import secret

few = settings(
    max_examples=5,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)


def run_under(number: int, case: Case, kind: type[Rank]) -> Outcome:
    with secret(number):
        return run_cluster(case, kind=kind)


def assert_same(one: Any, other: Any) -> None:
    """The same bits, in the same order."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


def check(case: Case, kind: type[Rank]) -> None:
    """Rows, weights, gradients that wait, plans and the scheduler's state."""
    case = replace(case, decisions={})  # when they come into force depends on the threads' speed
    one, other = (run_under(number, case, kind) for number in (1, 2))
    assert_same(one.losses, other.losses)
    assert [plan.digest() for plan in one.plans] == [plan.digest() for plan in other.plans]
    assert one.posted == other.posted
    for rests, other_rests in zip(one.rests, other.rests, strict=True):
        assert_same([vars(rest) for rest in rests], [vars(rest) for rest in other_rests])


@pytest.mark.parametrize("sync", ["on-demand", "bounded:1"])
@few
@given(data=st.data())
def test_a_cluster_does_the_same_under_two_secrets(sync: str, data: st.DataObject) -> None:
    check(data.draw(cases(sync, data.draw(st.booleans()) and sync == "on-demand")), Rank)


@pytest.mark.slow
@few
@given(pruned_cases("on-demand", False))
def test_a_cluster_prunes_the_same_under_two_secrets(case: Case) -> None:
    check(case, PrunedRank)
