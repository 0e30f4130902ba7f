"""A whole cluster in one process: every rank runs its real executors over the in-process network.

Ranks share the network and nothing else: each makes its own model, copies the samples and plans for itself.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from training_case import FIRST, Case, Row, Rows, per_sample_loss
from watched_parts import (
    NETWORK,
    CountedLinks,
    Delay,
    DelayedHomeMover,
    DelayedMover,
    DelayedRuntime,
    DelayedScheduler,
    RememberedJobs,
    no_delay,
)

from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch, EmbeddingBagCollection
from rowhaul.nn.batch_norm import set_reducer
from rowhaul.planning.feed import LeaderFeed
from rowhaul.planning.planner import Planner
from rowhaul.runtime.flush import flushed_blocks
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import HotRows, IdBatch, Plan, Scheduler
from rowhaul.train.distributed.tables import layout_of, only_collection, tables_of_features
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.transport.in_process import WAIT_SECONDS, InProcessNetwork


@dataclass
class AtRest:
    """What one rank has, and what its scheduler believes, between two segments."""

    iteration: int
    rows: Rows  # settled, of which this rank is the home
    dense: list[np.ndarray]
    cached: set[Row]
    waiting: set[tuple[str, int, int, int]]  # gradients: cache or home, worker, table, key
    states: dict[str, np.ndarray]
    scheduler: dict[str, np.ndarray]
    hot: set[Row]


@dataclass
class Outcome:
    """What a run left."""

    losses: list[float]
    jobs: list[list[Job]]  # ranks x iterations
    rests: list[list[AtRest]]  # ranks x segments
    posted: Counter[tuple[int, int]]  # bytes really given to the links, by source and target

    @property
    def plans(self) -> list[Plan]:
        return [job.plan for job in self.jobs[0]]

    @property
    def workers(self) -> list[np.ndarray]:
        """Who trained each sample of each batch."""
        return [plan.worker for plan in self.plans]

    def rows(self, segment: int = -1) -> Rows:
        """The settled records of all homes after a segment."""
        parts = [rests[segment].rows for rests in self.rests]
        every = {row: record for part in parts for row, record in part.items()}
        assert len(every) == sum(map(len, parts)), "a row is at home on two ranks"
        return every


class RankErrorsError(Exception):
    """Ranks of a cluster have failed; `errors` has what each raised."""

    def __init__(self, errors: list[BaseException | None]) -> None:
        super().__init__(errors)
        self.errors = errors


def train_batch(rank: Rank, batch: Batch) -> float | None:
    """What a user's loop does with a batch."""
    loss = batch.loss(per_sample_loss(rank.model(batch), batch))
    loss.backward()
    rank.delay(rank.rank, "step")
    summed = rank.training.step(loss)
    assert summed is not None or not rank.training.is_summing
    rank.dense.step()
    rank.dense.zero_grad()
    return summed


def run_cluster(
    case: Case,
    *,
    delay: Delay = no_delay,
    train: Callable[[Rank, Batch], float | None] = train_batch,
    should_stop: Callable[[int, int], bool] = lambda rank, iteration: False,
    should_save: Callable[[int], bool] = lambda iteration: False,
    kind: type[Rank] | None = None,
) -> Outcome:
    """Train a case on threads, a few for each rank.

    ``should_stop`` is asked for a rank and the iteration it trains: does the rank want the segment to end?

    Raises:
        RankErrorsError: with what every rank raised, once all of them have ended.
    """
    num_workers, num_ranks = case.settings.topology.num_workers, case.settings.topology.num_ranks
    network = InProcessNetwork(num_ranks, delay=lambda: delay(NETWORK, "network"))
    make = kind or Rank
    ranks = [make(case, rank, network, delay, train, should_stop, should_save) for rank in range(num_ranks)]
    threads = [threading.Thread(target=one.run, daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.25 * WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    errors = [one.error for one in ranks]
    if any(errors):
        raise RankErrorsError(errors) from next(filter(None, errors))
    for worker in ranks[1:num_workers]:
        pairs = zip(worker.losses, ranks[0].losses, strict=True)
        assert all(mine in (None, first) for mine, first in pairs)
        for rest, first in zip(worker.rests, ranks[0].rests, strict=True):
            assert all(map(np.array_equal, rest.dense, first.dense)), "dense weights differ"
    posted = sum((one.links.posted for one in ranks), Counter[tuple[int, int]]())
    return Outcome(ranks[0].losses, [one.mover.jobs for one in ranks], [one.rests for one in ranks], posted)


class Rank:
    """One rank: joins, trains its part in segments, and tells what it has in between."""

    may_leave = False  # with a share of 0

    def __init__(
        self,
        case: Case,
        rank: int,
        network: InProcessNetwork,
        delay: Delay,
        train: Callable[[Rank, Batch], float | None],
        should_stop: Callable[[int, int], bool],
        should_save: Callable[[int], bool],
    ) -> None:
        self.case, self.rank, self.delay = case, rank, delay
        self.losses: list[float | None] = []
        self.rests: list[AtRest] = []
        self.error: BaseException | None = None
        self._network, self._train = network, train
        topology = case.settings.topology
        trains = rank < topology.num_workers
        self.model = self.make_model(case)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=case.dense_lr)
        collection = only_collection(self.model)
        layout = self.layout(collection) if trains else layout_of(collection)
        cache = layout.make_cache(collection.feature_groups) if trains else None
        home = layout.make_home(topology, rank) if topology.colocated or not trains else None
        if cache is not None and case.settings.hot is not None:
            cache.make(case.settings.hot.tables, case.settings.hot.keys)
        failure = Failure()
        self.links = CountedLinks(network.links(rank))
        parts = self.links, case.settings.sync_mode, case.rates, cache, home
        self.mover: RememberedJobs
        if case.settings.sync_mode.plans_rows:
            self.mover = DelayedMover(rank, *parts, delay=delay)
        else:
            self.mover = DelayedHomeMover(rank, *parts, delay=delay)
            self.mover.read_for(collection.feature_groups, topology)
        planner = Planner(
            self._scheduler,
            self._samples(),
            failure,
            tables_of_features=tables_of_features(collection, case.batches[0].features),
        )
        self.feed = LeaderFeed(planner, None, failure)
        self.runtime = DelayedRuntime(
            rank,
            self.mover,
            self.feed,
            network.collective(rank),
            network.collective(rank, range(topology.num_workers)) if trains else None,
            failure,
            trains=trains,
            early=case.early,
        )
        self.runtime.delay = delay
        self.runtime.should_stop = lambda: should_stop(rank, self.runtime.iteration)
        self.runtime.should_save = lambda: should_save(self.runtime.iteration)
        self.training = DistributedTraining(
            self.model,
            self.runtime,
            case.rates,
            case.settings,
            optimizer=self.dense if self.may_leave else None,
            compare_every=2,
        )
        set_reducer(self.model, self.training.sum_over_workers)

    def make_model(self, case: Case) -> torch.nn.Module:
        """Make this rank's model."""
        return case.model()

    def layout(self, collection: EmbeddingBagCollection) -> TableLayout:
        """The layout of a worker."""
        return layout_of(collection)

    def run(self) -> None:
        try:
            self._decide(FIRST)
            for segment, count in enumerate(self.case.segments):
                for batch in self.training.batches(count):
                    self._decide(self.training.iteration)
                    self.delay(self.rank, "forward")
                    self.losses.append(self._train(self, batch))
                    self.delay(self.rank, "end")
                self.rests.append(self._rest())
                if (hot := self.case.hot_after(segment)) is not None:
                    posted = Counter(self.links.posted)  # what this sends is no move of an iteration
                    self.training.replicate(hot)
                    self.links.posted = posted
        except BaseException as error:
            self.error = error
            self._network.fail(error)
        finally:
            self.training.close()
            self.feed.close()

    def _scheduler(self, ids: Iterator[IdBatch]) -> Scheduler:
        return DelayedScheduler(self.case.settings, ids, lambda: self.delay(self.rank, "plan"))

    def _samples(self) -> Iterator[Samples]:
        for samples in self.case.batches:
            self.delay(self.rank, "read")
            yield copy.deepcopy(samples)

    def _decide(self, iteration: int) -> None:
        if self.rank == 0:
            for name, value in self.case.decisions.get(iteration, ()):
                self.runtime.postbox.post(name, value)

    def _rest(self) -> AtRest:
        posted = Counter(self.links.posted)  # what settling sends is no move of a plan
        self.training.catch_up()
        flushed = self.training.flushed()
        self.links.posted = posted
        states, exported = self.feed.at_rest(lambda scheduler: (scheduler.states(), scheduler.export()))
        cache, home = self.mover.cache, self.mover.home
        rows: Rows = {}
        if home is not None:
            assert flushed is not None
            for table in range(len(home.layout.specs)):
                for keys, records in flushed_blocks(home, flushed, table):
                    for key, record in zip(keys.tolist(), records, strict=True):
                        assert (table, key) not in rows, "a row is twice at home"
                        rows[table, key] = record
        memories = [(name, one) for name, one in (("cache", cache), ("home", home)) if one is not None]
        return AtRest(
            self.runtime.iteration,
            rows,
            [one.detach().cpu().numpy().copy() for one in self.model.parameters()],
            set(_rows_held(cache)) if cache is not None else set(),
            {(name, *one) for name, memory in memories for one in _gradients_held(memory)},
            states,
            exported,
            rows_of(self.training.settings.hot),
        )


def rows_of(hot: HotRows | None) -> set[Row]:
    """Replicated rows as a set."""
    return set(zip(hot.tables.tolist(), hot.keys.tolist(), strict=True)) if hot is not None else set()


def _rows_held(memory: RowMemory) -> Iterator[Row]:
    for table in range(len(memory.layout.specs)):
        group, position = memory.place_of(table)
        for keys, _ in memory.groups[group].index.blocks(position):
            yield from ((table, key) for key in keys.tolist())


def _gradients_held(memory: RowMemory) -> Iterator[tuple[int, int, int]]:
    for (worker, number), buffer in memory._buffers.items():
        for table in range(len(memory.layout.specs)):
            group, position = memory.place_of(table)
            if group == number:
                for keys, _ in buffer.index.blocks(position):
                    yield from ((worker, table, key) for key in keys.tolist())
