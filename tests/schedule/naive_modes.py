"""What moves in each synchronisation mode, for the oracle in `naive`: `OnDemand` is the table, line by line.

Bounded staleness is read as follows. A pull sees what was pushed before it at the start of the iteration,
so it travels early only if nobody pushes the row then. Pushes of evicted updates count from the next
iteration on. A pull brings the record, so that the copy can step by itself; a push brings a gradient. A
copy is outdated when others have trained the row since its worker did; with a bound of 0,
which is full synchronisation, also when they trained it at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from naive import Batch, Entry, Naive, NaivePlan, NaiveSettings, Row

from rowhaul.schedule.plan import Kind
from rowhaul.schedule.row_states import State


class OnDemand(Naive):
    """The table: a row moves when another worker needs it, or when its holder needs the room."""

    def before_training(self, row: Row, trainers: set[int], state: State) -> None:
        entry = self.entries.setdefault(row, Entry())
        (values, record), ready = self.sizes(row), self.ready(row)
        pulled = record if len(trainers) == 1 else values
        carrier = min(entry.partial & entry.base, default=None)  # of the record from before the step
        entry.base = set()
        if state == State.HOME:
            self.pull(row, trainers - entry.latest, pulled, ready)
        elif state == State.OWNED:
            (owner,) = entry.latest
            if trainers != {owner} and self.settings.peer_to_peer:
                self.send(row, owner, trainers)
            elif trainers != {owner}:
                self.push(Kind.UPDATE_PUSH, row, owner, record, ready)
                self.pull(row, trainers - {owner}, pulled, ready)
        elif state == State.SPLIT:
            if self.settings.peer_to_peer and not entry.settled and carrier is not None:
                for worker in entry.partial:
                    self.move(Kind.PEER_SEND, row, worker, carrier, values, ready)
                self.send(row, carrier, trainers)
            else:
                for worker in entry.partial:
                    num_bytes = values + (record if worker == carrier else 0)
                    self.push(Kind.UPDATE_PUSH, row, worker, num_bytes, ready)
                self.pull(row, trainers, pulled, ready)

    def send(self, row: Row, holder: int, trainers: set[int]) -> None:
        """The holder of the latest record gives it to its peers; somebody who trains keeps all of it."""
        values, record = self.sizes(row)
        keeper = holder if holder in trainers else min(trainers)
        for worker in trainers:
            num_bytes = record if worker == keeper else values
            self.move(Kind.PEER_SEND, row, holder, worker, num_bytes, self.ready(row))
        self.entries[row].base = trainers if record == values else {keeper}

    def evict(self, worker: int, row: Row) -> None:
        entry, (values, record) = self.entries[row], self.sizes(row)
        if row in self.trained:
            return
        if entry.state == State.OWNED and worker in entry.latest:
            self.push(Kind.EVICT_PUSH, row, worker, record, self.iteration)
            self.entries[row] = Entry()
        elif worker in entry.partial:
            num_bytes = values + (record if worker in entry.base else 0)
            self.push(Kind.EVICT_PUSH, row, worker, num_bytes, self.iteration)
            if worker in entry.base:
                entry.base = set()
            entry.partial = entry.partial - {worker}
            entry.settled = entry.settled | {worker}
            if not entry.partial:
                self.entries[row] = Entry()

    def after_training(self, row: Row, trainers: set[int]) -> None:
        if len(trainers) == 1:
            self.entries[row] = Entry(State.OWNED, latest=trainers)
        else:
            self.entries[row] = Entry(State.SPLIT, partial=trainers, base=self.entries[row].base)


class Full(Naive):
    """Every trained row goes home at once; a sole trainer's copy stays the latest."""

    def before_training(self, row: Row, trainers: set[int], state: State) -> None:
        values, record = self.sizes(row)
        entry = self.entries.setdefault(row, Entry())
        if state != State.FRESH:
            num_bytes = record if len(trainers) == 1 else values
            self.pull(row, trainers - entry.latest, num_bytes, self.ready(row))

    def evict(self, worker: int, row: Row) -> None:
        self.entries[row].latest = self.entries[row].latest - {worker}

    def after_training(self, row: Row, trainers: set[int]) -> None:
        values, record = self.sizes(row)
        for worker in trainers:
            num_bytes = record if len(trainers) == 1 else values
            self.push(Kind.UPDATE_PUSH, row, worker, num_bytes, self.iteration)
        self.entries[row] = Entry(latest=set(trainers) if len(trainers) == 1 else set())


class Static(Full):
    """The hot set is everywhere; of all other rows nothing stays on a worker."""

    def make_room(self, needs: list[list[Row]]) -> list[set[Row]]:
        return [set() for _ in needs]

    def after_training(self, row: Row, trainers: set[int]) -> None:
        super().after_training(row, trainers)
        self.entries[row].latest.clear()


@dataclass
class BoundedCopy:
    seen: int  # the home's version that the copy includes
    pending: int = 0  # own updates that the home does not have


class Bounded(Naive):
    """Copies may be ``bound`` updates behind the home, and keep as many to themselves."""

    def __init__(
        self, settings: NaiveSettings, batches: Sequence[Batch], assignments: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(settings, batches, assignments)
        self.bound = int(settings.sync.removeprefix("bounded:"))
        self.versions: Counter[Row] = Counter()  # at the home
        self.copies: list[dict[Row, BoundedCopy]] = [{} for _ in self.workers]
        self.up_to_date: dict[Row, set[int]] = {}  # who trained the row last

    def plan(self) -> NaivePlan:
        plan = super().plan()
        for row, entry in self.entries.items():
            entry.latest = {worker for worker in self.workers if self.holds_latest(worker, row)}
        return plan

    def holds_latest(self, worker: int, row: Row) -> bool:
        copy = self.copies[worker].get(row)
        return copy is not None and self.versions[row] - copy.seen <= self.bound

    def is_outdated(self, worker: int, row: Row) -> bool:
        return row in self.trained or worker not in self.up_to_date[row]

    def before_training(self, row: Row, trainers: set[int], state: State) -> None:
        self.entries[row] = Entry()
        pulling = {worker for worker in trainers if not self.holds_latest(worker, row)}
        pushing = {w for w in pulling if row in self.copies[w] and self.copies[w][row].pending}
        for worker in pushing:
            self.hand_over(Kind.UPDATE_PUSH, worker, row)
        for worker in pulling:
            self.copies[worker][row] = BoundedCopy(seen=self.versions[row])
        if state != State.FRESH:
            self.pull(row, pulling, self.sizes(row)[1], self.iteration if pushing else self.ready(row))

    def evict(self, worker: int, row: Row) -> None:
        if self.copies[worker][row].pending:
            self.hand_over(Kind.EVICT_PUSH, worker, row)
        del self.copies[worker][row]

    def after_training(self, row: Row, trainers: set[int]) -> None:
        self.up_to_date[row] = trainers if self.bound or len(trainers) == 1 else set()
        for worker in trainers:
            self.copies[worker][row].pending += 1
            if self.copies[worker][row].pending > self.bound:
                self.hand_over(Kind.UPDATE_PUSH, worker, row)

    def forget(self, row: Row) -> None:
        super().forget(row)
        for copies in self.copies:
            copies.pop(row, None)
        del self.versions[row]

    def hand_over(self, kind: Kind, worker: int, row: Row) -> None:
        copy = self.copies[worker][row]
        self.push(kind, row, worker, self.sizes(row)[0], self.iteration)
        self.versions[row] += copy.pending
        copy.seen, copy.pending = copy.seen + copy.pending, 0


def naive_scheduler(
    settings: NaiveSettings, batches: Sequence[Batch], assignments: Sequence[Sequence[int]]
) -> Naive:
    """The oracle of the mode that the settings name; without look-ahead on-demand pushes at once."""
    name = settings.sync.split(":")[0]
    if name == "on-demand" and settings.look_ahead == 0:
        name = "full"
    modes = {"on-demand": OnDemand, "full": Full, "static": Static, "bounded": Bounded}
    return modes[name](settings, batches, assignments)
