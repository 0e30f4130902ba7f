"""The scheduler as one would write it on a board: dictionaries and sets, a row at a time, no tricks.

It exists to be compared with the real one, count by count, and shares nothing with it but the names of
the states and of the kinds of moves. A row is a pair (table, key), a sample a list of rows, a batch a
list of samples; an assignment names the worker of each sample.

What the description of the modes leaves open is read here as follows:

* The home's own worker (co-located) pulls and pushes for nothing, but a row that it does not hold itself
  is a miss, and its copies take room in its cache like all others.
* Every eviction, the free ones too, counts as touching the row.
* Dropping a clean or outdated copy, or a copy of a row that only others train now, moves nothing.
* All workers choose their victims in the directory as it is after the update pushes; then they hand them
  over in rank order.
* Replicated rows are never cached, fresh, kept out or forgotten.
* A row is forgotten when its last iteration is over: copies and what they owe are gone, and nothing moves.
"""

from __future__ import annotations

import abc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from naive_caches import NaiveCache

from naive_lifetimes import NaiveLifetimes
from rowhaul.schedule.lifetimes import RowPolicy
from rowhaul.schedule.plan import Kind
from rowhaul.schedule.row_states import State

Row = tuple[int, int]
Batch = Sequence[Sequence[Row]]


@dataclass(frozen=True)
class NaiveSettings:
    """What the oracle must know; ``home`` gives the rank of a row's store (a worker's, if co-located)."""

    num_workers: int
    home: Callable[[Row], int]
    values: tuple[int, ...] = (8,)  # tables: bytes of a row's values
    state: tuple[int, ...] = (4,)  # tables: bytes of its optimizer state
    capacity: tuple[int, ...] = ()  # workers; none: caches without bounds
    unit: Literal["rows", "bytes"] = "rows"
    policy: str = "lru"
    sync: str = "on-demand"
    peer_to_peer: bool = False
    first_touch: bool = True
    admit_after: int = 1
    policies: tuple[RowPolicy, ...] = ()  # tables; none: all as ``admit_after`` says
    look_ahead: int = 1
    hot: frozenset[Row] = frozenset()


@dataclass(frozen=True, order=True)
class NaiveMove:
    kind: Kind
    table: int
    key: int
    source: int
    target: int
    num_bytes: int
    ready: int
    after: bool = False  # the training of the iteration


@dataclass
class NaivePlan:
    iteration: int
    trainers: dict[Row, set[int]]
    states: dict[Row, State]  # before the iteration
    lookups: list[int]
    hits: list[int]
    evicted: list[set[Row]]
    all_reduce_rows: int
    all_reduce_bytes: int
    moves: Counter[NaiveMove] = field(default_factory=Counter)
    admitted: int = 0
    expired: set[Row] = field(default_factory=set)
    over_limit: set[Row] = field(default_factory=set)


@dataclass
class Entry:
    """Where one trained row is; an empty ``base`` means the home."""

    state: State = State.HOME
    latest: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    base: set[int] = field(default_factory=set)


class Naive(abc.ABC):
    """What all modes share: admission, lookups, the order of an iteration. Modes say what moves."""

    def __init__(
        self, settings: NaiveSettings, batches: Sequence[Batch], assignments: Sequence[Sequence[int]]
    ) -> None:
        self.settings, self.batches, self.assignments = settings, batches, assignments
        self.workers = range(settings.num_workers)
        capacities = settings.capacity or (10**9,) * settings.num_workers
        self.caches = [NaiveCache(capacity, settings.unit, settings.policy) for capacity in capacities]
        self.entries: dict[Row, Entry] = {}  # rows that were trained
        default = (RowPolicy(settings.admit_after),) * len(settings.values)
        self.lifetimes = NaiveLifetimes(settings.policies or default)
        self.lifetimes.exempt = set(settings.hot)
        self.before_forgetting: dict[Row, Entry] = {}  # what `entries` was when the last iteration had ended
        self.touched: dict[Row, int] = {}  # the last iteration that trained or evicted the row
        self.iteration = 0
        self.has_trained = False  # the iteration that is being planned

    def plan(self) -> NaivePlan:
        """Decide the next iteration and step to the boundary after it."""
        t, settings = self.iteration, self.settings
        trainers: defaultdict[Row, set[int]] = defaultdict(set)
        sightings: Counter[Row] = Counter()
        for sample, worker in zip(self.batches[t], self.assignments[t], strict=True):
            for row in set(sample):
                trainers[row].add(worker)
                sightings[row] += 1
        new = self.lifetimes.see(t, sightings)
        states = {row: self.state_of(row) for row in sorted(trainers)}
        replicated = [row for row, state in states.items() if state == State.REPLICATED]
        passive = (State.REPLICATED, State.NOT_ADMITTED)
        self.trained = {row: trainers[row] for row, state in states.items() if state not in passive}

        needs = [[row for row in states if w in trainers[row]] for w in self.workers]
        self.current = NaivePlan(
            iteration=t,
            trainers=dict(trainers),
            states=states,
            lookups=[len(rows) for rows in needs],
            hits=[
                sum(row in replicated or self.holds_latest(w, row) for row in needs[w]) for w in self.workers
            ],
            evicted=[set() for _ in self.workers],
            all_reduce_rows=len(replicated),
            all_reduce_bytes=sum(settings.values[table] for table, _ in replicated),
        )
        for row, workers in self.trained.items():
            self.before_training(row, workers, states[row])
        self.current.evicted = self.make_room(needs)
        for worker in self.workers:
            for row in sorted(self.current.evicted[worker]):
                self.evict(worker, row)
        self.has_trained = True
        for row, workers in self.trained.items():
            self.after_training(row, workers)
        self.has_trained = False
        self.touched.update((row, t) for rows in (self.trained, *self.current.evicted) for row in rows)
        self.current.admitted = len([row for row in new if not self.keeps_all(row)])
        self.before_forgetting = dict(self.entries)
        self.current.expired, self.current.over_limit = self.lifetimes.forget(t)
        for row in self.current.expired | self.current.over_limit:
            self.forget(row)
        self.iteration += 1
        return self.current

    def forget(self, row: Row) -> None:
        """As if it had never been; whatever is made of it from now on can only be made after this."""
        for cache in self.caches:
            cache.copies.pop(row, None)
        self.entries.pop(row, None)
        self.touched[row] = self.iteration

    def keeps_all(self, row: Row) -> bool:
        return self.lifetimes.policies[row[0]].keeps_all

    def state_of(self, row: Row) -> State:
        if row in self.settings.hot:
            return State.REPLICATED
        if not self.lifetimes.knows(row):
            return State.NOT_ADMITTED
        if row not in self.entries:
            return State.FRESH if self.settings.first_touch else State.HOME
        return self.entries[row].state

    def make_room(self, needs: list[list[Row]]) -> list[set[Row]]:
        """Bring the rows that each worker trains into its cache; return the rows evicted."""
        return [self.make_room_on(worker, self.trained.keys() & needs[worker]) for worker in self.workers]

    def make_room_on(self, worker: int, trained: set[Row]) -> set[Row]:
        cache = self.caches[worker]
        others = cache.copies.keys() - trained
        outdated = {row for row in others if self.is_outdated(worker, row)}
        size = {row: self.sizes(row)[1] for row in trained | others}
        next_use = {row: self.next_use(row) for row in others if self.next_use(row)}
        return set(cache.step(self.iteration, trained, others - outdated, outdated, size, next_use))

    def next_use(self, row: Row) -> int:
        """In how many iterations the window shows the row again; 0: it does not."""
        for distance in range(1, self.settings.look_ahead + 1):
            later = self.iteration + distance
            if later < len(self.batches) and any(row in sample for sample in self.batches[later]):
                return distance
        return 0

    def sizes(self, row: Row) -> tuple[int, int]:
        """Bytes of the values, also of a gradient, and of the whole record."""
        values = self.settings.values[row[0]]
        return values, values + self.settings.state[row[0]]

    def ready(self, row: Row) -> int:
        rests_since = self.touched.get(row, -1) + 1
        return max(rests_since, self.iteration - self.settings.look_ahead, 0)

    def move(self, kind: Kind, row: Row, source: int, target: int, num_bytes: int, ready: int) -> None:
        if source != target:
            move = NaiveMove(kind, *row, source, target, num_bytes, ready, self.has_trained)
            self.current.moves[move] += 1

    def push(self, kind: Kind, row: Row, worker: int, num_bytes: int, ready: int) -> None:
        self.move(kind, row, worker, self.settings.home(row), num_bytes, ready)

    def pull(self, row: Row, workers: Iterable[int], num_bytes: int, ready: int) -> None:
        for worker in workers:
            self.move(Kind.MISS_PULL, row, self.settings.home(row), worker, num_bytes, ready)

    def holds_latest(self, worker: int, row: Row) -> bool:
        return row in self.entries and worker in self.entries[row].latest

    def is_outdated(self, worker: int, row: Row) -> bool:
        """Of a row that the worker holds but does not train now."""
        entry = self.entries[row]
        return row in self.trained or worker not in entry.latest | entry.partial

    @abc.abstractmethod
    def before_training(self, row: Row, trainers: set[int], state: State) -> None:
        """What moves because these workers are about to train a row."""

    @abc.abstractmethod
    def evict(self, worker: int, row: Row) -> None:
        """What moves because a worker gives its copy up."""

    @abc.abstractmethod
    def after_training(self, row: Row, trainers: set[int]) -> None:
        """The state that training leaves a row in, and what moves at once."""
