"""Rows that stay at home: no plan says where they are, and the cluster trains what one process trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_cases import cases, random_samples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Outcome, Rank, run_cluster, train_batch
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case, TinyModel, per_sample_loss, row_sizes

from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, Scheduler, ScheduleSettings, Topology, homes_of
from rowhaul.schedule.plan import Kind
from rowhaul.schedule.row_states import State
from rowhaul.train.distributed.samples import as_samples

NO_SHRINKING = (Phase.explicit, Phase.generate)  # it takes longer than a test may; cases are small anyway


@st.composite
def at_home_cases(draw: st.DrawFn, num_workers: int | None = None) -> Case:
    """Whatever a case may be that needs no plan of rows."""
    case = draw(cases("full", undecided=True))
    num_workers = num_workers or draw(st.sampled_from([2, 3, 4, 1]))
    shares = st.tuples(*[st.integers(0, 3)] * num_workers).filter(any)
    return replace(
        case,
        settings=replace(
            case.settings,
            topology=Topology(num_workers, 0, colocated=True, peer_to_peer=draw(st.booleans())),
            prices=(1,) * num_workers,
            cache=replace(case.settings.cache, capacity=0),
            dispatcher=draw(st.sampled_from(["round-robin", "random"])),
            sync="at-home",
            shares=draw(st.one_of(st.none(), shares)),
            policies=(),
            hot=None,
        ),
    )


def check(case: Case, outcome: Outcome) -> None:
    """One process learns the same; nothing is left in caches; links carry what the samples need, no more."""
    assert len(outcome.plans) == len(case.batches)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    for rank, rests in enumerate(outcome.rests):
        for rest in rests:
            assert not rest.cached
            assert not rest.waiting
            assert set(rest.states["state"].tolist()) <= {State.FRESH}  # rows of batches to come
            assert {homes_of([table], [key], case.settings.topology)[0] for table, key in rest.rows} <= {rank}
    rows, requests = bytes_needed(case, outcome)
    assert outcome.posted == rows + requests
    planned = Counter[tuple[int, int]]()
    for plan in outcome.plans:
        pairs = zip(plan.moves.source.tolist(), plan.moves.target.tolist(), strict=True)
        for pair, size in zip(pairs, plan.moves.num_bytes.tolist(), strict=True):
            planned[pair] += size
    assert planned == rows  # plans that count rows count what is sent
    check_counts(outcome)
    without = Scheduler(case.settings, case.id_batches())
    without.count_no_rows()
    for plan in outcome.plans:
        assert without.fill()
        assert np.array_equal(plan.worker, without.plan().worker)


def check_counts(outcome: Outcome) -> None:
    """Ranks count what plans that count rows say of them."""
    for rank, jobs in enumerate(outcome.jobs):
        for job in jobs:
            plan, moves = job.plan, job.plan.moves
            pulled = moves.kind == Kind.MISS_PULL
            expected = {
                "rows_needed": plan.lookups[rank],
                "rows_here": plan.hits[rank],
                "bytes_read": moves.num_bytes[pulled & (moves.target == rank)].sum(),
                "bytes_served": moves.num_bytes[pulled & (moves.source == rank)].sum(),
            }
            assert dict(job.counts) == expected


def bytes_needed(case: Case, outcome: Outcome) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """The bytes between ranks: values and gradients of rows; numbers of rows and their keys."""
    topology = case.settings.topology
    found, requests = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    table_of = {name: number for number, table in enumerate(case.tables) for name in table.feature_names}
    for samples, worker in zip(case.batches, outcome.workers, strict=True):
        for rank in range(topology.num_workers):
            part = samples.take(np.flatnonzero(worker == rank))
            features = np.repeat(part.features, part.lengths.sum(axis=1))
            rows = {(table_of[name], int(key)) for name, key in zip(features, part.values, strict=True)}
            for home in set(range(topology.num_workers)) - {rank}:
                requests[rank, home] += 8 * len(case.tables)
                for table, key in rows:
                    if homes_of([table], [key], topology)[0] == home:
                        requests[rank, home] += 8
                        found[rank, home] += case.settings.sizes.values[table]
                        found[home, rank] += case.settings.sizes.values[table]
    return found, requests


@settings(max_examples=10, derandomize=True, phases=NO_SHRINKING)
@given(at_home_cases())
def test_a_cluster_trains_what_one_process_trains(case: Case) -> None:
    check(case, run_cluster(case))


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, phases=NO_SHRINKING)
@given(at_home_cases())
def test_many_clusters_train_what_one_process_trains(case: Case) -> None:
    check(case, run_cluster(case))


class LeavingRank(Rank):
    """A rank that leaves sums while its share is 0."""

    may_leave = True


@settings(max_examples=5, derandomize=True, phases=NO_SHRINKING)
@given(at_home_cases(num_workers=3), st.data())
def test_workers_without_a_share_serve_their_rows(case: Case, data: st.DataObject) -> None:
    shares = st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 3).filter(any)
    moments = data.draw(st.sets(st.integers(-1, len(case.batches) - 1), min_size=1, max_size=5))
    case = replace(case, decisions={one: (("shares", data.draw(shares)),) for one in sorted(moments)})
    outcome = run_cluster(case, kind=LeavingRank)
    assert_bit_equal(case, outcome, replay(case, outcome))


def a_case() -> Case:
    """Two workers, one batch of four samples, tables of two features and of one."""
    tables = tuple(
        EmbeddingBagConfig(embedding_dim=2, name=name, feature_names=features)
        for name, features in (("a", ["f0", "f1"]), ("b", ["f2"]))
    )
    rng, optimizer = np.random.default_rng(0), row_optimizer("adagrad", lr=0.1)
    samples = random_samples(rng, ("f0", "f1", "f2"), 8, range(9), 2)
    case_settings = ScheduleSettings(
        topology=Topology(2, 0, colocated=True),
        sizes=row_sizes(tables, optimizer, torch.float64),
        prices=(1, 1),
        cache=CacheSettings(0),
        dispatcher="round-robin",
        sync="at-home",
    )
    return Case(tables, optimizer, case_settings, (samples, samples))


def test_a_model_may_read_other_ids_than_those_of_its_batch() -> None:
    """Copies of the batch's ids, parts of them, and rows that nobody has trained, beside the batch itself."""
    case = a_case()
    fresh = TinyModel(case)

    def train(rank: Rank, batch: Batch) -> float | None:
        names, values, lengths = batch.ids.keys(), batch.ids.values(), batch.ids.lengths()
        expected = rank.model.rows(batch.ids).values().detach()
        again = KeyedJaggedTensor(names, values.clone(), lengths=lengths.clone())
        assert torch.equal(rank.model.rows(again).values(), expected)
        half = len(batch) // 2
        first = Batch.from_samples(as_samples(batch).take(np.arange(half)), global_size=8)
        assert torch.equal(rank.model.rows(first.ids).values(), expected[:half])
        unknown = torch.full_like(values, 12345)
        strange = KeyedJaggedTensor(names, unknown, lengths=lengths)
        assert torch.equal(rank.model.rows(strange).values(), fresh.rows(strange).values())
        return train_batch(rank, batch)

    outcome = run_cluster(case, train=train)
    assert_bit_equal(case, outcome, replay(case, outcome))


def test_a_worker_without_samples_may_read_ids_too() -> None:
    """Its batch has no rows, so all of them read their initial values."""
    case = a_case()
    case = replace(case, settings=replace(case.settings, shares=(1, 0)))
    fresh = TinyModel(case)

    def train(rank: Rank, batch: Batch) -> float | None:
        if rank.rank == 1:
            assert not len(batch)
            names, ones = batch.ids.keys(), torch.ones(len(batch.ids.keys()), dtype=torch.int32)
            strange = KeyedJaggedTensor(names, torch.tensor([3, 5, 3]), lengths=ones)
            assert torch.equal(rank.model.rows(strange).values(), fresh.rows(strange).values())
        return train_batch(rank, batch)

    outcome = run_cluster(case, train=train)
    assert_bit_equal(case, outcome, replay(case, outcome))


def test_a_batch_may_be_trained_in_parts() -> None:
    """Gradients of two passes over parts of the batch add up to those of its rows."""
    case = a_case()

    def train(rank: Rank, batch: Batch) -> float | None:
        total = torch.zeros((), dtype=case.dtype)
        samples, half = as_samples(batch), len(batch) // 2
        for places in (np.arange(half), np.arange(half, len(batch))):
            part = Batch.from_samples(samples.take(places), global_size=batch.global_size)
            loss = part.loss(per_sample_loss(rank.model(part), part))
            loss.backward()
            total += loss.detach()
        summed = rank.training.step(total)
        rank.dense.step()
        rank.dense.zero_grad()
        return summed

    outcome = run_cluster(case, train=train)
    assert_close(case, outcome, plain(case, outcome))


def test_training_on_another_batch_is_refused_before_anything_is_handed_over() -> None:
    case = a_case()

    def train(rank: Rank, batch: Batch) -> float | None:
        part = Batch.from_samples(as_samples(batch).take(np.arange(1)), global_size=8)
        part.loss(per_sample_loss(rank.model(part), part)).backward()
        with pytest.raises(ConfigError, match="train on the dispatched batch, and on nothing else"):
            rank.training.step()
        rank.dense.zero_grad()
        return train_batch(rank, batch)

    outcome = run_cluster(case, train=train)
    assert_bit_equal(case, outcome, replay(case, outcome))


def test_rows_are_gone_after_the_step() -> None:
    def train(rank: Rank, batch: Batch) -> float | None:
        summed = train_batch(rank, batch)
        with pytest.raises(ConfigError, match="has the rows of its batch from when it gets it until step"):
            rank.model.rows(batch.ids)
        return summed

    case = a_case()
    outcome = run_cluster(case, train=train)
    assert_bit_equal(case, outcome, replay(case, outcome))
