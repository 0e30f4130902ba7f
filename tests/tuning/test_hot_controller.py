"""Hot rows that change under way: saved, resumed, chosen by a model, and never noticed by what is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointed_ranks import (
    CLUSTER,
    CONFIG,
    STEPS,
    Session,
    contents,
    largest_difference,
    on_threads,
    same_bits,
)
from rowhaul.data.stream import SampleStream
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.trainer import Trainer, per_sample_loss
from rowhaul.tuning import move_costs as collectives
from rowhaul.tuning.hot_set import controller as hot_set_controller
from rowhaul.tuning.hot_set.controller import HotSetController
from rowhaul.tuning.shares import MeasuredLinks
from slow_cases import mostly_slow

FIRST, SECOND = [0, 7919, 2 * 7919, 5 * 7919], [7919, 3 * 7919, 4 * 7919, 10**9]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, log_schema: Any) -> Session:
    return Session.on_log(tmp_path_factory.mktemp("log"), log_schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster",
    mostly_slow(
        [
            CLUSTER,
            ClusterConfig(3, colocated=True, cache="190"),
            replace(CLUSTER, stores=2, peer_to_peer=True),
        ],
        CLUSTER,
    ),
    ids=["stores", "co-located", "peers"],
)
def test_a_resumed_run_keeps_the_rows_that_were_replicated(
    cluster: ClusterConfig, session: Session, tmp_path: Path
) -> None:
    chosen = replace(
        session,
        cluster=cluster,
        hot=FIRST,
        pauses=(4, 6, 9, STEPS),
        replicated={4: SECOND, 6: FIRST[:2], 9: []},
    )
    chosen.on_threads(tmp_path / "a")
    chosen.interrupted(tmp_path / "b", at=6)
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    replace(session, cluster=cluster).on_threads(tmp_path / "c")
    expected, found = contents(tmp_path / "c"), contents(tmp_path / "a")
    found.pop(f"user/{10**9}", None)  # it was hot, and in no batch
    assert largest_difference(expected, found) < 1e-9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SPREAD_ROWS", 2048)
    monkeypatch.setattr(hot_set_controller, "LEAST_SCHEDULED", 4)
    monkeypatch.setattr(hot_set_controller, "FIRST_REVIEW", 2)
    monkeypatch.setattr(hot_set_controller, "TURN", 1)


def run_kept(
    cluster: Any, session: Session, told: list[str], disturbed_until: int = 0
) -> tuple[list[tuple[int, int]], list[float]]:
    """Train with a keeper that is asked when it wants to be, and at the end; returns its sets, and losses."""
    cluster.interface = cluster.side_interface = "lo"
    trainer = Trainer(session.config, session.schema)
    trainer.total_steps = STEPS
    stream = SampleStream(session.data, session.schema, session.config.batch_size)
    links = MeasuredLinks((1e6,) * cluster.num_ranks, (1e-4,) * cluster.num_ranks)
    layout = layout_of(trainer.collection)
    keeper = HotSetController(
        cluster, stream, trainer.collection, layout, profile=10, dense_bytes=1000, links=links
    )
    if cluster.rank == 0:
        keeper.report_to(told.append)
    settings = keeper.first(session.cluster.schedule(cluster.topology, layout.sizes()))
    sizes = [_described(settings.hot)]
    training = distribute(cluster, trainer.model, stream, settings=settings, on_iteration=keeper.observe)
    losses = []
    if disturbed_until:  # only rank 0 knows
        keeper.is_disturbed = lambda: cluster.rank == 0 and training.iteration < disturbed_until
    try:
        while training.iteration < STEPS:
            pause = STEPS if keeper.due is None else min(keeper.due, STEPS)
            assert pause > training.iteration, "it would be asked again and again"
            for batch in training.batches(pause - training.iteration):
                trainer.set_rates()
                loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
                loss.backward()
                losses.append(training.step(loss))
                trainer.dense.step()
                trainer.dense.zero_grad()
                trainer.step += 1
            keeper.review(training, training.samples)
            sizes.append(_described(training.settings.hot))
    finally:
        training.close()
    return sizes, losses


def _described(hot: Any) -> tuple[int, int]:
    return (0, 0) if hot is None else (len(hot), int(hot.keys.sum() % 1000003))


@pytest.mark.slow
def test_all_ranks_try_the_rows_that_rank_0_proposes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hot_set_controller, "worth_trying", lambda model, best: [model.predict(size) for size in (0, 3, 11)]
    )
    config = replace(CONFIG, model=replace(CONFIG.model, options={}))
    chosen = replace(session, config=config, cluster=replace(CLUSTER, dispatcher="round-robin"))
    told: list[str] = []
    results = on_threads(CLUSTER.topology(), lambda cluster: run_kept(cluster, chosen, told))
    sets = results[0][0]
    assert all(sizes == sets for sizes, _ in results), "ranks have different hot rows"
    assert {0, 3, 11} <= {size for size, _ in sets}
    alone = replace(chosen, cluster=replace(CLUSTER, workers=1, dispatcher="round-robin"))
    monkeypatch.setattr(hot_set_controller, "worth_trying", lambda model, best: [])
    (_, losses), *_ = on_threads(alone.cluster.topology(), lambda cluster: run_kept(cluster, alone, []))
    np.testing.assert_allclose(results[0][1], losses, rtol=0, atol=1e-9)
    assert "of accesses" in told[0]
    assert "sizes tried" in told[0]
    assert not any("stay as they are" in text for text in told), told
    assert sum("hot rows exchanged" in text for text in told) >= 3
    result = next(text for text in told if "as quick as any of those tried" in text)
    assert all(f"{size} " in result for size in (0, 3, 11))
    assert result.startswith(f"hot rows: {sets[-1][0]} on every worker"), "another set stayed than was told"


def test_a_trial_of_hot_rows_waits_for_another_trial(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hot_set_controller, "worth_trying", lambda model, best: [model.predict(size) for size in (0, 3)]
    )
    told: list[str] = []
    results = on_threads(CLUSTER.topology(), lambda cluster: run_kept(cluster, session, told, 5))
    sets = results[0][0]
    assert all(sizes == sets for sizes, _ in results), "ranks have different hot rows"
    assert len(set(sets[:3])) == 1  # at the beginning, and after reviews in iterations 2 and 4
    assert any("will be tried" in text for text in told)
    assert any("as quick as any of those tried" in text for text in told)


@pytest.mark.slow
def test_rows_stay_where_nothing_is_worth_a_trial(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_set_controller, "worth_trying", lambda model, best: [])
    told: list[str] = []
    results = on_threads(CLUSTER.topology(), lambda cluster: run_kept(cluster, session, told))
    assert all(len(set(sizes)) == 1 for sizes, _ in results)
    assert "hot rows stay" in told[-1]
