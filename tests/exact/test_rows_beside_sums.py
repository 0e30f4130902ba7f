"""Rows of the next iteration move while dense gradients are summed, and what is learned stays the same."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cluster_checks import check_run
from in_process_cluster import Rank, RankErrorsError, run_cluster, train_batch
from scripted_cases import script
from training_case import per_sample_loss

from rowhaul.nn import Batch
from rowhaul.train.finite import DivergedError


@pytest.mark.parametrize("between_peers", [False, True], ids=["a store", "peers"])
def test_the_next_rows_are_there_before_a_sum_is_complete(between_peers: bool) -> None:
    waited = []

    def train(rank: Rank, batch: Batch) -> float | None:
        training = rank.training
        dense, following = training._dense, training.runtime._iterations.get(training.iteration + 1)
        wait = dense.wait

        def wait_for_rows_first() -> None:
            if following is not None:
                following.ready.wait()  # for ever, if rows waited for the sum
                waited.append(rank.rank)
            wait()

        dense.wait = wait_for_rows_first
        try:
            return train_batch(rank, batch)
        finally:
            dense.wait = wait

    # Every row is needed again at once: one by all three workers, the others by the next one.
    needs = [{worker: "abc"[(worker + t) % 3] + "d" for worker in range(3)} for t in range(8)]
    case = script(*needs, segments=(3, None), colocated=between_peers, peer_to_peer=between_peers)
    outcome = run_cluster(case, train=train)
    assert len(waited) > 3 * len(case.batches) / 2
    expected = run_cluster(case)
    assert outcome.losses == expected.losses
    rows, others = outcome.rows(), expected.rows()
    assert all(np.array_equal(rows[row], others[row]) for row in others)
    check_run(case, outcome)


def test_a_worker_that_diverges_after_others_have_gone_on_is_reported_by_all() -> None:
    """The others have agreed to one plan more than it has; they must not wait for its agreement."""

    def train(rank: Rank, batch: Batch) -> float | None:
        if rank.rank != 1 or rank.training.iteration != 2:
            return train_batch(rank, batch)
        loss = float("nan") * batch.loss(per_sample_loss(rank.model(batch), batch))
        loss.backward()
        time.sleep(0.3)  # the others, who need none of its rows, get as far as they can
        return rank.training.step(loss)

    case = script(*[{0: "a", 1: "b", 2: "c"}] * 10, colocated=True, peer_to_peer=True)
    with pytest.raises(RankErrorsError) as raised:
        run_cluster(case, train=train)
    assert all(isinstance(error, DivergedError) for error in raised.value.errors)
    assert len({str(error) for error in raised.value.errors}) == 1
