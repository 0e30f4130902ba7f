"""Rows of the next iteration move while dense gradients are summed, and what is learned stays the same."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cluster_checks import check_run
from exact_cases import changing_rate, random_samples
from in_process_cluster import Rank, RankErrorsError, run_cluster, train_batch
from scripted_cases import script
from training_case import Case, per_sample_loss, row_sizes

from rowhaul.nn import Batch, EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, ScheduleSettings, Topology
from rowhaul.train.finite import DivergedError


def case_of(topology: Topology) -> Case:
    """Few rows, so that nearly all are needed again at once, by another worker."""
    tables = (EmbeddingBagConfig(embedding_dim=3, name="a", feature_names=["f0", "f1"]),)
    optimizer = row_optimizer("adam", lr=0.1)
    settings = ScheduleSettings(
        topology=topology,
        sizes=row_sizes(tables, optimizer, Case.dtype),
        prices=(1, 1, 10),
        cache=CacheSettings(1 << 30),
        dispatcher="random",
    )
    draw = np.random.default_rng(5)
    batches = tuple(random_samples(draw, ("f0", "f1"), 9, range(6), 2) for _ in range(8))
    return Case(tables, optimizer, settings, batches, rates=changing_rate, segments=(3, None))


@pytest.mark.parametrize(
    "topology",
    [Topology(3, num_stores=2), Topology(3, colocated=True, peer_to_peer=True)],
    ids=["stores", "peers"],
)
def test_the_next_rows_are_there_before_a_sum_is_complete(topology: Topology) -> None:
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

    case = case_of(topology)
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
