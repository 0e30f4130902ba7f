"""A scheduler restored from what another one has exported goes on with the very same plans."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import row_policies

from rowhaul.errors import CheckpointError, ConfigError, DataError
from rowhaul.schedule import CacheSettings, HotRows, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.directory import seen
from rowhaul.schedule.row_states import State
from slow_cases import mostly_slow

SYNCS = ["on-demand", "full", "static", "bounded:0", "bounded:1", "bounded:3"]
POLICIES = ["lru", "lfu", "emark", "emark:frequency,latest,mark", "belady"]
DISPATCHERS = [
    "random",
    "round-robin",
    "laia",
    "laia-adaptive:1:refresh-every=2",
    "esd:0.5",
    "joint",
    "two-batch:laia-adaptive:1:refresh-every=3",
]
KEYS = [0, 1, 2, 3, 5, -1, 1 << 40, -(1 << 63), (1 << 63) - 1]
NUM_TABLES = 3


@dataclass(frozen=True)
class Run:
    """Settings, batches, and the control records posted before each iteration is planned."""

    settings: ScheduleSettings
    batches: list[IdBatch]
    posted: dict[int, list[tuple[str, object]]]
    stop: int  # the iteration before which the state is exported
    filled: bool  # whether the window was filled by then


@st.composite
def id_batches(draw: st.DrawFn) -> IdBatch:
    lengths = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(0, 8)))]
    rows = [(draw(st.integers(0, NUM_TABLES - 1)), draw(st.sampled_from(KEYS))) for _ in range(sum(lengths))]
    return IdBatch(
        np.cumsum([0, *lengths]),
        np.array([table for table, _ in rows], np.int32),
        np.array([key for _, key in rows], np.int64),
    )


@st.composite
def control_records(draw: st.DrawFn, num_workers: int) -> tuple[str, object]:
    numbers = st.lists(st.integers(1, 9), min_size=num_workers, max_size=num_workers).map(tuple)
    return draw(
        st.one_of(
            st.tuples(st.just("prices"), numbers),
            st.tuples(st.just("shares"), numbers),
            st.tuples(st.just("dispatcher"), st.sampled_from(DISPATCHERS)),
        )
    )


@st.composite
def runs(draw: st.DrawFn, sync: str) -> Run:
    num_workers = draw(st.integers(1, 5))
    batches = [draw(id_batches()) for _ in range(draw(st.integers(1, 14)))]
    hot = draw(st.lists(st.sampled_from(KEYS), max_size=2))
    unit = draw(st.sampled_from(["rows", "bytes"]))
    least = max(len(batch.keys) for batch in batches) + 1  # a batch fits on any worker
    room = least + draw(st.integers(0, 6))
    chosen = ScheduleSettings(
        topology=Topology(
            num_workers,
            num_stores=draw(st.integers(1, 3)),
            colocated=draw(st.booleans()),
            peer_to_peer=draw(st.booleans()),
        ),
        sizes=RowSizes(values=(8, 16, 8), state=draw(st.sampled_from([(0, 0, 0), (4, 16, 0)]))),
        prices=tuple(draw(st.sampled_from([1, 10])) for _ in range(num_workers)),
        cache=CacheSettings(
            min(room, 9) if unit == "rows" and least < 9 else room * (1 if unit == "rows" else 20),
            unit,
            draw(st.sampled_from(POLICIES)),
        ),
        dispatcher=draw(st.sampled_from(DISPATCHERS)),
        sync=sync,
        first_touch=draw(st.booleans()),
        policies=draw(st.just(()) | st.tuples(row_policies, row_policies, row_policies)),
        look_ahead=draw(st.sampled_from([0, 1, 1, 2, 3])),
        hot=HotRows(np.zeros(len(hot), np.int32), np.array(hot, np.int64)) if hot else None,
        seed=draw(st.integers(0, 3)),
    )
    records = st.lists(control_records(num_workers), min_size=1, max_size=2)
    posted = draw(st.dictionaries(st.integers(0, len(batches) - 1), records, max_size=4))
    return Run(chosen, batches, posted, draw(st.integers(0, len(batches))), draw(st.booleans()))


def go_on(scheduler: Scheduler, run: Run, until: int | None = None) -> list[bytes]:
    digests = []
    while scheduler.iteration != until and scheduler.fill():
        for name, value in run.posted.get(scheduler.iteration, []):
            scheduler.post(name, value)
        digests.append(scheduler.plan().digest())
    return digests


def through_a_file(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **state)
    file.seek(0)
    with np.load(file, allow_pickle=False) as loaded:
        return dict(loaded)


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("sync", mostly_slow(SYNCS, "on-demand", "bounded:1"))
def test_a_resumed_run_makes_the_plans_of_an_uninterrupted_one(data: st.DataObject, sync: str) -> None:
    run = data.draw(runs(sync))
    expected = go_on(Scheduler(run.settings, run.batches), run)

    first = Scheduler(run.settings, run.batches)
    before = go_on(first, run, until=run.stop)
    if run.filled:
        first.fill()
    state = first.export()
    second = Scheduler(run.settings, run.batches[run.stop :])
    second.restore(through_a_file(state))
    assert second.iteration == run.stop
    first.fill()
    assert equal(first.export(), second.export()), "what is restored is what was exported"
    placed = first.states(), second.states()
    assert equal(*placed)
    assert before + go_on(second, run) == expected
    assert before + go_on(first, run) == expected, "an export changes nothing"


def chosen(**changes: object) -> ScheduleSettings:
    defaults = ScheduleSettings(
        topology=Topology(4),
        sizes=RowSizes(values=(8, 16), state=(0, 4)),
        prices=(1, 1, 10, 10),
        cache=CacheSettings(60),
        dispatcher="esd:1",
    )
    return replace(defaults, **changes)


def trace(num_batches: int = 40, batch_size: int = 16, seed: int = 0) -> list[IdBatch]:
    random = np.random.default_rng(seed)
    ids = [random.zipf(1.3, (2, batch_size)) % 400 for _ in range(num_batches)]
    return [IdBatch.from_features([0, 1], one.ravel(), np.ones((2, batch_size), np.int32)) for one in ids]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sync", SYNCS)
def test_long_runs_go_on_the_same_wherever_they_stop(sync: str, policy: str) -> None:
    settings = chosen(
        sync=sync, cache=CacheSettings(400, "bytes", policy), look_ahead=2, dispatcher="laia-adaptive:1"
    )
    run = Run(settings, trace(), {1: [("shares", (2, 1, 1, 0))], 8: [("tables_scored", 2)]}, 0, False)
    expected = go_on(Scheduler(settings, run.batches), run)
    scheduler, digests = Scheduler(settings, run.batches), []
    for stop in (2, 9, 10, 25):  # a record waits, twice
        digests += go_on(scheduler, run, until=stop)
        state = scheduler.export()
        scheduler = Scheduler(settings, run.batches[stop:])
        scheduler.restore(state)
    assert digests + go_on(scheduler, run) == expected


def test_a_window_row_that_the_filter_came_to_mistake_for_a_seen_one_stays_fresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows read ahead were looked up in an emptier filter than the one that is restored."""
    monkeypatch.setattr(seen, "SMALLEST_ROWS", 512)
    monkeypatch.setattr(seen, "BITS_PER_ROW", 1)  # so that it errs all the time
    settings = chosen(look_ahead=5)
    run = Run(settings, trace(30), {}, 0, False)
    expected = go_on(Scheduler(settings, run.batches), run)
    mistaken = 0
    for stop in range(1, 30, 4):
        scheduler = Scheduler(settings, run.batches)
        go_on(scheduler, run, until=stop)
        state = scheduler.export()
        rows = state["rows.table"], state["rows.key"]
        filters = seen.SeenRows()
        filters.restore(seen.Saved(state, "rows.seen."))
        mistaken += int(filters.contains(*rows)[state["rows.state"] == State.FRESH].sum())
        resumed = Scheduler(settings, run.batches[stop:])
        resumed.restore(state)
        assert go_on(resumed, run) == expected[stop:]
    assert mistaken > 10


def test_a_state_is_plain_arrays() -> None:
    scheduler = Scheduler(chosen(admit_after=2, sync="bounded:1"), trace())
    go_on(scheduler, Run(chosen(), [], {}, 0, False), until=5)
    for name, array in scheduler.export().items():
        assert type(array) is np.ndarray, name
        assert array.dtype.kind in "iu", name
        assert array.ndim == 1, name


def test_a_state_does_not_change_with_the_scheduler_that_exported_it() -> None:
    run = Run(chosen(admit_after=2), trace(), {}, 0, False)
    scheduler = Scheduler(run.settings, run.batches)
    go_on(scheduler, run, until=10)
    state = scheduler.export()
    copied = {name: array.copy() for name, array in state.items()}
    rest = go_on(scheduler, run)
    assert equal(state, copied)
    resumed = Scheduler(run.settings, run.batches[10:])
    resumed.restore(state)
    assert go_on(resumed, run) == rest
    assert equal(state, copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, r"seed: 3 here, 0 there"),
        ({"topology": Topology(4, num_stores=2)}, r"num_stores: 2 here, 1 there"),
        ({"prices": (1, 1, 1, 10)}, r"prices: 1x3, 10 here, 1x2, 10x2 there"),
        ({"cache": CacheSettings([60, 60, 60, 61])}, r"cache.capacity: 60x3, 61 here, 60x4 there"),
        ({"dispatcher": "esd:0.5"}, r"dispatcher: esd:alpha=1/2:.* here, esd:alpha=1:.* there"),
        ({"sync": "full", "look_ahead": 2}, r"sync: full here, on-demand there; look_ahead: 2 here, 1 there"),
        ({"hot": HotRows(np.array([0]), np.array([7]))}, r"hot: 1 rows, hash \w+ here, none there"),
    ],
)
def test_a_state_of_other_settings_is_refused_naming_them(changes: dict[str, object], message: str) -> None:
    scheduler = Scheduler(chosen(), trace())
    other = Scheduler(chosen(**changes), trace())
    with pytest.raises(CheckpointError, match=message):
        other.restore(scheduler.export())


@pytest.mark.parametrize("text", ["esd:1/3:mean", "laia:threads=4", "joint:future=0.25", "two-batch:esd:0.3"])
def test_the_dispatcher_in_force_comes_back_with_its_settings(text: str) -> None:
    first = Scheduler(chosen(), trace())
    first.post("dispatcher", text)
    for _ in range(3):
        first.fill()
        first.plan()
    second = Scheduler(chosen(), trace()[3:])
    second.restore(first.export())
    expected = [first.plan().digest() for _ in range(5) if first.fill()]
    assert [second.plan().digest() for _ in range(5) if second.fill()] == expected


class Alternating:
    """A dispatcher from elsewhere, without a text."""

    name = "alternating"

    def assign(self, task):
        return (np.arange(task.num_samples) % task.num_workers).astype(np.int32)[::-1].copy()


def test_a_dispatcher_made_elsewhere_is_the_one_of_the_settings() -> None:
    settings = chosen(dispatcher=Alternating())
    run = Run(settings, trace(), {}, 0, False)
    expected = go_on(Scheduler(settings, run.batches), run)
    first = Scheduler(settings, run.batches)
    go_on(first, run, until=7)
    second = Scheduler(settings, run.batches[7:])
    second.restore(first.export())
    assert go_on(second, run) == expected[7:]


def test_batches_that_do_not_go_on_where_planning_stopped_are_refused() -> None:
    run = Run(chosen(look_ahead=2), trace(), {}, 0, False)
    first = Scheduler(run.settings, run.batches)
    go_on(first, run, until=4)
    state = first.export()
    for batches in (run.batches, run.batches[3:], run.batches[5:], run.batches[4:5], []):
        other = Scheduler(run.settings, batches)
        with pytest.raises(CheckpointError, match=r"iteration [45] is not the one that was read before"):
            other.restore(state)
        with pytest.raises(DataError, match="failed before"):
            other.plan()


def test_only_a_new_scheduler_can_be_restored() -> None:
    state = Scheduler(chosen(), trace()).export()
    for begun in (lambda scheduler: scheduler.fill(), lambda scheduler: (scheduler.fill(), scheduler.plan())):
        other = Scheduler(chosen(), trace())
        begun(other)
        with pytest.raises(ConfigError, match="make a new scheduler"):
            other.restore(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("caches.workers"), "lacks caches.workers"),
        (lambda state: state.update({"rows.key": state["rows.key"][1:]}), r"rows.key: \d+ int64 are needed"),
        (lambda state: state.update({"rows.key": state["rows.key"][::-1]}), "rows are not in order"),
        (
            lambda state: state["rows.members"].fill(1 << 9),
            r"rows.members: 512 to 512 .* only 0 to 15 can be",
        ),
        (lambda state: state["caches.rows"].fill(1 << 20), r"caches.rows: .* only 0 to \d+ can be"),
        (lambda state: state["caches.rows"].fill(0), "copies are not in order"),
        (lambda state: state["rows.table"].fill(9), "rows.table: 9 to 9 was found, only 0 to 1 can be"),
        (lambda state: state["settings"].fill(255), "settings: it is no text"),
        (lambda state: state["format"].fill(7), "has format 7; this version reads 1"),
    ],
)
def test_a_damaged_state_is_refused_before_a_kernel_sees_it(damage, message: str) -> None:
    scheduler = Scheduler(chosen(), trace())
    go_on(scheduler, Run(chosen(), [], {}, 0, False), until=10)
    state = scheduler.export()
    damage(state)
    with pytest.raises(CheckpointError, match=message):
        Scheduler(chosen(), trace()[10:]).restore(state)


def test_a_scheduler_that_has_failed_has_no_state() -> None:
    scheduler = Scheduler(chosen(cache=CacheSettings(2)), trace())
    scheduler.fill()
    with pytest.raises(ConfigError, match="its cache holds 2"):
        scheduler.plan()
    with pytest.raises(DataError, match="no state to export"):
        scheduler.export()


@pytest.mark.parametrize("counted", [(True, False), (False, True), (False, False)], ids=str)
def test_rows_at_home_are_checked_whether_they_are_counted_or_not(counted):
    """A run goes on with and without explanations; other ids than those read ahead are refused."""
    at_home = ScheduleSettings(
        topology=Topology(2, 0, colocated=True),
        sizes=RowSizes((4,), (4,)),
        prices=(1, 1),
        cache=CacheSettings(0),
        dispatcher="random",
        sync="at-home",
        look_ahead=2,
    )
    batches = [IdBatch(np.arange(5), np.zeros(4, np.int32), np.arange(4) + number) for number in range(6)]

    def scheduler(some, counts):
        made = Scheduler(at_home, some)
        if not counts:
            made.count_no_rows()
        return made

    before, after = counted
    first = scheduler(batches, before)
    for _ in range(2):
        assert first.fill()
        first.plan()
    assert first.fill()
    state = first.export()
    second = scheduler(batches[2:], after)
    second.restore(state)
    while first.fill():
        assert second.fill()
        assert np.array_equal(first.plan().worker, second.plan().worker)
    assert not second.fill()
    with pytest.raises(CheckpointError, match="is not the one that was read before the checkpoint"):
        scheduler(batches[3:], after).restore(state)
