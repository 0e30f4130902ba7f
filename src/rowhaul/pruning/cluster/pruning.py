"""A pruning on a cluster, between two segments: all ranks call it together.

Workers tell one rank what they have seen of the usefulness of rows: a number, in a few bits, and two bytes
for each chunk that a row has, of every row they trained since the last time. That rank decides for all what
one process would; the others hear of the chunks that change, a few bits each. One rank of a host tells the
rest of it which chunks nobody has any more: whoever holds something of them, a record or a gradient, drops
it. Nothing else moves, and caches stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.cluster import homecoming
from rowhaul.pruning.cluster.coding import Told, decode_told, encode_told
from rowhaul.pruning.cluster.narrowing import narrow
from rowhaul.pruning.cluster.utility_log import UtilityLog
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool.shrink import best_columns
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.pruning.timing import next_stop
from rowhaul.runtime.layout import Upkeep
from rowhaul.runtime.mover import Mover
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
    num_rows: int  # kept track of, afterwards
    num_chunks: int  # held, afterwards
    capacity: int  # chunks that may be held
    told_bytes: int  # sent by workers to say what was useful
    decision_bytes: int  # sent to other hosts, and kept in one of them
    seconds: float

    def text(self) -> str:
        """A line for the log."""
        changed = self.num_evicted + self.num_admitted + self.num_forgotten
        each = f", {8 * self.decision_bytes / changed:.1f} bits each" if changed else ""
        return (
            f"pruned after step {self.iteration:,}: {self.num_evicted:,} chunks left, {self.num_admitted:,} "
            f"came, {self.num_forgotten:,} rows were forgotten ({self.decision_bytes:,} bytes tell "
            f"which{each}); {self.num_rows:,} rows hold {self.num_chunks:,} of {self.capacity:,} chunks. "
            f"{self.told_bytes:,} bytes of utilities were sent, in {self.seconds * 1e3:.0f} ms"
        )


class ClusterPruning(Upkeep):
    """The part of one rank in prunings.

    Args:
        layout: of the tables.
        trains: whether this rank is a worker.
    """

    def __init__(self, layout: ChunkLayout, *, trains: bool) -> None:
        self.layout: ChunkLayout = layout
        self.num_chunks = layout.num_chunks
        columns = (len(layout.rows), layout.rows[0].dim) if layout.awaits_columns else (0, 0)
        self.utility_log = UtilityLog(layout.num_chunks, layout.pruning.decay, columns) if trains else None
        self.latest: PruneNote | None = None

    def until_next(self, iteration: int) -> int:
        """Iterations before rows may be pruned next, or before columns are chosen; at least one."""
        until = next_stop(self.layout.pruning, iteration) - iteration
        if self.layout.awaits_columns and iteration < self.layout.pruning.cold_start:
            until = min(until, self.layout.pruning.cold_start - iteration)
        return until

    def run(self, runtime: Runtime, topology: Topology) -> list[PruneNote]:
        """Choose columns and prune, as far as it is time; a collective call."""
        self.narrow(runtime)
        return [self.prune(runtime, topology)] if self.is_due(runtime) else []

    def is_due(self, runtime: Runtime) -> bool:
        """Whether rows are to be pruned now, where they may be; a collective call."""
        now = runtime.iteration
        if next_stop(self.layout.pruning, now - 1) != now:
            return False
        found = runtime.feed.at_rest(lambda scheduler: _chunked(scheduler).look())
        if now % self.layout.pruning.period == 0:
            return True
        return any(one for (one,) in _gathered(runtime, [bool(found)]))

    def narrow(self, runtime: Runtime) -> bool:
        """Choose columns, if it is time, and drop the others; a collective call."""
        if not self.layout.awaits_columns or runtime.iteration < self.layout.pruning.cold_start:
            return False
        plan = runtime.feed.share(lambda scheduler: _chunked(scheduler).bring_home())
        runtime.in_moves(lambda mover: homecoming.carry_out(mover, plan)).wait()
        columns = best_columns(self.squares(runtime), self.layout.columns_to_keep)
        self.layout = layout = self.layout.narrowed(columns)
        if self.utility_log is not None:
            self.utility_log.squares = np.zeros((0, 0))
        runtime.in_moves(lambda mover: narrow(mover, layout)).wait()
        runtime.feed.at_rest(lambda scheduler: _chunked(scheduler).narrow(layout))
        return True

    def squares(self, runtime: Runtime) -> npt.NDArray[np.float64]:
        """Of gradients, by table and column, summed over workers in rank order; a collective call."""
        shape = len(self.layout.rows), self.layout.rows[0].dim if self.layout.awaits_columns else 0
        mine = self.utility_log.squares if self.utility_log is not None else np.zeros(shape)
        flat = np.ascontiguousarray(mine).reshape(-1)
        total = np.zeros(shape)
        if total.size:
            every = runtime.in_control(lambda control: control.all_gather(flat.view(np.uint8))).wait()
            for one in np.ascontiguousarray(every).view(np.float64):
                total += one.reshape(shape)
        return total

    def prune(self, runtime: Runtime, topology: Topology) -> PruneNote:
        """Prune after the iterations trained so far; a collective call."""
        began, now = time.perf_counter(), runtime.iteration
        told, sizes, leaders = self._tell(runtime, now)
        if self.utility_log is not None:
            self.utility_log.clear()
        mine = b""
        if runtime.rank == leaders[0]:
            decided = runtime.feed.at_rest(lambda scheduler: _decide(_chunked(scheduler), told, now))
            assert decided is not None
            mine = decided
        length = _gathered(runtime, [len(mine)])[leaders[0]][0]
        decision = _from_first(runtime, leaders, mine, length)
        plan = runtime.feed.share(lambda scheduler: _chunked(scheduler).prune(decision))
        assert plan.forgotten_keys is not None
        runtime.in_moves(lambda mover: _change(mover, plan, topology)).wait()
        num_rows, num_held, capacity = _gathered(runtime, self._facts(runtime))[leaders[0]]
        self.latest = PruneNote(
            now,
            len(plan.forgotten_keys),
            len(plan.keys),
            plan.num_expired,
            num_rows,
            num_held,
            capacity,
            sum(size for rank, size in enumerate(sizes) if rank != leaders[0]),
            length,
            time.perf_counter() - began,
        )
        return self.latest

    def saved_rows(self, runtime: Runtime) -> LiveRows:
        """All rows that are kept track of, with utilities as of now; a collective call, nothing changes."""
        now = runtime.iteration
        told, _, leaders = self._tell(runtime, now)
        total = np.zeros((0, self.num_chunks), np.float32)
        if runtime.rank == leaders[0]:
            found = runtime.feed.at_rest(lambda scheduler: _chunked(scheduler).chunks.total(told, now))
            assert found is not None
            total = found
        length = _gathered(runtime, [total.nbytes])[leaders[0]][0]
        data = _from_first(runtime, leaders, total.tobytes(), length)
        plan = runtime.feed.share(lambda scheduler: _with_rows(_chunked(scheduler), data))
        assert plan.live is not None
        return plan.live

    def _tell(self, runtime: Runtime, now: int) -> tuple[list[Told], list[int], list[int]]:
        """What workers have seen, by rank, where it is decided; bytes of each; and who leads a host."""
        mine = encode_told(*self.utility_log.told(now)) if self.utility_log is not None else b""
        leads = runtime.feed.at_rest(lambda scheduler: True) is not None
        gathered = _gathered(runtime, [len(mine), leads])
        leaders = [rank for rank, (_, is_leader) in enumerate(gathered) if is_leader]
        sizes = [size for size, _ in gathered]
        data = np.frombuffer(mine, np.uint8).copy()
        come = runtime.in_moves(lambda mover: _collect(mover, leaders[0], data, sizes)).wait()
        return [decode_told(come[rank].tobytes(), self.num_chunks) for rank in sorted(come)], sizes, leaders

    def count_rows(self, runtime: Runtime, flushed: RowMemory | None) -> int:
        """Count the rows that are kept track of, on rank 0, and 0 on others; a collective call."""
        every = _gathered(runtime, self._facts(runtime))
        most = max(numbers[0] for numbers in every)
        return most if runtime.rank == 0 else 0

    def _facts(self, runtime: Runtime) -> list[int]:
        """Rows, chunks held and chunks that may be, where they are known."""
        found = runtime.feed.at_rest(lambda scheduler: _facts(_chunked(scheduler)))
        return found if found is not None else [0, 0, 0]


def _chunked(scheduler: Scheduler) -> ChunkScheduler:
    assert isinstance(scheduler, ChunkScheduler)
    return scheduler


def _decide(scheduler: ChunkScheduler, told: list[Told], now: int) -> bytes:
    scheduler.chunks.learn(told, now)
    return scheduler.chunks.decide(now)


def _facts(scheduler: ChunkScheduler) -> list[int]:
    chunks = scheduler.chunks
    return [chunks.num_entries, chunks.num_held, chunks.room.num_chunks]


def _with_rows(scheduler: ChunkScheduler, utilities: bytes) -> Plan:
    """A plan of nothing that names all rows."""
    chunks = scheduler.chunks
    numbers = np.frombuffer(utilities, np.float32).reshape(-1, chunks.num_chunks)
    return scheduler.nothing(chunks.rows(numbers))


def _gathered(runtime: Runtime, numbers: list[int]) -> list[list[int]]:
    """Some whole numbers of every rank."""
    mine = np.array(numbers, np.int64)
    every = runtime.in_control(lambda control: control.all_gather(mine.view(np.uint8))).wait()
    gathered: list[list[int]] = np.ascontiguousarray(every).view(np.int64).tolist()
    return gathered


def _collect(mover: Mover, target: int, data: Bytes, sizes: list[int]) -> dict[int, Bytes]:
    """Bring what ranks have to tell to one of them; what is its own it has."""
    if mover.rank != target:
        if len(data):
            mover.links.post({}, {target: data}).wait_sent()
        return {}
    come: dict[int, Bytes] = {
        rank: np.empty(size, np.uint8) for rank, size in enumerate(sizes) if size and rank != target
    }
    if come:
        mover.links.post(come, {}).wait_received()
    if len(data):
        come[target] = data
    return come


def _from_first(runtime: Runtime, leaders: list[int], mine: bytes, length: int) -> bytes:
    """What the first of some ranks has, on all of them; nothing on other ranks."""
    if runtime.rank not in leaders or length == 0:
        return b""

    def tell(mover: Mover) -> bytes:
        if mover.rank == leaders[0]:
            sends: Mapping[int, Any] = dict.fromkeys(leaders[1:], np.frombuffer(mine, np.uint8).copy())
            if sends:
                mover.links.post({}, sends).wait_sent()
            return mine
        data = np.empty(length, np.uint8)
        mover.links.post({leaders[0]: data}, {}).wait_received()
        return data.tobytes()

    return runtime.in_moves(tell).wait()


def _change(mover: Mover, plan: Plan, topology: Topology) -> None:
    """Forget chunks wherever they are, and make others at their home."""
    assert plan.forgotten_tables is not None
    assert plan.forgotten_keys is not None
    for memory in (mover.cache, mover.home):
        if memory is not None:
            memory.forget(plan.forgotten_tables, plan.forgotten_keys)
    if mover.home is None:
        return
    here = homes_of(plan.tables, plan.keys, topology) == mover.rank
    mover.home.make(plan.tables[here], plan.keys[here])
