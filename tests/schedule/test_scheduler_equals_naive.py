"""The scheduler does what the oracle does: every move, hit, eviction and state, on traces found to break it.

Assignments are drawn, not decided: dispatchers have tests of their own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Batch, Entry, Naive, NaiveMove, NaivePlan, Row
from naive_modes import naive_scheduler
from scheduler_cases import MODES, Case, capacities, cases, forgetful_case, long_case

from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    RowSizes,
    Scheduler,
    ScheduleSettings,
)
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.plan import Kind, Payload, Plan
from rowhaul.schedule.row_states import State
from slow_cases import mostly_slow


class Prescribed:
    """Assigns as it was told, and remembers what it was asked."""

    name = "prescribed"

    def __init__(self, assignments: Sequence[Sequence[int]]) -> None:
        self._assignments = iter(assignments)
        self.task: DispatchTask | None = None

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        self.task = task
        return np.array(next(self._assignments), np.int32)


def id_batch(batch: Batch) -> IdBatch:
    offsets = np.cumsum([0, *(len(sample) for sample in batch)], dtype=np.int64)
    rows = [row for sample in batch for row in sample]
    return IdBatch(
        offsets, np.array([row[0] for row in rows], np.int32), np.array([row[1] for row in rows], np.int64)
    )


def real_scheduler(case: Case, dispatcher: Prescribed) -> Scheduler:
    naive = case.naive
    hot = sorted(naive.hot)
    return Scheduler(
        ScheduleSettings(
            topology=case.topology,
            sizes=RowSizes(naive.values, naive.state),
            prices=(1,) * naive.num_workers,
            cache=CacheSettings(naive.capacity, naive.unit, naive.policy),
            dispatcher=dispatcher,
            sync=naive.sync,
            shares=case.shares,
            first_touch=naive.first_touch,
            admit_after=naive.admit_after,
            policies=naive.policies,
            look_ahead=naive.look_ahead,
            hot=HotRows(
                np.array([row[0] for row in hot], np.int32), np.array([row[1] for row in hot], np.int64)
            ),
        ),
        map(id_batch, case.batches),
    )


def workers_of(mask: int) -> set[int]:
    return {worker for worker in range(int(mask).bit_length()) if int(mask) >> worker & 1}


def as_naive(plan: Plan) -> NaivePlan:
    """A plan in the oracle's words."""
    rows = list(zip(plan.tables.tolist(), plan.keys.tolist(), strict=True))
    assert rows == sorted(set(rows)), "rows are ordered by (table, key), each once"
    columns = [getattr(plan.moves, column.name).tolist() for column in dataclasses.fields(NaiveMove)[:5]]
    columns += [plan.moves.num_bytes.tolist(), plan.moves.ready.tolist(), plan.moves.after.tolist()]
    evicted: list[set[Row]] = [set() for _ in range(plan.num_workers)]
    for worker, *row in zip(
        plan.evicted_from.tolist(), plan.evicted_tables.tolist(), plan.evicted_keys.tolist(), strict=True
    ):
        assert tuple(row) not in evicted[worker], "a copy is evicted once"
        evicted[worker].add(tuple(row))
    assert plan.forgotten_tables is not None
    assert plan.forgotten_keys is not None
    forgotten = list(zip(plan.forgotten_tables.tolist(), plan.forgotten_keys.tolist(), strict=True))
    assert len(forgotten) == len(set(forgotten)), "a row is forgotten once"
    return NaivePlan(
        iteration=plan.iteration,
        trainers=dict(zip(rows, map(workers_of, plan.trainers), strict=True)),
        states=dict(zip(rows, map(State, plan.states), strict=True)),
        lookups=plan.lookups.tolist(),
        hits=plan.hits.tolist(),
        evicted=evicted,
        all_reduce_rows=plan.all_reduce_rows,
        all_reduce_bytes=plan.all_reduce_bytes,
        moves=Counter(NaiveMove(Kind(kind), *rest) for kind, *rest in zip(*columns, strict=True)),
        admitted=plan.num_admitted,
        expired=set(forgotten[: plan.num_expired]),
        over_limit=set(forgotten[plan.num_expired :]),
    )


def placed(entries: dict[Row, Entry]) -> dict[Row, Entry]:
    """The rows of which workers hold something that counts; a directory may forget all others."""
    return {row: entry for row, entry in entries.items() if entry.latest or entry.partial}


def directory_entries(scheduler: Scheduler) -> dict[Row, Entry]:
    states = scheduler.states()
    return {
        (table, key): Entry(State(state), *map(workers_of, masks if state == State.SPLIT else masks[:1]))
        for table, key, state, *masks in zip(
            states["tables"].tolist(),
            states["keys"].tolist(),
            states["state"].tolist(),
            *(states[name].tolist() for name in ("latest", "partial", "settled", "base")),
            strict=True,
        )
        if state in (State.HOME, State.OWNED, State.SPLIT)
    }


def check_owed(scheduler: Scheduler, oracle: Naive, trained: dict[Row, int]) -> None:
    """States name who owes gradients, when those of split rows are from, and when replicated rows learned."""
    states = scheduler.states()
    rows = zip(states["tables"].tolist(), states["keys"].tolist(), strict=True)
    columns = (states["state"], states["trained"].tolist(), states["partial"].tolist())
    copies = getattr(oracle, "copies", [])
    for row, state, since, owing in zip(rows, *columns, strict=True):
        if state == State.SPLIT:
            assert since == trained[row]
            continue
        if state == State.REPLICATED:
            assert (since, owing) == (trained.get(row, -1), 0)
            continue
        waits = {worker for worker, held in enumerate(copies) if row in held and held[row].pending}
        assert set(workers_of(owing)) == waits
        assert since == (scheduler.iteration - 1 if waits else -1)


def row_locations(entry: Entry, peer_to_peer: bool) -> tuple[set[int], int, set[int]]:
    """The latest, the owner and the partial of a row, as dispatchers see it."""
    if entry.state == State.OWNED:
        return entry.latest, min(entry.latest), set()
    if entry.state == State.SPLIT and peer_to_peer and entry.base and not entry.settled:
        gatherer = min(entry.base & entry.partial)  # has the latest once the others have sent it their part
        return {gatherer}, gatherer, entry.partial
    return entry.latest, -1, entry.partial


def check_task(
    task: DispatchTask, case: Case, oracle: Naive, plan: NaivePlan, before: dict[Row, Entry]
) -> None:
    """The dispatcher is told the truth about the batch and its rows."""
    rows, batch = sorted(plan.states), case.batches[plan.iteration]
    named = [{rows[r] for r in task.rows[a:b]} for a, b in zip(task.offsets, task.offsets[1:], strict=False)]
    assert named == [set(sample) for sample in batch]
    assert len(task.rows) == sum(map(len, named))
    assert task.capacities.tolist() == capacities(len(batch), case.shares or [1] * case.naive.num_workers)

    entries = [before.get(row, Entry()) for row in rows]
    expected = [row_locations(entry, case.naive.peer_to_peer) for entry in entries]
    assert task.tables.tolist() == [table for table, _ in rows]
    assert (
        list(zip(map(workers_of, task.latest), task.owner, map(workers_of, task.partial), strict=True))
        == expected
    )
    assert task.free.tolist() == [
        plan.states[row] not in (State.HOME, State.OWNED, State.SPLIT) for row in rows
    ]
    assert task.home.tolist() == [case.naive.home(row) if case.topology.colocated else -1 for row in rows]
    unit = RowSizes(case.naive.values, case.naive.state).unit
    sizes = zip((task.value_size * unit).tolist(), (task.record_size * unit).tolist(), strict=True)
    assert list(sizes) == [oracle.sizes(row) for row in rows]
    assert task.peer_to_peer == case.naive.peer_to_peer


def check_payloads(plan: Plan, case: Case) -> None:
    """What a move carries takes as many bytes as the move has."""
    values, state = (np.array(sizes)[plan.moves.table] for sizes in (case.naive.values, case.naive.state))
    carried = zip((Payload.VALUES, Payload.STATE, Payload.GRADIENT), (values, state, values), strict=True)
    expected = sum(np.where(plan.moves.payload & part, size, 0) for part, size in carried)
    assert plan.moves.num_bytes.tolist() == np.broadcast_to(expected, len(plan.moves)).tolist()
    if case.naive.sync.startswith("bounded"):
        record = Payload.VALUES | Payload.STATE
        pulls = plan.moves.kind == Kind.MISS_PULL
        assert plan.moves.payload.tolist() == np.where(pulls, record, Payload.GRADIENT).tolist()


def check_steps(
    plan: Plan,
    naive: NaivePlan,
    case: Case,
    before: dict[Row, Entry],
    after: dict[Row, Entry],
    trained: dict[Row, int],
) -> dict[Row, int]:
    """Split rows are put together once, from all their gradients, which are of the iteration that made them.

    Returns the iteration in which each row was trained last.
    """
    moving = {
        row for row, state in naive.states.items() if state not in (State.REPLICATED, State.NOT_ADMITTED)
    }
    expected = set()
    for row, entry in before.items():
        flushes = row in moving or after[row].state == State.HOME
        if entry.state == State.SPLIT and flushes:
            _, gatherer, _ = row_locations(entry, case.naive.peer_to_peer)
            rank = gatherer if row in moving and gatherer >= 0 else case.naive.home(row)
            expected.add((*row, rank, frozenset(entry.partial | entry.settled), trained[row], False))
    if case.naive.sync in ("full", "static") or (
        case.naive.sync == "on-demand" and not case.naive.look_ahead
    ):
        for row in moving:
            if len(naive.trainers[row]) > 1:
                by = frozenset(naive.trainers[row])
                expected.add((*row, case.naive.home(row), by, plan.iteration, True))
    steps = plan.steps
    assert steps is not None
    columns = [steps.table.tolist(), steps.key.tolist(), steps.rank.tolist()]
    contributors = [frozenset(workers_of(mask)) for mask in steps.contributors]
    actual = list(zip(*columns, contributors, steps.trained.tolist(), steps.after.tolist(), strict=True))
    assert len(actual) == len(set(actual))
    assert set(actual) == expected
    learned = {row for row, state in naive.states.items() if state != State.NOT_ADMITTED}
    return {**trained, **dict.fromkeys(learned, plan.iteration)}


def check(case: Case) -> Counter[str]:
    """Step both through the trace side by side; what the trace had in it."""
    dispatcher = Prescribed(case.assignments)
    scheduler = real_scheduler(case, dispatcher)
    oracle = naive_scheduler(case.naive, case.batches, case.assignments)
    seen: Counter[str] = Counter()
    trained: dict[Row, int] = {}
    for assignment in case.assignments:
        assert scheduler.fill()
        before = {row: copy.copy(entry) for row, entry in oracle.entries.items()}
        next_uses = {row: oracle.next_use(row) for sample in case.batches[oracle.iteration] for row in sample}
        actual, expected = scheduler.plan(), oracle.plan()
        assert as_naive(actual) == expected
        assert actual.worker.tolist() == list(assignment)
        check_payloads(actual, case)
        trained = check_steps(actual, expected, case, before, oracle.before_forgetting, trained)
        assert placed(directory_entries(scheduler)) == placed(oracle.entries)
        check_owed(scheduler, oracle, trained)
        assert dispatcher.task is not None
        assert dispatcher.task.next_use.tolist() == [next_uses[row] for row in sorted(next_uses)]
        check_task(dispatcher.task, case, oracle, expected, before)
        seen += features(expected, before, oracle.before_forgetting)
    assert not scheduler.fill()
    return seen


def features(plan: NaivePlan, before: dict[Row, Entry], after: dict[Row, Entry]) -> Counter[str]:
    """What happened in an iteration, in a few words each."""
    seen: Counter[str] = Counter()

    def name(row: Row, state: State) -> str:
        entry = before.get(row, Entry())
        return state.name + " settled" * bool(entry.settled) + " based" * bool(entry.base)

    for row, state in plan.states.items():
        seen[f"needed {name(row, state)}"] += 1
    for row, times in Counter(row for rows in plan.evicted for row in rows).items():
        if row not in plan.states:
            seen[f"evicted {name(row, before[row].state)}"] += times
            seen[f"evicted {before[row].state.name} twice at once"] += times > 1
    for row in plan.expired | plan.over_limit:
        entry = after.get(row, Entry())
        seen[f"forgotten {entry.state.name}" + " settled" * bool(entry.settled)] += 1
        seen["forgotten at once"] += row in plan.states
    for move in plan.moves:
        seen[("early " if move.ready < plan.iteration else "late ") + move.kind.name] += 1
    return +seen


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize(("sync", "peer_to_peer"), MODES)
def test_plans_of_any_trace(data: st.DataObject, sync: str, peer_to_peer: bool) -> None:
    check(data.draw(cases(sync, peer_to_peer)))


@pytest.mark.parametrize(("sync", "peer_to_peer"), mostly_slow(MODES, *MODES[1:4]))
def test_plans_of_long_traces(sync: str, peer_to_peer: bool) -> None:
    seen = sum((check(long_case(seed, sync, peer_to_peer)) for seed in range(5)), Counter())
    expected = {"needed REPLICATED", "needed NOT_ADMITTED", "needed FRESH", "needed HOME", "early MISS_PULL"}
    if sync == "on-demand":
        expected |= {"needed OWNED", "needed SPLIT", "needed SPLIT settled", "early UPDATE_PUSH"}
        expected |= {"evicted OWNED", "evicted SPLIT", "evicted SPLIT settled", "evicted SPLIT twice at once"}
    if peer_to_peer and sync == "on-demand":
        expected |= {"needed SPLIT based", "evicted SPLIT based", "early PEER_SEND"}
        expected |= {"needed SPLIT settled based", "evicted SPLIT settled based"}
    if sync.startswith("bounded:") and sync != "bounded:0":
        expected |= {"late EVICT_PUSH"}
    assert expected <= seen.keys()


@pytest.mark.parametrize(("sync", "peer_to_peer"), mostly_slow(MODES, *MODES[1:4]))
def test_plans_of_long_traces_whose_rows_are_forgotten(sync: str, peer_to_peer: bool) -> None:
    seen = sum((check(forgetful_case(seed, sync, peer_to_peer)) for seed in range(5)), Counter())
    expected = {"needed NOT_ADMITTED", "needed FRESH", "forgotten HOME", "forgotten at once"}
    if sync == "on-demand":
        expected |= {"forgotten OWNED", "forgotten SPLIT", "forgotten SPLIT settled"}
    assert expected - {"forgotten HOME" if sync == "on-demand" else ""} <= seen.keys()


@pytest.mark.parametrize(("sync", "peer_to_peer"), MODES)
def test_plans_for_the_most_workers(sync: str, peer_to_peer: bool) -> None:
    check(long_case(0, sync, peer_to_peer, num_workers=64, num_batches=6))
