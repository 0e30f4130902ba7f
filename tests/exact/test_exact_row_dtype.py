"""Rows in fewer bits: a cluster trains what the replay of its parts trains, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_checks import check_run
from exact_cases import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import run_cluster
from oracles import assert_bit_equal, plain, replay

NO_SHRINKING = (Phase.explicit, Phase.generate)
ROW_DTYPES = ("bfloat16", "int8", "float16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    [("on-demand", False), ("on-demand", True), ("full", False), ("static", False), ("bounded:0", False)],
)
@settings(max_examples=12, derandomize=True, phases=NO_SHRINKING)
@given(data=st.data())
def test_a_cluster_trains_what_replay_trains(sync: str, peer_to_peer: bool, data: st.DataObject) -> None:
    row_dtype = data.draw(st.sampled_from(ROW_DTYPES))
    case = data.draw(cases(sync, peer_to_peer, row_dtype=row_dtype))
    outcome = run_cluster(case)
    assert len(outcome.plans) == len(case.batches)
    assert_bit_equal(case, outcome, replay(case, outcome))
    np.testing.assert_allclose(outcome.losses, plain(case, outcome).losses, rtol=0.2, atol=0.2)
    check_run(case, outcome)


@pytest.mark.slow
@settings(max_examples=4, derandomize=True, phases=NO_SHRINKING)
@given(data=st.data())
def test_training_with_stale_rows_goes_on_and_repeats(data: st.DataObject) -> None:
    row_dtype = data.draw(st.sampled_from(ROW_DTYPES))
    sync = data.draw(st.sampled_from(["bounded:1", "bounded:3"]))
    case = data.draw(cases(sync, undecided=True, row_dtype=row_dtype))
    outcome, again = run_cluster(case), run_cluster(case)
    assert np.isfinite(outcome.losses).all()
    assert outcome.losses == again.losses
    rows, others = outcome.rows(), again.rows()
    assert rows.keys() == others.keys()
    assert all(np.array_equal(rows[row], others[row]) for row in rows)
    check_run(case, outcome)
