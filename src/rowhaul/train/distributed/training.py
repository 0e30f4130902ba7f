"""Distributed training as a loop of one's own: iterate over dispatched batches, backward, step.

Every rank, the stores too, runs the same script. On a store the loop serves rows and yields nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, EmbeddingBagCollection
from rowhaul.pruning.cluster.pruning import ClusterPruning, PruneNote
from rowhaul.pruning.cluster.worker import ChunkedWorkerRows
from rowhaul.pruning.layout import ChunkLayout, chunk_layout
from rowhaul.runtime.flush import flush, flush_plan, num_flushed_rows
from rowhaul.runtime.hot_set import carry_out, replacing_plan
from rowhaul.runtime.mover import Job
from rowhaul.runtime.row_memory import Rates, RowMemory, TableLayout
from rowhaul.runtime.runtime import Runtime
from rowhaul.runtime.worker_rows import WorkerRows
from rowhaul.schedule import HotRows, Plan, ScheduleSettings
from rowhaul.store import TableSpec
from rowhaul.train.distributed.samples import part_of
from rowhaul.transport.dense_sum import DenseGradients

OnIteration = Callable[[Job], None]
OnPrune = Callable[[PruneNote], None]


class DistributedTraining:
    """A model whose rows are on several ranks, in training.

    Between two calls of `batches` nothing is under way: this is where to evaluate and to save.

    Example:
        >>> for batch in training.batches(1000):
        ...     loss = batch.loss(per_sample_loss(model(batch), batch))
        ...     loss.backward()
        ...     training.step()                     # rows, and dense gradients summed over the workers
        ...     optimizer.step(); optimizer.zero_grad()
        >>> save_checkpoint(cluster, training, optimizer, "run/checkpoints")
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        rates: Rates,
        settings: ScheduleSettings,
        *,
        on_iteration: OnIteration = lambda job: None,
        on_prune: OnPrune = lambda note: None,
    ) -> None:
        self.model, self.runtime, self.settings = model, runtime, settings
        self._rates = rates
        bounded = settings.sync_mode.name == "bounded"
        self.collection = only_collection(model)
        self.pruning: ClusterPruning | None = None
        self._on_iteration, self._on_prune = on_iteration, on_prune
        self._job: Job | None = None
        self._compute_began = 0.0
        cache = runtime.mover.cache
        self._rows: WorkerRows | None = None
        self.layout = (cache or runtime.mover.home or _no_memory(self.collection)).layout
        if isinstance(self.layout, ChunkLayout):
            self.collection.spread()
            self.pruning = ClusterPruning(self.layout, trains=cache is not None)
        if cache is not None:
            self.collection.inserts_rows = False
            self._dense = DenseGradients(model)
            if self.pruning is not None and self.pruning.utility_log is not None:
                self._rows = ChunkedWorkerRows(self.collection, cache, rates, self.pruning.utility_log)
            else:
                self._rows = WorkerRows(self.collection, cache, rates, bounded=bounded)

    @property
    def iteration(self) -> int:
        """Iterations trained so far."""
        return self.runtime.iteration

    @property
    def samples(self) -> int:
        """Samples that all ranks together have trained."""
        return self.runtime.samples

    @property
    def finished(self) -> bool:
        """Whether the data is used up; the same on all ranks."""
        return self.runtime.ended

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """This rank's part of each of the next ``count`` global batches, or of all; may have no sample.

        Call `step` once for each. Yields nothing on a store. Rows are pruned on the way where they are.
        """
        if self.pruning is None:
            yield from self._segment(count)
            return
        runtime, end = self.runtime, None if count is None else self.runtime.iteration + count
        while not runtime.ended and (end is None or runtime.iteration < end):
            before = runtime.iteration
            most = self.pruning.until_next(before)
            yield from self._segment(most if end is None else min(most, end - before))
            if runtime.iteration == before + most:
                if self.pruning.narrow(runtime):
                    self._use_narrower()
                if self.pruning.is_due(runtime):
                    self._on_prune(self.pruning.prune(runtime, self.settings.topology))
            if runtime.stopped:
                break

    def _use_narrower(self) -> None:
        """Rows have fewer columns now."""
        assert self.pruning is not None
        self.layout = self.pruning.layout
        self.settings = replace(self.settings, sizes=self.layout.sizes())
        cache = self.runtime.mover.cache
        if cache is not None and self.pruning.utility_log is not None:
            self._rows = ChunkedWorkerRows(self.collection, cache, self._rates, self.pruning.utility_log)

    def _segment(self, count: int | None) -> Iterator[Batch]:
        """Iterations during which chunks stay as they are."""
        self.runtime.start_segment(count)
        if self._rows is not None:
            previous = None
            while (job := self.runtime.begin()) is not None:
                if previous is not None:
                    self._is_over(previous)
                self._job = previous = job
                yield self._part(job)
                if self._job is not None:
                    raise ConfigError("call step() after backward(), once for every batch")
            self.runtime.finish_segment()
            if previous is not None:
                self._is_over(previous)
        else:
            self.runtime.finish_segment()

    def step(self, loss: Tensor | None = None) -> float | None:
        """Step this worker's rows and sum the dense gradients over all workers into ``.grad``.

        Returns the loss of the global batch where this rank's part of it is given.
        """
        job, rows = self._job, self._rows
        if job is None or rows is None:
            raise ConfigError("step() belongs to a batch: call it once for every batch that batches() yields")
        job.seconds["compute"] += time.perf_counter() - self._compute_began
        taken = rows.take(job.plan.iteration, job.rows)
        shared = self._dense.collect(loss, taken.replicated_size, self._dtype())
        taken.write_replicated(shared.replicated)
        summing = self.runtime.sum_over_workers(shared.buffer)
        began = time.perf_counter()
        handed_in = rows.step_own(taken)
        stepped = time.perf_counter()
        summing.wait()
        job.seconds["all_reduce"] += time.perf_counter() - stepped
        self._dense.spread(shared)
        rows.step_replicated(taken, shared.replicated)
        job.seconds["compute"] += stepped - began
        self._job = None
        self.runtime.end(handed_in)
        return shared.loss

    def _is_over(self, job: Job) -> None:
        """All that an iteration did is done, its last pushes too."""
        self.runtime.note_measures(job)
        self._on_iteration(job)

    def flushed(self) -> RowMemory | None:
        """The latest records of rows that are not at rest, on copies: at a store, those that it is home of.

        A collective call, between two segments; None on a rank that stores nothing.
        """
        runtime, settings = self.runtime, self.settings
        plan = runtime.feed.share(
            lambda scheduler: flush_plan(scheduler.states(), settings.topology, settings.sizes)
        )
        return runtime.in_moves(lambda mover: flush(mover, plan, self._rates)).wait()

    def replicate(self, hot: HotRows) -> Plan:
        """From now on every worker holds these rows, and no others are replicated; nothing is learned by it.

        A collective call, between two segments, with the same rows on all ranks. Returns what was moved.
        """
        plan = self.runtime.feed.share(lambda scheduler: replacing_plan(scheduler, hot))
        self.runtime.in_moves(lambda mover: carry_out(mover, plan)).wait()
        self.settings = replace(self.settings, hot=hot if len(hot) else None)
        return plan

    def held(self) -> tuple[int, int]:
        """Rows of the model, and bytes of rows and indexes on all ranks; a collective call."""
        cache, home, flushed = self.runtime.mover.cache, self.runtime.mover.home, self.flushed()
        groups = [*(cache.groups if cache else ()), *(home.groups if home else ())]
        num_rows = num_flushed_rows(home, flushed) if home is not None and flushed is not None else 0
        if self.pruning is not None:
            num_rows = self.pruning.num_rows_here(self.runtime)
        mine = np.array([num_rows, sum(group.allocated_bytes for group in groups)])
        gathered = self.runtime.in_control(lambda control: control.all_gather(mine.view(np.uint8))).wait()
        rows, num_bytes = np.ascontiguousarray(gathered).view(np.int64).sum(axis=0).tolist()
        return rows, num_bytes

    def close(self) -> None:
        """End the threads of this rank; the cluster stays joined."""
        self.runtime.close()

    def _part(self, job: Job) -> Batch:
        assert job.samples is not None
        assert self._rows is not None
        self._compute_began = time.perf_counter()
        if isinstance(self._rows, ChunkedWorkerRows):
            self._rows.begin(job.plan)
        self._rows.expect(job.rows)
        mine = part_of(job.samples, job.plan.worker, self.runtime.rank)
        job.num_samples = len(mine)
        return Batch.from_samples(mine, global_size=len(job.samples))

    def _dtype(self) -> torch.dtype:
        return self.collection.groups[0].dtype


def only_collection(model: nn.Module) -> EmbeddingBagCollection:
    """The embedding tables of a model."""
    found = [one for one in model.modules() if isinstance(one, EmbeddingBagCollection)]
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} EmbeddingBagCollections; distributed training needs "
            "exactly one: put all tables into it"
        )
    return found[0]


def layout_of(collection: EmbeddingBagCollection) -> TableLayout:
    """What every rank must know of a collection's tables: those of chunks, where rows are pruned."""
    configs = collection.embedding_bag_configs()
    features = [feature for config in configs for feature in config.feature_names]
    twice = sorted({feature for feature in features if features.count(feature) > 1})
    if twice:
        raise ConfigError(
            f"feature {twice[0]!r} reads two tables; distributed training needs one table a feature: "
            "give the second one a feature of its own"
        )
    whole = TableLayout(
        tuple(TableSpec(one.name, one.embedding_dim, *one.initial_range) for one in configs),
        collection.optimizer,
        str(configs[0].data_type).removeprefix("torch."),
        collection.seed,
    )
    return whole if collection.prune_settings is None else chunk_layout(whole, collection.prune_settings)


def _no_memory(collection: EmbeddingBagCollection) -> RowMemory:
    """Of a rank that neither trains nor stores."""
    return RowMemory(layout_of(collection))


def cache_of(collection: EmbeddingBagCollection, layout: TableLayout | None = None) -> RowMemory:
    """A collection's rows as a worker's cache; where they are pruned, a cache beside it."""
    groups = None if collection.prune_settings is not None else [one.tables for one in collection.groups]
    return RowMemory(layout or layout_of(collection), groups, makes_rows=False)


def tables_of_features(collection: EmbeddingBagCollection, features: tuple[str, ...]) -> list[int]:
    """The number of the table that each feature of the data reads."""
    table = {
        name: number
        for number, config in enumerate(collection.embedding_bag_configs())
        for name in config.feature_names
    }
    unread = [name for name in features if name not in table]
    if unread:
        raise ConfigError(
            f"feature {unread[0]!r} of the data reads no table of the model; leave it out of the schema, or "
            "give it a table"
        )
    return [table[name] for name in features]
