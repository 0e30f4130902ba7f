"""A pruning on a cluster, between two segments: all ranks call it together.

Every host has a map of chunks, read from the same ids, and decides by itself: the same as the others, and as
one process. Its leader tells the ranks of the host which chunks are dropped and which are made anew; nothing
else moves, and caches stay warm. Where utilities are of gradients, workers first report to the leaders what
they have measured since the last pruning: a number in a few bits and two bytes for each chunk, of every row
they trained.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import Activity, doing
from rowhaul.pruning.cluster.utility_log import Report, UtilityLog, decode_report, encode_report
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.narrowing import best_columns, narrow_rank
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.layout import MaintainedTraining, Upkeep
from rowhaul.runtime.mover import Job, Mover
from rowhaul.runtime.phases import RankPhases
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import Plan, Scheduler, Topology, homes_of
from rowhaul.schedule.plan import LiveRows
from rowhaul.transport.base import Bytes


@dataclass(frozen=True)
class PruneNote:
    """What one pruning did and took; the same on all ranks, but for the seconds."""

    iteration: int
    num_evicted: int  # chunks
    num_admitted: int
    num_forgotten: int  # rows
    num_rows: int  # tracked, afterwards
    num_chunks: int  # held, afterwards
    capacity: int  # chunks that may be held
    report_bytes: int  # sent by workers, where utilities are of gradients
    seconds: float

    def text(self) -> str:
        """A line for the log."""
        sent = f"; {self.report_bytes:,} bytes of utilities were sent" if self.report_bytes else ""
        return (
            f"pruned after step {self.iteration:,}: {self.num_evicted:,} chunks evicted, "
            f"{self.num_admitted:,} admitted, {self.num_forgotten:,} rows forgotten; {self.num_rows:,} rows "
            f"hold {self.num_chunks:,} of {self.capacity:,} chunks{sent} ({self.seconds * 1e3:.0f} ms)"
        )


class ClusterPruning(Upkeep):
    """The part of one rank in prunings.

    Args:
        layout: of the tables.
        trains: whether this rank is a worker.
    """

    def __init__(self, layout: ChunkLayout, *, trains: bool) -> None:
        self.layout: ChunkLayout = layout
        settings = layout.pruning
        self.utility_log: UtilityLog | None = None  # of a worker, where utilities are of gradients
        if trains and not settings.by_access:
            self.utility_log = UtilityLog(layout.num_chunks, settings.decay_of_step)
        # Of gradients that this worker has seen, by table and column, until columns are chosen.
        self.squares = np.zeros((len(layout.rows), layout.rows[0].dim if layout.awaits_columns else 0))
        self.latest: PruneNote | None = None

    def until_next(self, iteration: int) -> int:
        """Iterations before rows may be pruned next, or before columns are chosen; at least one."""
        until = self.layout.pruning.next_stop(iteration) - iteration
        if self.layout.awaits_columns and iteration < self.layout.pruning.cold_start:
            until = min(until, self.layout.pruning.cold_start - iteration)
        return until

    def run(self, training: MaintainedTraining) -> list[PruneNote]:
        """Choose columns and prune, as far as it is time; a collective call."""
        runtime = training.runtime
        self.narrow(runtime)
        return [self.prune(runtime, training.settings.topology)] if self.is_due(runtime) else []

    def is_due(self, runtime: Runtime) -> bool:
        """Whether rows are to be pruned now; a collective call."""
        now = runtime.iteration
        if not self.layout.pruning.is_stop(now):
            return False
        found = runtime.feed.at_rest(lambda scheduler: _chunked(scheduler).look())
        if now % self.layout.pruning.period == 0:
            return True
        return any(one for (one,) in _gathered(runtime, [bool(found)]))

    def narrow(self, runtime: Runtime) -> None:
        """Choose columns, if it is time, and drop the others; a collective call."""
        if not self.layout.awaits_columns or runtime.iteration < self.layout.pruning.cold_start:
            return
        plan = runtime.feed.share(lambda scheduler: _chunked(scheduler).bring_home())
        runtime.in_moves(lambda mover: _go_home(mover, plan)).wait()
        columns = best_columns(self.summed_squares(runtime), self.layout.columns_to_keep)
        self.layout = layout = self.layout.narrowed(columns)
        self.squares = np.zeros((len(layout.rows), 0))
        runtime.in_moves(lambda mover: narrow_rank(mover, layout)).wait()
        runtime.feed.at_rest(lambda scheduler: _chunked(scheduler).narrow(layout))

    def summed_squares(self, runtime: Runtime) -> npt.NDArray[np.float64]:
        """Squares of gradients by table and column, summed over ranks in order; a collective call."""
        total = np.zeros(self.squares.shape)
        if total.size:
            flat = np.ascontiguousarray(self.squares).reshape(-1)
            every = runtime.in_control(lambda control: control.all_gather(flat.view(np.uint8))).wait()
            for one in np.ascontiguousarray(every).view(np.float64):
                total += one.reshape(total.shape)
        return total

    def prune(self, runtime: Runtime, topology: Topology) -> PruneNote:
        """Prune after the iterations trained so far; a collective call."""
        began, now = time.perf_counter(), runtime.iteration
        reports, num_bytes = self._report(runtime, now)
        if self.utility_log is not None:
            self.utility_log.clear()
        plan = runtime.feed.share(lambda scheduler: _prune(_chunked(scheduler), reports, now))
        assert plan.forgotten_keys is not None
        runtime.in_moves(lambda mover: _change(mover, plan, topology)).wait()
        num_rows, num_held, capacity = self._facts(runtime)
        self.latest = PruneNote(
            iteration=now,
            num_evicted=len(plan.forgotten_keys),
            num_admitted=len(plan.keys),
            num_forgotten=plan.num_expired,
            num_rows=num_rows,
            num_chunks=num_held,
            capacity=capacity,
            report_bytes=num_bytes,
            seconds=time.perf_counter() - began,
        )
        return self.latest

    def saved_rows(self, runtime: Runtime) -> LiveRows:
        """All tracked rows with their utilities; a collective call, nothing changes."""
        now = runtime.iteration
        reports, _ = self._report(runtime, now)
        plan = runtime.feed.share(lambda scheduler: _with_rows(_chunked(scheduler), reports, now))
        assert plan.live is not None
        return plan.live

    def count_rows(self, runtime: Runtime, flushed: RowMemory | None) -> int:
        """Count tracked rows on rank 0, and 0 on others; a collective call."""
        most = self._facts(runtime)[0]
        return most if runtime.rank == 0 else 0

    def _facts(self, runtime: Runtime) -> list[int]:
        """Tracked rows, chunks held and chunks that may be held; a collective call."""

        def facts(scheduler: Scheduler) -> list[int]:
            chunks = _chunked(scheduler).map
            return [chunks.num_entries, chunks.num_held, chunks.room.num_chunks]

        return max(_gathered(runtime, runtime.feed.at_rest(facts) or [0, 0, 0]))

    def _report(self, runtime: Runtime, now: int) -> tuple[list[Report], int]:
        """Collect what workers have measured, by rank, where there is a map; and the bytes sent."""
        if self.layout.pruning.by_access:
            return [], 0
        mine = encode_report(*self.utility_log.report(now)) if self.utility_log is not None else b""
        leads = runtime.feed.at_rest(lambda scheduler: True) is not None
        gathered = _gathered(runtime, [len(mine), leads])
        leaders = [rank for rank, (_, is_leader) in enumerate(gathered) if is_leader]
        sizes = [size for size, _ in gathered]
        data = np.frombuffer(mine, np.uint8).copy()
        received = runtime.in_moves(lambda mover: _exchange(mover, leaders, data, sizes)).wait()
        num_bytes = sum(size for leader in leaders for rank, size in enumerate(sizes) if rank != leader)
        every = (received[rank].tobytes() for rank in sorted(received))
        return [decode_report(one, self.layout.num_chunks) for one in every], num_bytes


def _chunked(scheduler: Scheduler) -> ChunkScheduler:
    assert isinstance(scheduler, ChunkScheduler)
    return scheduler


def _prune(scheduler: ChunkScheduler, reports: list[Report], now: int) -> Plan:
    for numbers, utilities in reports:
        scheduler.map.entries.add_sums(numbers.astype(np.int64), utilities, now)
    return scheduler.prune()


def _with_rows(scheduler: ChunkScheduler, reports: list[Report], now: int) -> Plan:
    """A plan of nothing that names all rows, by (table, key)."""
    entries, rows = scheduler.map.entries, scheduler.map.rows()
    order = np.lexsort((rows.keys, rows.tables))
    tables, keys, numbers = rows.tables[order], rows.keys[order], rows.numbers[order]
    present, utilities, touched = entries.saved(numbers)
    if not scheduler.map.settings.by_access:
        total = np.zeros((entries.arena.numbering[0], entries.num_chunks), np.float32)
        total[numbers] = entries.utilities(numbers, now)
        for some, measured in reports:
            total[some] += measured
        utilities, touched = total[numbers], np.full(len(numbers), now, np.int32)
    nothing = np.zeros(len(numbers), np.int32)
    live = LiveRows(
        tables.astype(np.int32), keys, numbers.astype(np.int32), nothing, present, utilities, touched
    )
    return scheduler.nothing(live)


def _gathered(runtime: Runtime, numbers: list[int]) -> list[list[int]]:
    """Some whole numbers of every rank."""
    mine = np.array(numbers, np.int64)
    every = runtime.in_control(lambda control: control.all_gather(mine.view(np.uint8))).wait()
    gathered: list[list[int]] = np.ascontiguousarray(every).view(np.int64).tolist()
    return gathered


def _exchange(mover: Mover, targets: list[int], data: Bytes, sizes: list[int]) -> dict[int, Bytes]:
    """Send what this rank has to some ranks; on these, what all have."""
    received: dict[int, Bytes] = {}
    if mover.rank in targets:
        received = {
            rank: np.empty(size, np.uint8) for rank, size in enumerate(sizes) if size and rank != mover.rank
        }
    sends: Mapping[int, Any] = {target: data for target in targets if len(data) and target != mover.rank}
    if received or sends:
        posted = mover.links.post(received, sends)
        with doing(Activity.AWAITING_ROWS):
            posted.wait_received()
            posted.wait_sent()
    if mover.rank in targets and len(data):
        received[mover.rank] = data
    return received


def _go_home(mover: Mover, plan: Plan) -> None:
    """Send the rows of one rank home for good, and empty its cache; all ranks call it together."""
    job = Job(plan, RankPhases(plan, mover.rank))
    mover.late(job)
    mover.wait_sent()
    if mover.cache is not None:
        mover.cache.clear()


def _change(mover: Mover, plan: Plan, topology: Topology) -> None:
    """Drop chunks wherever they are, and make others at their home."""
    assert plan.forgotten_tables is not None
    assert plan.forgotten_keys is not None
    for memory in (mover.cache, mover.home):
        if memory is not None:
            memory.forget(plan.forgotten_tables, plan.forgotten_keys)
    if mover.home is None:
        return
    here = homes_of(plan.tables, plan.keys, topology) == mover.rank
    mover.home.make(plan.tables[here], plan.keys[here])
