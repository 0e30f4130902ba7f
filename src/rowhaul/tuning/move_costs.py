"""Measures the time of moving rows, and of summing them over the workers, at several sizes.

The trials use the code and the groups of training, on separate memory in which rows are as far apart as in
a large table. They start small and grow until their share of time is used up; then all sizes of both kinds
alternate, so that a temporary slowdown of the machine affects each of them. The slowest rank of a trial
counts, and the best trial of a size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job, Mover
from rowhaul.runtime.phases import RankPhases
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.sync import make_sync
from rowhaul.schedule.topology import Topology
from rowhaul.store.keyed import locate
from rowhaul.store.packing import RowNames
from rowhaul.transport.base import Collective, Links

FIRST_ROWS, GROWTH = 8, 4  # of a trial, for each pair of ranks
MOST_BYTES = 4 << 20  # of a rank in one trial
TRIALS = 6  # of each size
GROWING = 2  # of these, the first, decide whether there is time for a larger size
SPREAD_ROWS, SPREAD_BYTES = 1 << 17, 64 << 20  # among which the rows of a trial are
LEAST_SIZES = 3  # always measured: two numbers are fitted

_Make = Callable[[int, int], tuple[Plan, Callable[[], None]]]  # rows and number of a trial -> plan, call


@dataclass(frozen=True)
class Timed:
    """A trial: a plan, and the time of carrying it out."""

    plan: Plan
    seconds: float
    cpu_seconds: float  # of all ranks together


@dataclass(frozen=True)
class CollectiveTimes:
    """The measured times; the same on all ranks."""

    moves: tuple[Timed, ...]  # every worker pushes gradients to every home, which steps, and pulls the rows
    sums: tuple[Timed, ...]  # replicated rows are summed over all workers, and stepped by each


def measure_collectives(
    topology: Topology,
    layout: TableLayout,
    links: Links,
    dense: Collective | None,
    control: Collective,
    *,
    seconds: float = 3.0,
) -> CollectiveTimes:
    """Time moves and sums of several sizes; all ranks call this together, while nothing else runs.

    Args:
        topology: workers and stores.
        layout: the tables; trials use rows of the first.
        links: for the moves.
        dense: the group of all workers; None on a store.
        control: the group of all ranks.
        seconds: for each of the two kinds, about.
    """
    rank = links.rank
    record, values = layout.sizes().records[0], layout.sizes().values[0]
    per_rank = max(topology.num_workers, topology.num_shards)
    most_needed = FIRST_ROWS * GROWTH ** (LEAST_SIZES - 1)  # of a trial, for each pair of ranks
    num_rows = max(min(SPREAD_ROWS, SPREAD_BYTES // record), per_rank * most_needed)
    worker, home = rank < topology.num_workers, topology.colocated or rank >= topology.num_workers
    cache, stored = (RowMemory(layout) if one else None for one in (worker, home))
    for memory in (cache, stored):
        if memory is not None:  # more rows than any processor's cache holds
            memory.make(np.zeros(num_rows, np.int32), np.arange(num_rows))
    mover = Mover(rank, links, make_sync("on-demand"), lambda iteration: 0.0, cache, stored)

    def move(count: int, number: int) -> tuple[Plan, Callable[[], None]]:
        plan = _moving_plan(topology, _keys(num_rows, count * topology.num_shards, number), values)

        def carry_out() -> None:
            if cache is not None:
                _buffer_gradients(cache, plan, rank)
            mover.late(Job(plan, RankPhases(plan, rank)))
            mover.wait_sent()

        return plan, carry_out

    def sum_up(count: int, number: int) -> tuple[Plan, Callable[[], None]]:
        keys = _keys(num_rows, count * per_rank, number)
        nothing = _moving_plan(topology, keys[:0], values).moves
        plan = _plan(topology, nothing, len(keys), len(keys) * layout.sizes().summed[0])
        if dense is None or cache is None:
            return plan, lambda: None
        return plan, _summing(cache, dense, keys)

    # Rows of one trial differ, and are few among all.
    most_rows = min(num_rows // (2 * per_rank), MOST_BYTES // (record * per_rank))
    most_rows = max(most_rows, most_needed)
    tried = [_grow(control, seconds, make, most_rows) for make in (move, sum_up)]
    for _ in range(TRIALS - GROWING):
        for one in chain(*tried):
            one.run(control)
    return CollectiveTimes(*(tuple(map(_Tried.best, sizes)) for sizes in tried))


def _keys(num_rows: int, count: int, number: int) -> npt.NDArray[np.int64]:
    """Choose rows for a trial, ordered by key as in a plan; the same on all ranks."""
    chosen = np.random.default_rng(number).choice(num_rows, count, replace=False)
    return np.sort(chosen).astype(np.int64)


@dataclass
class _Tried:
    """The trials of one size."""

    plan: Plan
    calls: Sequence[Callable[[], None]]  # one for each trial
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def run(self, control: Collective) -> None:
        """Make the next trial: record the seconds of the slowest rank, and the CPU seconds of all."""
        control.all_gather(np.zeros(1, np.uint8))  # a barrier
        began, cpu_began = time.perf_counter(), time.process_time()
        self.calls[len(self.seconds)]()
        mine = np.array([time.perf_counter() - began, time.process_time() - cpu_began])
        everyone = control.all_gather(mine.view(np.uint8)).view(np.float64)
        self.seconds.append(float(everyone[:, 0].max()))
        self.cpu_seconds.append(float(everyone[:, 1].sum()))

    def best(self) -> Timed:
        """Return the best times."""
        return Timed(self.plan, min(self.seconds), min(self.cpu_seconds))


def _grow(control: Collective, seconds: float, make: _Make, most_rows: int) -> list[_Tried]:
    """Try each size for which there is time a few times."""
    sizes: list[_Tried] = []
    count, spent = FIRST_ROWS, 0.0
    while count <= most_rows:
        make(count, TRIALS)[1]()  # compiles kernels, and chooses how to sum
        plans, calls = zip(*(make(count, number) for number in range(TRIALS)), strict=True)
        sizes.append(_Tried(plans[0], calls))
        for _ in range(GROWING):
            sizes[-1].run(control)
        spent += TRIALS * min(sizes[-1].seconds)
        if len(sizes) >= LEAST_SIZES and spent * GROWTH > seconds:
            break
        count *= GROWTH
    return sizes


def _summing(cache: RowMemory, dense: Collective, keys: npt.NDArray[np.int64]) -> Callable[[], None]:
    """Return a call that sums replicated rows and steps each, as a worker does."""
    number, position = cache.place_of(0)
    group = cache.groups[number]
    positions = np.full(len(keys), position)
    part = np.zeros((len(keys), group.dim), group.dtype)

    def step() -> None:
        buffer = torch.zeros(part.size, dtype=torch.from_numpy(part).dtype)
        buffer.numpy().reshape(part.shape)[:] = part
        dense.sum_in_rank_order(buffer)
        gradients, rows = buffer.numpy().reshape(part.shape), RowNames(positions, keys)
        group.update(locate(group, positions, keys), gradients, 0.0, 1, rows)

    return step


def _buffer_gradients(cache: RowMemory, plan: Plan, rank: int) -> None:
    """Buffer the gradients that a worker pushes, as training does."""
    mine = np.flatnonzero((plan.moves.source == rank) & (plan.moves.kind == Kind.UPDATE_PUSH))
    number, position = cache.place_of(0)
    gradients = np.zeros((len(mine), cache.groups[number].dim), cache.groups[number].dtype)
    cache.buffer_gradients(number, np.full(len(mine), position), plan.moves.key[mine], rank, gradients, 0)


def _moving_plan(topology: Topology, keys: npt.NDArray[np.int64], values: int) -> Plan:
    """Plan a step of rows that all workers have trained: push gradients to the homes, step, pull the values.

    The homes are all ranks that store, in turn.
    """
    stores = np.arange(topology.first_store, topology.first_store + topology.num_shards)
    workers = np.arange(topology.num_workers)
    homes = np.resize(stores, len(keys))
    worker, row = (grid.reshape(-1) for grid in np.meshgrid(workers, np.arange(len(keys)), indexing="ij"))
    apart = worker != homes[row]
    worker, row = worker[apart], row[apart]
    pushed = np.arange(2 * len(row)) < len(row)
    both = len(pushed)
    moves = Moves(
        np.where(pushed, Kind.UPDATE_PUSH, Kind.MISS_PULL).astype(np.uint8),
        np.where(pushed, Payload.GRADIENT, Payload.VALUES).astype(np.uint8),
        np.zeros(both, np.int32),
        np.tile(keys[row], 2),
        np.concatenate([worker, homes[row]]).astype(np.int16),
        np.concatenate([homes[row], worker]).astype(np.int16),
        np.full(both, values, np.int64),
        np.zeros(both, np.int32),
        np.zeros(both, np.uint8),
        (~pushed).astype(np.uint8),
    )
    all_workers = np.uint64(2**topology.num_workers - 1)
    own = np.where(homes < topology.num_workers, np.uint64(1) << homes.astype(np.uint64), np.uint64(0))
    contributors = all_workers & ~own
    stepped = np.flatnonzero(contributors)
    steps = Steps(
        table=np.zeros(len(stepped), np.int32),
        key=keys[stepped],
        rank=homes[stepped].astype(np.int16),
        contributors=contributors[stepped],
        trained=np.zeros(len(stepped), np.int32),
        ready=np.zeros(len(stepped), np.int32),
        after=np.zeros(len(stepped), np.uint8),
        by_peer=np.zeros(len(stepped), np.uint8),
    )
    return _plan(topology, moves, steps=steps)


def _plan(
    topology: Topology, moves: Moves, summed_rows: int = 0, summed_bytes: int = 0, steps: Steps | None = None
) -> Plan:
    nobody: npt.NDArray[np.int64] = np.zeros(topology.num_workers, np.int64)
    return Plan(
        iteration=0,
        num_workers=topology.num_workers,
        worker=np.zeros(0, np.int32),
        tables=np.zeros(0, np.int32),
        keys=np.zeros(0, np.int64),
        trainers=np.zeros(0, np.uint64),
        states=np.zeros(0, np.uint8),
        moves=moves,
        lookups=nobody,
        hits=nobody,
        all_reduce_rows=summed_rows,
        all_reduce_bytes=summed_bytes,
        evicted_from=np.zeros(0, np.int16),
        evicted_tables=np.zeros(0, np.int32),
        evicted_keys=np.zeros(0, np.int64),
        steps=steps,
    )
