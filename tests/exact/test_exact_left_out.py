"""Workers with a share of 0 leave sums and return: what is learned does not notice, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cluster_checks import check_run
from exact_cases import cases, changing_rate, most_capacity, random_samples, with_capacity
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Rank, run_cluster, train_batch
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case, TinyModel, row_sizes

from rowhaul.nn import Batch, BatchNorm1d, EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, HotRows, ScheduleSettings, Topology
from rowhaul.train.distributed.evaluation import evaluate
from rowhaul.train.distributed.replica_state import ReplicaState
from rowhaul.transport.in_process import InProcessCollective
from slow_cases import mostly_slow

FEATURES = ("f0", "f1")
TABLES = (EmbeddingBagConfig(embedding_dim=2, name="a", feature_names=list(FEATURES)),)
STAY, CATCH_UP, EVALUATE, COMPARE = range(4)


class LeavingRank(Rank):
    """A rank that leaves sums while its share is 0."""

    may_leave = True


@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    mostly_slow(
        [("on-demand", False), ("on-demand", True), ("full", False), ("static", False)],
        ("on-demand", False),
        ("on-demand", True),
    ),
)
@settings(max_examples=5, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_shares_of_zero_at_any_moment(sync: str, peer_to_peer: bool, data: st.DataObject) -> None:
    """Replay to the bit, with control records in the midst of training, hot rows and row policies."""
    case = data.draw(cases(sync, peer_to_peer))
    shares = st.tuples(*[st.sampled_from([0, 0, 1, 2])] * case.settings.topology.num_workers).filter(any)
    moments = data.draw(st.sets(st.integers(-1, len(case.batches) - 1), min_size=1, max_size=5))
    case = replace(case, decisions={one: (("shares", data.draw(shares)),) for one in sorted(moments)})
    case = with_capacity(case, most_capacity(case))
    outcome = run_cluster(case, kind=LeavingRank)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)


class NormModel(TinyModel):
    """With a batch norm, whose statistics are buffers, and which needs all workers at once."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.norm = BatchNorm1d(3, dtype=case.dtype)

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled = self.rows(batch.ids).values()
        inputs = torch.cat([pooled, batch.dense.to(pooled.dtype)], dim=1)
        return torch.tanh(self.norm(inputs @ self.first)) @ self.last


@dataclass(frozen=True)
class NormCase(Case):
    """Shares are decided before segments, where the moment is known; after them ranks rest in some way."""

    rests: Sequence[int] = ()

    def model(self) -> TinyModel:
        return NormModel(self)


class RestingRank(LeavingRank):
    """Keeps its copies wherever it must have those of rank 0, and what it was told."""

    def run(self) -> None:
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.05, betas=(0.8, 0.9))
        self.copies: list[bytes] = []
        self.metrics: list[object] = []
        optimizer = self.dense if self.may_leave else None
        self.training.__init__(  # type: ignore[misc]  # again, with this optimizer
            self.model, self.runtime, self.case.rates, self.case.settings,
            optimizer=optimizer, compare_every=2,
        )  # fmt: skip
        assert isinstance(self.case, NormCase)
        try:
            for segment, rest in enumerate(self.case.rests):
                self._decide(segment)
                for batch in self.training.batches(self.case.segments[segment]):
                    self.losses.append(train_batch(self, batch))
                self._pause(rest)
            self._pause(CATCH_UP)
        except BaseException as error:
            self.error = error
            self._network.fail(error)
        finally:
            self.training.close()
            self.feed.close()

    def _pause(self, rest: int) -> None:
        if rest == EVALUATE:
            self.metrics.append(evaluate(self.training, self.case.batches[:3]))
        elif rest == CATCH_UP:
            self.training.catch_up()
        elif rest == COMPARE:
            self.training.compare_replicas()
        cache = self.mover.cache
        if cache is not None and rest in (EVALUATE, CATCH_UP):
            state = ReplicaState(self.model, self.dense, cache)
            self.copies.append(state.pack(self.training.settings.hot).tobytes())


class StayingRank(RestingRank):
    """The same for a cluster whose workers never leave: the oracle."""

    may_leave = False


@st.composite
def norm_cases(draw: st.DrawFn) -> NormCase:
    num_workers, colocated = draw(st.integers(2, 4)), draw(st.booleans())
    topology = Topology(num_workers, 0 if colocated else 1, colocated, peer_to_peer=draw(st.booleans()))
    optimizer = row_optimizer("adam", lr=0.1)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    batches = [random_samples(rng, FEATURES, 6, range(9), 2) for _ in range(sum(counts))]
    shares = st.tuples(*[st.sampled_from([0, 0, 1, 2])] * num_workers).filter(any)
    hot = draw(st.none() | st.just(HotRows(np.zeros(3, np.int32), np.arange(3))))
    case = NormCase(
        TABLES,
        optimizer,
        ScheduleSettings(
            topology,
            row_sizes(TABLES, optimizer, torch.float32),
            (1,) * num_workers,
            CacheSettings(0),
            dispatcher=draw(st.sampled_from(["joint", "round-robin", "laia"])),
            shares=draw(st.none() | shares),
            hot=hot,
        ),
        tuple(batches),
        dtype=torch.float32,
        rates=changing_rate,
        segments=tuple(counts),
        decisions={one: (("shares", draw(shares)),) for one in range(len(counts)) if draw(st.booleans())},
        rests=[draw(st.integers(0, 3)) for _ in counts],
    )
    return with_capacity(case, most_capacity(case))  # type: ignore[return-value]


@pytest.mark.slow
@settings(max_examples=15, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(case=norm_cases())
def test_batch_norm_hot_rows_evaluation_and_optimizer_state(case: NormCase) -> None:
    """Bit-equal to a cluster whose workers never leave; sums are over those with a share alone."""
    stayed, _, _ = _ranks(case, StayingRank)
    left, members, plans = _ranks(case, RestingRank)
    assert left[0].losses == stayed[0].losses
    assert left[0].metrics == stayed[0].metrics
    workers = left[: case.settings.topology.num_workers]
    assert len(workers[0].copies) == sum(one in (EVALUATE, CATCH_UP) for one in case.rests) + 1
    for one in workers:
        assert one.copies == stayed[0].copies
    count = len(members) // len(plans)  # of sums in an iteration: batch norm, and buckets of gradients
    assert count > 3
    assert members == [plan.summing_workers for plan in plans for _ in range(count)]


def _ranks(case: NormCase, kind: type[RestingRank]) -> tuple[list[RestingRank], list[tuple[int, ...]], list]:
    """Run a case; also return who took part in each sum, as worker 0 saw it."""
    made: list[RestingRank] = []
    members: list[tuple[int, ...]] = []
    lock = threading.Lock()

    class Kept(kind):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(self)

    summed = InProcessCollective.sum_in_rank_order

    def counted(self: InProcessCollective, values: torch.Tensor) -> None:
        with lock:
            members.extend([self._members] if self.rank == 0 else [])
        summed(self, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessCollective, "sum_in_rank_order", counted)
        outcome = run_cluster(case, kind=Kept)
    return made, members, outcome.plans


def test_bytes_that_bring_workers_up_to_date_are_counted() -> None:
    """And a worker that stays out costs none."""
    rng = np.random.default_rng(0)
    optimizer = row_optimizer("sgd", lr=0.1)
    case = NormCase(
        TABLES,
        optimizer,
        ScheduleSettings(
            Topology(3, 1), row_sizes(TABLES, optimizer, torch.float32), (1, 1, 1), CacheSettings(100),
            shares=(1, 0, 0),
        ),
        tuple(random_samples(rng, FEATURES, 6, range(9), 2) for _ in range(8)),
        dtype=torch.float32,
        segments=(3, 5),
        decisions={1: (("shares", (1, 1, 0)),)},
        rests=(STAY, STAY),
    )  # fmt: skip
    ranks, _, plans = _ranks(case, RestingRank)
    assert [plan.summing_workers for plan in plans] == [(0,)] * 5 + [(0, 1)] * 3
    sent = [job.catch_up_bytes for job in ranks[0].mover.jobs]
    assert [number for number, one in enumerate(sent) if one] == [5]
    assert sent[5] == pytest.approx(len(ranks[0].copies[0]), abs=64)  # numbers in its header may be shorter
