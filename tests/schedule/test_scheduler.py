from dataclasses import replace

import numpy as np
import pytest
from scheduler_runs import NUM_WORKERS, plans_of, settings, trace

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    RowSizes,
    Scheduler,
    Topology,
    make_dispatcher,
)
from rowhaul.schedule.caches import order
from rowhaul.schedule.directory import directory, row_index
from rowhaul.schedule.row_states import State
from rowhaul.schedule.sync import bounded


@pytest.mark.parametrize(
    "dispatcher", ["random", "laia", "laia-adaptive:1", "esd:0.5", "joint", "two-batch:laia"]
)
def test_two_ranks_with_the_same_ids_make_the_same_plans(dispatcher):
    chosen = settings(dispatcher=dispatcher, look_ahead=2)
    here = [plan.digest() for plan in plans_of(chosen, trace())]
    there = [plan.digest() for plan in plans_of(chosen, trace())]
    assert len(here) == 12
    assert here == there
    assert here != [plan.digest() for plan in plans_of(chosen, trace(seed=1))]


def test_another_seed_draws_other_assignments():
    first, second = (list(plans_of(settings(dispatcher="random", seed=seed), trace())) for seed in (0, 1))
    assert any((a.worker != b.worker).any() for a, b in zip(first, second, strict=True))
    assert (first[0].worker != first[1].worker).any()


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_no_more_batches_are_read_than_the_window_holds(look_ahead):
    taken = []

    def counted():
        for number, batch in enumerate(trace()):
            taken.append(number)
            yield batch

    scheduler = Scheduler(settings(look_ahead=look_ahead), counted())
    while scheduler.fill():
        assert len(taken) == min(12, scheduler.iteration + 1 + look_ahead)
        scheduler.plan()
    assert scheduler.iteration == 12


def test_a_stream_without_batches_has_no_plans():
    assert list(plans_of(settings(), [])) == []


def test_batches_smaller_than_the_workers_and_empty_ones_are_normal():
    nothing = IdBatch(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))
    without_ids = IdBatch(np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))
    plans = list(plans_of(settings(), [*trace(1, 3), nothing, without_ids, *trace(1, 1)]))
    assert [len(plan.worker) for plan in plans] == [3, 0, 2, 1]
    assert len(plans[1].moves) == len(plans[2].moves) == 0


def test_planning_without_a_batch_says_so():
    with pytest.raises(DataError, match=r"call fill\(\) first"):
        Scheduler(settings(), trace()).plan()


def test_a_cache_too_small_for_a_batch_is_refused_with_what_it_needs():
    with pytest.raises(ConfigError, match=r"needs \d+ rows in one batch, but its cache holds 2"):
        list(plans_of(settings(cache=CacheSettings(2)), trace()))


def test_a_table_without_a_size_is_refused():
    batch = IdBatch.from_features([2], np.arange(3), np.ones((1, 3), np.int32))
    with pytest.raises(DataError, match=r"tables 2 to 2, but sizes are given for 2 tables \(0 to 1\)"):
        list(plans_of(settings(), [batch]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prices": (1, 2)}, "2 link prices were given for 4 workers"),
        ({"prices": (1, 1, 1, 0)}, "positive whole numbers"),
        ({"prices": (1, 1, 1, float("nan"))}, "positive whole numbers"),
        ({"shares": (1, 1)}, "2 shares were given for 4 workers"),
        ({"shares": (0, 0, 0, 0)}, "at least one worker must have more than 0"),
        ({"shares": (1, 1, 1, -1)}, "none negative"),
        ({"prices": (1, 1, 1, 2**62)}, "up to 1,000,000,000"),
        ({"look_ahead": 1.5}, "look_ahead must be a whole number; got 1.5"),
        ({"look_ahead": -1}, "look_ahead must be 0 to 1000"),
        ({"admit_after": 0}, "admit_after must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"sync": "eager"}, "unknown synchronisation 'eager'; known are on-demand, full, bounded:S, static"),
        ({"sync": "bounded"}, "bounded:S"),
        ({"dispatcher": "best"}, "unknown dispatcher 'best'; known are random"),
        ({"dispatcher": "esd:1.5"}, "from 0 to 1; got 1.5"),
        ({"cache": CacheSettings([1, 2])}, "2 cache capacities were given for 4 workers"),
        ({"cache": CacheSettings(-1)}, "must not be negative; got -1"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_cache_is_measured_in_rows_or_bytes():
    with pytest.raises(ConfigError, match="'rows' or 'bytes'; got 'kilos'"):
        CacheSettings(1, unit="kilos")


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fifo'; known are belady, emark, lfu, lru"):
        CacheSettings(1, policy="fifo")


def test_the_directory_holds_the_cached_rows_and_the_window_only():
    chosen = settings(cache=CacheSettings(12), look_ahead=1)
    scheduler = Scheduler(chosen, trace(60, 16))
    while scheduler.fill():
        known = scheduler.states()
        assert len(known["keys"]) <= NUM_WORKERS * 12 + 2 * 32
        scheduler.plan()
        order = list(zip(known["tables"].tolist(), known["keys"].tolist(), strict=True))
        assert order == sorted(order)


def test_hot_rows_never_move_and_always_hit():
    hot = HotRows(np.array([0, 0, 1], np.int32), np.array([1, 2, 1], np.int64))
    for plan in plans_of(settings(hot=hot, first_touch=False), trace()):
        is_hot = ((plan.tables == 0) & np.isin(plan.keys, [1, 2])) | ((plan.tables == 1) & (plan.keys == 1))
        assert (plan.states[is_hot] == State.REPLICATED).all()
        assert plan.all_reduce_rows == is_hot.sum()
        assert plan.all_reduce_bytes == np.where(plan.tables[is_hot] == 0, 8, 16).sum()
        moved = set(zip(plan.moves.table.tolist(), plan.moves.key.tolist(), strict=True))
        assert not moved & {(0, 1), (0, 2), (1, 1)}


def test_counts_add_the_moves_up_where_they_are_counted():
    for plan in plans_of(settings(first_touch=False), trace()):
        rows, num_bytes = plan.counts()
        assert rows.sum() == len(plan.moves)
        assert num_bytes.sum() == plan.moves.num_bytes.sum()
        pulls = plan.moves.kind == 0
        assert rows[0].tolist() == np.bincount(plan.moves.target[pulls], minlength=NUM_WORKERS).tolist()
        assert (plan.moves.source[pulls] == NUM_WORKERS).all()


def test_sixty_four_workers_have_a_bit_each():
    chosen = settings(topology=Topology(64), prices=(1,) * 64, dispatcher="round-robin", first_touch=False)
    batch = IdBatch.from_features([0], np.zeros(64, np.int64), np.ones((1, 64), np.int32))
    plans = list(plans_of(chosen, [batch] * 3))
    assert plans[0].trainers.tolist() == [2**64 - 1]
    assert [len(plan.moves) for plan in plans] == [64, 128, 128]


class Foreseeing:
    """Divides at random and remembers what it was told the next batch would find."""

    name = "foreseeing"

    def __init__(self):
        self.expected = None
        self.num_compared = 0

    def assign(self, task):
        return make_dispatcher("random").assign(task)

    def assign_ahead(self, task, follow):
        if self.expected is not None:
            for name in ("latest", "owner", "partial", "free", "capacities"):
                assert getattr(self.expected, name).tolist() == getattr(task, name).tolist(), name
            self.num_compared += 1
        worker = self.assign(task)
        self.expected = follow(worker)
        return worker


@pytest.mark.parametrize("sync", ["on-demand", "full", "static", "bounded:50"])
@pytest.mark.parametrize("peer_to_peer", [False, True])
@pytest.mark.parametrize("state", [0, 4])
def test_a_dispatcher_foresees_where_the_next_batch_finds_its_rows(sync, peer_to_peer, state):
    foreseeing = Foreseeing()
    chosen = settings(
        dispatcher=foreseeing,
        sync=sync,
        topology=Topology(NUM_WORKERS, peer_to_peer=peer_to_peer),
        sizes=RowSizes(values=(8, 8), state=(state, state)),
        cache=CacheSettings(1000),
        look_ahead=3,
    )
    list(plans_of(chosen, trace()))
    assert foreseeing.num_compared == 11


@pytest.mark.parametrize("worker", [[0] * 16, [0, 1, 2], [4] * 16])
def test_an_assignment_that_does_not_fit_is_refused(worker):
    class Wrong:
        name = "wrong"

        def assign(self, task):
            return np.array(worker, np.int32)

    with pytest.raises(ConfigError, match=r"dispatcher wrong gave the workers .* of a batch of 16"):
        list(plans_of(settings(dispatcher=Wrong()), trace()))


def test_after_a_failure_nothing_more_is_planned():
    scheduler = Scheduler(settings(cache=CacheSettings(2)), trace())
    scheduler.fill()
    with pytest.raises(ConfigError, match="its cache holds 2"):
        scheduler.plan()
    with pytest.raises(DataError, match="failed before and cannot continue"):
        scheduler.plan()


def test_ranks_that_read_the_samples_in_another_order_differ():
    """Two batches with the same rows on the same workers, but not in the same samples."""
    chosen = settings(dispatcher="round-robin", topology=Topology(2), prices=(1, 1))
    first = [[1], [3], [1, 2], [3, 4], [2], [4]]
    second = [[1, 2], [3, 4], [1], [3], [1, 2], [4]]
    plans = []
    for samples in (first, second):
        keys = np.array([key for sample in samples for key in sample], np.int64)
        batch = IdBatch(np.cumsum([0, *map(len, samples)]), np.zeros(len(keys), np.int32), keys)
        plans += plans_of(chosen, [batch])
    assert (plans[0].trainers == plans[1].trainers).all()
    assert plans[0].digest() != plans[1].digest()


@pytest.mark.parametrize("tables", [[-7], [2]])
def test_hot_rows_of_tables_that_do_not_exist_are_refused(tables):
    with pytest.raises(ConfigError, match="hot rows name tables"):
        settings(hot=HotRows(np.array(tables), np.array([1])))


def test_hot_rows_need_a_table_each():
    with pytest.raises(ConfigError, match="one table for each key"):
        HotRows(np.array([0]), np.array([1, 2]))


@pytest.mark.parametrize("sync", ["on-demand", "bounded:1"])
@pytest.mark.parametrize("policy", ["lru", "emark"])
def test_everything_grows_from_next_to_nothing(monkeypatch, sync, policy):
    chosen = settings(sync=sync, cache=CacheSettings(60, policy=policy))
    expected = [plan.digest() for plan in plans_of(chosen, trace(30))]
    monkeypatch.setattr(directory, "FIRST_SLOTS", 1)
    monkeypatch.setattr(row_index, "SMALLEST", 2)
    monkeypatch.setattr(bounded, "FIRST_COPIES", 1)
    monkeypatch.setattr(order, "_SMALLEST", 1)
    assert [plan.digest() for plan in plans_of(chosen, trace(30))] == expected


def test_co_located_plans_are_those_of_as_many_stores_with_the_moves_at_home_apart():
    """Store k beside worker k instead of a rank of its own: the same moves, free between the two."""
    apart = settings(topology=Topology(NUM_WORKERS, num_stores=NUM_WORKERS), cache=CacheSettings(20))
    together = settings(topology=Topology(NUM_WORKERS, colocated=True), cache=CacheSettings(20))
    num_local = 0
    for stored, beside in zip(
        plans_of(replace(apart, dispatcher="round-robin"), trace(30)),
        plans_of(replace(together, dispatcher="round-robin"), trace(30)),
        strict=True,
    ):
        local = beside.local_moves
        assert stored.local_moves is None
        assert (local.source == local.target).all()
        assert (beside.moves.source != beside.moves.target).all()
        num_local += len(local)
        names = ("kind", "payload", "table", "key", "num_bytes", "ready")
        expected = sorted(
            zip(
                *(getattr(stored.moves, name).tolist() for name in names),
                (stored.moves.source % NUM_WORKERS).tolist(),
                (stored.moves.target % NUM_WORKERS).tolist(),
                strict=True,
            )
        )
        both = [
            np.concatenate([getattr(moves, name) for moves in (beside.moves, local)]).tolist()
            for name in (*names, "source", "target")
        ]
        assert sorted(zip(*both, strict=True)) == expected
    assert num_local > 100
