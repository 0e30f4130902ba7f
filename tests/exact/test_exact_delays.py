"""No matter which rank is late, and where: ranks neither wait for ever nor read what is not there yet."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cluster_checks import check_run
from exact_cases import changing_rate, least_capacity, random_samples, with_capacity
from in_process_cluster import Outcome, Rank, run_cluster
from training_case import Case, per_sample_loss, row_sizes
from watched_parts import NETWORK, PHASES, Delay

from rowhaul.nn import Batch, EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, HotRows, ScheduleSettings, Topology

pytestmark = pytest.mark.slow

# Between them: dedicated stores and none, peers that send and do not, all modes, replicated rows and none.
CLUSTERS = {
    "on demand": (Topology(3, num_stores=2), "on-demand", False),
    "on demand between peers": (Topology(3, peer_to_peer=True), "on-demand", True),
    "on demand, co-located": (Topology(3, colocated=True, peer_to_peer=True), "on-demand", False),
    "full": (Topology(3, num_stores=2), "full", True),
    "static": (Topology(3, colocated=True), "static", True),
    "bounded": (Topology(3, num_stores=2), "bounded:2", False),
}
SEGMENTS = (5, 1, None)


@cache
def case_of(cluster: str) -> Case:
    """Caches as small as can be, so that much moves."""
    topology, sync, replicates = CLUSTERS[cluster]
    rng = np.random.default_rng(5)
    tables = tuple(
        EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=features)
        for name, dim, features in (("a", 3, ["f0", "f1"]), ("b", 2, ["f2"]))
    )
    optimizer = row_optimizer("adam", lr=0.1)
    settings = ScheduleSettings(
        topology=topology,
        sizes=row_sizes(tables, optimizer, Case.dtype),
        prices=(1, 1, 10),
        cache=CacheSettings(1 << 30),
        dispatcher="joint",
        sync=sync,
        look_ahead=2,
        hot=HotRows(np.array([0, 1]), np.array([0, 1])) if replicates else None,
    )
    batches = tuple(random_samples(rng, ("f0", "f1", "f2"), 7, range(14), 2) for _ in range(10))
    case = Case(tables, optimizer, settings, batches, rates=changing_rate, segments=SEGMENTS)
    return with_capacity(case, least_capacity(case))


@cache
def undelayed(cluster: str) -> Outcome:
    return run_cluster(case_of(cluster))


@pytest.fixture
def threads_take_turns_often() -> Iterator[None]:
    """Python's own pauses between threads are longer than an iteration here."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def assert_same(case: Case, outcome: Outcome, expected: Outcome) -> None:
    assert [plan.digest() for plan in outcome.plans] == [plan.digest() for plan in expected.plans]
    assert outcome.losses == expected.losses
    for segment in range(len(SEGMENTS)):
        rows, others = outcome.rows(segment), expected.rows(segment)
        assert rows.keys() == others.keys()
        assert all(np.array_equal(rows[row], others[row]) for row in rows)
        assert all(map(np.array_equal, outcome.rests[0][segment].dense, expected.rests[0][segment].dense))
    check_run(case, outcome)


def one_is_late(slow: int, where: str) -> Delay:
    """One rank takes its time in one phase."""

    def delay(rank: int, phase: str) -> None:
        if phase == where and rank == slow:
            time.sleep(0.003)

    return delay


def anyone_is_late(seed: int) -> Delay:
    """All of them do, everywhere, now and then."""
    draw = random.Random(seed)  # its draws are atomic; whose they are does not matter

    def delay(rank: int, phase: str) -> None:
        if draw.random() < 0.2:
            time.sleep(0.003 * draw.random())

    return delay


@pytest.mark.parametrize("cluster", ["on demand", "on demand, co-located"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_rank_is_late_in_one_phase(cluster: str, phase: str) -> None:
    case = case_of(cluster)
    for slow in range(case.settings.topology.num_ranks) if phase != "network" else [NETWORK]:
        assert_same(case, run_cluster(case, delay=one_is_late(slow, phase)), undelayed(cluster))


@pytest.mark.usefixtures("threads_take_turns_often")
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_late_at_random(cluster: str, seed: int) -> None:
    case = case_of(cluster)
    assert_same(case, run_cluster(case, delay=anyone_is_late(seed)), undelayed(cluster))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cache_does_not_change_while_its_worker_trains(cluster: str) -> None:
    """Whatever arrives early waits; the rows of the batch are the worker's alone."""

    def train(rank: Rank, batch: Batch) -> float:
        loss = batch.loss(per_sample_loss(rank.model(batch), batch))
        loss.backward()
        before = _contents(rank)
        time.sleep(0.01)  # time for the early moves of the next iteration
        for name, contents in _contents(rank).items():
            assert np.array_equal(before[name], contents), name
        summed = rank.training.step(loss)
        rank.dense.step()
        rank.dense.zero_grad()
        return summed

    case = case_of(cluster)
    assert_same(case, run_cluster(case, train=train), undelayed(cluster))


def _contents(rank: Rank) -> dict[str, np.ndarray]:
    """What a worker's cache holds of each table, where, and the records of the rows that it trains now."""
    contents = {}
    source = rank.model.rows.source
    for tables, pending in zip(source.tables, source.pending, strict=True):
        for position, spec in enumerate(tables.tables):
            blocks = [np.stack(block) for block in tables.index.blocks(position)]
            contents[f"places of {spec.name}"] = np.concatenate(blocks, axis=1)
        for lookup, _ in pending:
            records = tables.arena.read(lookup.locations)
            # As bytes: where only values were pulled, the state is whatever was there.
            contents[f"records of {lookup.keys.tolist()}"] = records.view(np.uint8)
    return contents


def once_from(*iterations: int) -> Callable[[int], bool]:
    """Say yes once for each of these, when asked in it or later: a busy rank is not asked in every one."""
    due = list(iterations)

    def ask(iteration: int) -> bool:
        is_due = bool(due) and due[0] <= iteration
        if is_due:
            del due[0]
        return is_due

    return ask


class RestingRank(Rank):
    """A rank that rests where others save."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.runtime.should_save, self.runtime.should_rest = lambda: False, self.runtime.should_save


@pytest.mark.parametrize("kind", [Rank, RestingRank], ids=["save", "rest"])
def test_rank_0_asks_for_a_checkpoint_or_a_rest(kind: type[Rank]) -> None:
    """Segments end for all after the same iteration, and what follows is as if they had not."""
    case = replace(case_of("on demand"), segments=(None,) * 6)
    outcome = run_cluster(case, should_save=once_from(2, 5), kind=kind)
    ends = {tuple(rest.iteration for rest in rests) for rests in outcome.rests}
    assert len(ends) == 1
    assert 2 < min(ends)[0] < min(ends)[1] <= len(case.batches)
    expected = undelayed("on demand")
    assert outcome.losses == expected.losses
    rows, others = outcome.rows(), expected.rows()
    assert all(np.array_equal(rows[row], others[row]) for row in others)
    check_run(case, outcome)


@pytest.mark.parametrize("cluster", ["on demand", "on demand, co-located"])
@pytest.mark.parametrize("asking", [0, 2])
def test_a_rank_asks_to_stop_while_others_are_late(cluster: str, asking: int) -> None:
    """Segments end for all after the same iteration, and what follows is as if they had not."""
    case = replace(case_of(cluster), segments=(None,) * 6)
    for late in range(case.settings.topology.num_ranks):
        ask = once_from(2)
        outcome = run_cluster(
            case,
            delay=one_is_late(late, "control"),
            should_stop=lambda rank, iteration, ask=ask: rank == asking and ask(iteration),
        )
        ends = {tuple(rest.iteration for rest in rests) for rests in outcome.rests}
        assert len(ends) == 1
        assert 2 < min(ends)[0] < len(case.batches)
        expected = undelayed(cluster)
        assert outcome.losses == expected.losses
        rows, others = outcome.rows(), expected.rows()
        assert all(np.array_equal(rows[row], others[row]) for row in others)
        check_run(case, outcome)
