"""`DistributedTraining`: iterate over dispatched batches, call backward and step.

Every rank, stores included, runs the same script. On a store the loop serves rows and yields nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from rowhaul._activity import Activity, doing
from rowhaul._finite import is_finite
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, BatchNorm1d
from rowhaul.planning.rank0_data.sharing import DataSource
from rowhaul.planning.replicas import compare_replicas
from rowhaul.runtime.at_home.rows import make_rows
from rowhaul.runtime.flush import FlushSlices, flush
from rowhaul.runtime.hot_set import carry_out, replacing_plan
from rowhaul.runtime.mover import Job
from rowhaul.runtime.own_samples import own_batch
from rowhaul.runtime.row_changes import RowChanges
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.runtime import Runtime
from rowhaul.runtime.worker_rows import CachedRows
from rowhaul.schedule import HotRows, Plan, ScheduleSettings
from rowhaul.schedule.row_states import State
from rowhaul.store.row_format import format_of
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.distributed.divergence import find_nonfinite, raise_diverged
from rowhaul.train.distributed.gathering import raise_first_error
from rowhaul.train.distributed.left_out import LeftOut, OnNote
from rowhaul.train.distributed.replica_state import ReplicaState
from rowhaul.train.distributed.replicas import COMPARE_EVERY, Replicas
from rowhaul.train.distributed.tables import layout_of, only_collection
from rowhaul.transport.dense.gradients import DenseGradients
from rowhaul.transport.dense.overlapping import EXACT_WIRE, OverlappingSum, wire_type

OnIteration = Callable[[Job], None]
OnPrune = Callable[[Any], None]


class DistributedTraining:
    """Trains a model whose rows are on several ranks.

    Between two calls of `batches` nothing is pending: evaluate and save there.

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
        on_left_out: OnNote = lambda note: None,
        optimizer: Optimizer | None = None,
        compare_every: int = COMPARE_EVERY,
        dense_wire: str = EXACT_WIRE,
    ) -> None:
        self.model, self.runtime, self.settings = model, runtime, settings
        self.rates = rates
        self.collection = only_collection(model)
        self._on_iteration, self._on_prune = on_iteration, on_prune
        self._optimizer = optimizer
        self._job: Job | None = None
        self._batch: Batch | None = None  # of the job
        self._compute_began = 0.0
        self._read_error_known = False
        cache, home = runtime.mover.cache, runtime.mover.home
        self.layout = cache.layout if cache else home.layout if home else layout_of(self.collection)
        self.upkeep = self.layout.make_upkeep(trains=cache is not None)
        self._rows: CachedRows | None = None
        self._replicas: Replicas | None = None
        self._left_out: LeftOut | None = None
        if cache is not None:
            self._dense = OverlappingSum(
                DenseGradients(model.parameters()),
                runtime.in_dense,
                runtime.dense_bucket_ends,
                wire=wire_type(dense_wire),
                # Batch norm sums over the workers in backward(): another order would mix up the messages.
                # Without links and plans there is nothing to overlap with.
                overlaps=(runtime.early or settings.sync_mode.plans_rows)
                and not any(isinstance(one, BatchNorm1d) for one in model.modules()),
            )
            self._replicas = Replicas(model, cache, optimizer, compare_every)
            state = ReplicaState(model, optimizer, cache) if optimizer is not None else None
            self._left_out = LeftOut(runtime, settings.topology, state, on_left_out)
            self._read_from_cache()

    @property
    def iteration(self) -> int:
        """Iterations trained so far."""
        return self.runtime.iteration

    @property
    def samples(self) -> int:
        """Samples trained so far by all ranks together."""
        return self.runtime.samples

    @property
    def finished(self) -> bool:
        """Whether the data is used up; the same on all ranks."""
        return self.runtime.ended

    @property
    def is_summing(self) -> bool:
        """Whether this worker takes part in the current iteration; one with a share of 0 is left out."""
        return self._left_out is not None and self._left_out.is_summing

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Yield this rank's part, possibly empty, of each of the next ``count`` global batches, or of all.

        Call `step` once for each. Yields nothing on a store. Rows that are pruned are so between batches.

        Raises:
            Exception: with ``data_from="rank0"``, the error that ended rank 0's data, on every rank and after
                all batches before it are trained: raising it at once on rank 0 alone would leave the others
                in the middle of an iteration.
        """
        runtime, end = self.runtime, None if count is None else self.runtime.iteration + count
        while not runtime.ended and (end is None or runtime.iteration < end):
            before, most = runtime.iteration, self.upkeep.until_next(runtime.iteration)
            limits = [one for one in (most, None if end is None else end - before) if one is not None]
            yield from self._segment(min(limits, default=None))
            if most is not None and runtime.iteration == before + most:
                self._maintain_rows()
            if runtime.stopped or runtime.save_due or runtime.rest_due or runtime.publish_due:
                break
        if runtime.ended and runtime.feed.data is not None and not self._read_error_known:
            self._read_error_known = True
            data = runtime.feed.data
            raise_first_error(runtime, self.iteration, data.error if isinstance(data, DataSource) else None)

    def _maintain_rows(self) -> None:
        """Prune rows, or hand them over, if that is due."""
        for note in self.upkeep.run(self):
            self._on_prune(note)
        if self.upkeep.layout is not self.layout:  # the row size has changed
            self.layout = self.upkeep.layout
            self.settings = replace(self.settings, sizes=self.layout.sizes())
            self._read_from_cache()

    def _read_from_cache(self) -> None:
        """Point the model at this worker's cache, or at rows that stay at home."""
        cache = self.runtime.mover.cache
        if cache is not None:
            groups, mode = self.collection.feature_groups, self.settings.sync_mode
            self._rows = make_rows(mode, self.layout, groups, cache, self.rates, self.upkeep)
            self.collection.read_from(self._rows)

    def _segment(self, count: int | None) -> Iterator[Batch]:
        """Train iterations with nothing in between."""
        self.runtime.start_segment(count)
        if self._rows is not None:
            previous = None
            while (job := self.runtime.begin()) is not None:
                if previous is not None:
                    self._report(previous)
                self._job = previous = job
                assert self._left_out is not None
                self._left_out.begin(job, self.settings.hot)
                with doing(Activity.COMPUTING):
                    yield self._part(job)
                self._finish_batch()
            self.runtime.finish_segment()
            if previous is not None:
                self._report(previous)
        else:
            self.runtime.finish_segment()

    def _finish_batch(self) -> None:
        """After rows and dense weights were stepped: hash the latter if it is time."""
        if self._job is not None:
            raise ConfigError("call step() after backward(), once for every batch")
        if self._replicas is not None and self._replicas.is_due(self.iteration) and self.is_summing:
            self.runtime.note_replicas(self._replicas.in_passing(self.iteration))

    def step(self, loss: Tensor | None = None) -> float | None:
        """Step this worker's rows and sum the dense gradients over all workers into ``.grad``.

        Returns the loss of the global batch where this rank's part of it is given. A worker that is left out
        has nothing to step: it gets None, and dense parameters without gradients.

        Raises:
            DivergedError: on every worker, in the same iteration, if a loss or gradient of any is not finite;
                those that are left out learn of it as stores do, by the loss of the others.
                That worker has stepped nothing, and nobody dense weights or replicated rows; others may have
                stepped rows of their own, and sent them on. The iteration cannot be finished, so it is never
                saved.
        """
        job, rows = self._job, self._rows
        if job is None or rows is None or self._replicas is None or self._batch is None:
            raise ConfigError("step() without a batch; call it once for every batch that batches() yields")
        job.seconds["compute"] += time.perf_counter() - self._compute_began
        taken = rows.take(job.plan.iteration, job.rows)
        if not self.is_summing:
            for one in self.model.parameters():
                one.grad = None
            self._job = None
            self.runtime.release_rows([])
            self.runtime.end()
            return None
        shared = self._dense.complete(loss)
        taken.write_replicated(shared.replicated)
        found = find_nonfinite(self.runtime, self.model, self._batch, loss, shared, taken)
        if found:
            shared.flag()
        self._dense.send_rest()
        began = time.perf_counter()
        buffered = [] if found else rows.step_own(taken, self.runtime.rank)
        stepped = time.perf_counter()
        # Only replicated rows wait for the dense sum: the others have stepped, or do so at their homes.
        is_released = not found and self.settings.hot is None
        if is_released:
            self.runtime.release_rows(buffered)
        self._dense.wait()
        job.seconds["all_reduce"] += time.perf_counter() - stepped
        if not is_finite(shared.total):
            assert self._left_out is not None
            raise_diverged(self.runtime, found, self._left_out.summing)
        self._dense.spread()
        rows.step_replicated(taken, shared.summed_replicated)
        job.seconds["compute"] += stepped - began
        if self._replicas.is_due(self.iteration + 1):
            self._replicas.hash_rows(self.iteration + 1, self.settings.hot)
        self._job = None
        if not is_released:
            self.runtime.release_rows(buffered)
        self.runtime.end()
        return shared.loss

    def sum_over_workers(self, values: Tensor) -> None:
        """Sum a tensor over the workers that take part in the iteration; on others it stays as it is."""
        if self.is_summing:
            if self._job is not None:
                self._dense.make_room()
            self.runtime.sum_over_workers(values).wait()

    def _report(self, job: Job) -> None:
        """Report an iteration that is finished, including its last pushes."""
        self.runtime.note_measures(job)
        self._on_iteration(job)

    def flushed(
        self, *, records_stay: bool = False, each: Callable[[Plan], None] = lambda plan: None
    ) -> RowMemory | None:
        """Copy the latest records of unsynchronised rows to their homes; return this rank's copies.

        A collective call, between two segments; None on a rank that stores nothing. It takes rows in slices:
        ``each`` is called with the plan of each. With ``records_stay`` rows whose latest record is on some
        worker stay there, see `flush_plan`.
        """
        runtime, settings, home = self.runtime, self.settings, self.runtime.mover.home
        slices = FlushSlices(settings.topology, settings.sizes, records_stay=records_stay)
        flushed = None if home is None else RowMemory(home.layout)
        plan = runtime.plan_at_rest(slices.next, "evaluate, save or count rows")
        while len(plan.keys):
            runtime.in_moves(partial(flush, plan=plan, rates=self.rates, flushed=flushed)).wait()
            each(plan)
            plan = runtime.feed.share(slices.next)
        return flushed

    def track_changes(self) -> None:
        """Note from now on which rows change, for deltas and `changed_since` of snapshots; on every rank."""
        mover, layout = self.runtime.mover, self.layout
        format = format_of(layout)
        if not isinstance(format, WholeRows) or not format.keyed_by_id:
            raise ConfigError("changes of pruned rows are not tracked; train without prune")
        if mover.changes is None:
            mover.changes = RowChanges(
                mover.rank,
                self.settings.topology,
                len(layout.specs),
                is_home=mover.home is not None,
                is_worker=mover.cache is not None,
            )

    def replicate(self, hot: HotRows) -> Plan:
        """Replicate these rows, and no others, on every worker; what is learned does not change.

        A collective call, between two segments, with the same rows on all ranks. Returns the plan of moves.
        """
        plan = self.runtime.plan_at_rest(lambda scheduler: replacing_plan(scheduler, hot), "replicate rows")
        self.runtime.in_moves(lambda mover: carry_out(mover, plan)).wait()
        self.settings = replace(self.settings, hot=hot if len(hot) else None)
        if (changes := self.runtime.mover.changes) is not None:
            held = plan.states != State.FRESH
            changes.note_moved(self.iteration, plan.tables[held], plan.keys[held])
            num_leaving = len(plan.evicted_keys) // self.settings.topology.num_workers  # as often as workers
            changes.note_moved(
                self.iteration, plan.evicted_tables[:num_leaving], plan.evicted_keys[:num_leaving]
            )
        return plan

    def catch_up(self) -> None:
        """Bring workers that were left out up to date; the next iteration leaves them out again.

        A collective call, between two segments. `evaluate` and `save_checkpoint` do it by themselves; call it
        before you read the model on every rank.
        """
        self.runtime.require_rest()
        if self._left_out is not None:
            self._left_out.catch_up_all(self.settings.hot)

    def compare_replicas(self, optimizer: Optimizer | None = None) -> None:
        """Compare dense weights, optimizer state and replicated rows between all workers but those left out.

        A collective call, between two segments. Workers also do this by themselves, every so often.

        Args:
            optimizer: of the dense weights, unless `distribute` has it.

        Raises:
            DisagreementError: on every rank if any differ; it names ranks and tensors.
        """
        self.runtime.meet("compare replicas")
        mine = None
        if self._replicas is not None and not (self._left_out and self._left_out.is_behind):
            mine = self._replicas.at_rest(self.iteration, self.settings.hot, optimizer)
        self.runtime.in_control(lambda control: compare_replicas(control, mine)).wait()

    def state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Return what this rank holds of the model, for `torch.distributed.checkpoint.save` on every rank.

        A collective call, between two segments, by stores, too. All ranks together have every row once, by
        key and with all steps applied; rank 0 also has dense weights and optimizer. `rowhaul.find_dcp` loads
        it on any number of ranks, `rowhaul.load_dcp` in one process. Training does not notice.

        Args:
            optimizer: of the dense weights, unless `distribute` has it.
        """
        from rowhaul.train.distributed import dcp  # late: it imports this module, and much of torch

        if self._job is not None:
            raise ConfigError("state_dict() within an iteration; call it between two calls of batches()")
        optimizer = optimizer or self._optimizer
        if optimizer is None:
            raise ConfigError(
                "state_dict() needs the optimizer of the dense weights: pass it, or give it to distribute()"
            )
        return dcp.state_of(self, optimizer)

    def held(self) -> tuple[int, int]:
        """Count the rows of the model, and bytes of rows and indexes on all ranks; a collective call."""
        cache, home, flushed = self.runtime.mover.cache, self.runtime.mover.home, self.flushed()
        groups = [*(cache.groups if cache else ()), *(home.groups if home else ())]
        num_rows = self.upkeep.count_rows(self.runtime, flushed)
        mine = np.array([num_rows, sum(group.allocated_bytes for group in groups)])
        gathered = self.runtime.in_control(lambda control: control.all_gather(mine.view(np.uint8))).wait()
        rows, num_bytes = np.ascontiguousarray(gathered).view(np.int64).sum(axis=0).tolist()
        return rows, num_bytes

    def close(self) -> None:
        """Stop the threads of this rank; the cluster stays joined."""
        error = sys.exc_info()[1]  # that this is called on the way out of
        try:
            if error is not None:
                self.runtime.give_up(error)
            elif self.runtime.failure.error is None and not self.runtime.is_closed:
                self.runtime.require_rest()
        finally:
            if self._rows is not None:
                self._dense.stop_overlapping()
            self.runtime.close()

    def _part(self, job: Job) -> Batch:
        assert job.samples is not None
        assert self._rows is not None
        self._compute_began = time.perf_counter()
        self._rows.expect(job.plan, job.rows)
        if self.is_summing:
            self._dense.begin(self._rows.replicated_size(job.rows), self.collection.feature_groups[0].dtype)
        batch = job.batch
        if batch is None:
            batch = own_batch(job.samples, job.plan.worker, self.runtime.rank)
        job.num_samples = len(batch)
        self._batch = batch.beside(self.collection.device)
        return self._batch
