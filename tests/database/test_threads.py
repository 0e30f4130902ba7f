"""The database used by several threads at once."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_database import PlainDatabase

from rowhaul.database import EmbeddingDatabase, TicketError, database
from rowhaul.database.vectors import row_gradients
from rowhaul.optim import SGD
from rowhaul.store import TableSpec
from rowhaul.store.arena import OutOfMemoryError, RecordArena

TABLES = [TableSpec("t", 4, -1, 1), TableSpec("u", 2, -1, 1)]


def run_together(*bodies):
    """Run functions in threads that begin at the same moment; raise what any of them raised."""
    gate = threading.Barrier(len(bodies))

    def enter(body):
        gate.wait(30)
        return body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result(60) for future in [pool.submit(enter, body) for body in bodies]]


@given(st.lists(st.lists(st.integers(-30, 30), min_size=1, max_size=40), min_size=2, max_size=4), st.data())
@settings(max_examples=25)
def test_threads_that_train_the_same_keys_lose_nothing(batches, data):
    """SGD's steps commute, so any interleaving ends at the dictionary's rows."""
    with EmbeddingDatabase(TABLES, SGD(lr=0.5), dtype="float64", prefetch_threads=2) as db:
        plain = PlainDatabase(db.settings)

        def train(number):
            keys = batches[number]
            for repeat in range(3):
                ticket = db.prefetch({"t": keys, "u": keys[::-1]})
                rows = db.pull(ticket)
                db.push(ticket, {n: torch.full_like(v, number + repeat + 1) for n, v in rows.items()})
                db.update()

        run_together(*(lambda number=number: train(number) for number in range(len(batches))))
        for number, keys in enumerate(batches):
            for repeat in range(3):
                for table, dim in (("t", 4), ("u", 2)):
                    plain.insert(table, keys)
                    plain.push(table, keys, np.full((len(keys), dim), number + repeat + 1.0))
        plain.update(0.5)
        for table, rows in plain.rows.items():
            assert db.num_rows(table) == len(rows)
            found = db.pull(db.prefetch(list(rows), table))
            np.testing.assert_allclose(found, plain.pull(table, list(rows)), atol=1e-9)


def test_two_threads_insert_the_same_new_keys_once():
    with EmbeddingDatabase(TABLES, prefetch_threads=2) as db:
        for first in range(0, 40_000, 2000):
            keys = np.arange(first, first + 2000)
            tickets = [db.prefetch(some, "t") for some in (keys, keys[::-1].copy())]
            forwards, backwards = (db.pull(ticket) for ticket in tickets)
            assert torch.equal(forwards, backwards.flip(0))
        assert db.num_rows("t") == 40_000
        assert len(torch.unique(db.pull(db.prefetch(np.arange(40_000), "t")), dim=0)) == 40_000


def test_deletes_during_look_ups_never_hand_out_a_row_that_a_ticket_knows():
    """One half of the keys comes and goes; the other half is trained, and nothing else touches it."""
    with EmbeddingDatabase({"t": 3}, SGD(lr=1.0), dtype="float64") as db:
        kept = np.arange(0, 200, 2)
        first = db.pull(db.prefetch(kept)).clone()
        stop = threading.Event()
        num_stale = 0

        def delete():
            random = np.random.default_rng(1)
            while not stop.is_set():
                db.delete(random.choice(np.arange(1, 200, 2), 20))

        def train():
            nonlocal num_stale
            try:
                for _ in range(150):
                    coming = db.prefetch(np.arange(1, 200, 2))
                    ticket = db.prefetch(kept)
                    db.push(ticket, torch.ones(100, 3))
                    try:
                        db.push(coming, torch.full((100, 3), 1000.0))
                    except TicketError:
                        num_stale += 1
                    db.update()
            finally:
                stop.set()

        run_together(delete, train)
        found = db.pull(db.prefetch(kept))
        np.testing.assert_allclose(found, first - 150, atol=1e-9)


def test_deleted_records_are_used_again_once_no_ticket_knows_them():
    with EmbeddingDatabase({"t": 3}) as db:
        held = db.prefetch(range(100))
        held.wait()
        db.delete(range(100))
        db.prefetch(range(1000, 1100)).wait()
        assert db.memory().resting_records == 100
        with pytest.raises(TicketError, match="were deleted"):
            db.pull(held)
        del held
        gc.collect()
        db.prefetch(range(2000, 2100)).wait()
        assert db.memory().resting_records == 0
        assert db._rows.groups[0].arena.num_records == 200


def test_a_snapshot_and_a_save_stay_as_they_were_while_training_goes_on(tmp_path):
    with EmbeddingDatabase({"t": 4}, SGD(lr=0.1)) as db, EmbeddingDatabase({"t": 4}, SGD(lr=0.1)) as copy:
        keys = np.arange(3000)
        before = db.pull(db.prefetch(keys)).clone()
        snapshot = db.snapshot(on_unknown="default")
        stop, trained = threading.Event(), threading.Event()

        def train():
            random = np.random.default_rng(0)
            while not stop.is_set():
                ticket = db.prefetch(random.integers(0, 6000, 500))
                db.push(ticket, torch.ones(500, 4))
                db.update()
                trained.set()
                db.delete(random.integers(0, 6000, 5))

        def evaluate():
            try:
                assert trained.wait(30)
                for _ in range(15):
                    assert torch.equal(snapshot.pull(keys), before)
                    assert not snapshot.pull(keys + 3000).any()
                snapshot.save(tmp_path / "old")
                db.save(tmp_path / "new")
            finally:
                stop.set()

        run_together(train, evaluate)
        copy.load(tmp_path / "old")
        assert len(copy) == len(snapshot) == 3000
        assert torch.equal(copy.pull(copy.prefetch(keys)), before)
        copy.load(tmp_path / "new")
        assert copy.step > 0


def test_a_pull_sees_whole_updates():
    """All rows move by the same amount in every update, so a pull finds them equal."""
    with EmbeddingDatabase([TableSpec("t", 8, 1, 1)], SGD(lr=1.0)) as db:
        keys = np.arange(2000)
        stop = threading.Event()

        def train():
            try:
                for _ in range(60):
                    ticket = db.prefetch(keys)
                    db.push(ticket, torch.ones(2000, 8))
                    db.update()
            finally:
                stop.set()

        def read():
            ticket = db.prefetch(keys)
            while not stop.is_set():
                assert len(torch.unique(db.pull(ticket))) == 1

        run_together(train, read)
        assert db.pull(db.prefetch([0]))[0, 0] == 1 - 60


def test_a_load_during_a_push_or_an_update_drops_its_gradients(tmp_path, monkeypatch):
    """Records of the rows before would be those of other rows now."""
    with EmbeddingDatabase({"t": 4}, SGD(lr=1.0)) as db:
        saved = db.pull(db.prefetch([1, 2, 3])).clone()
        db.save(tmp_path / "saved")

        def load_first(*arguments):
            db.load(tmp_path / "saved")
            return row_gradients(*arguments)

        ticket = db.prefetch([1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(database, "row_gradients", load_first)
            with pytest.raises(TicketError, match="from before a load"):
                db.push(ticket, torch.ones(3, 4))
        assert db.update() == 0
        assert torch.equal(db.pull(db.prefetch([1, 2, 3])), saved)

        check_rate = db._rate

        def load_and_push(lr):
            db.load(tmp_path / "saved")
            db.push(db.prefetch([1, 2, 3]), torch.ones(3, 4))
            return check_rate(lr)

        monkeypatch.setattr(db, "_rate", load_and_push)
        assert db.update() == 3
        assert torch.equal(db.pull(db.prefetch([1, 2, 3])), saved - 1)


def test_a_chunk_that_cannot_be_had_leaves_everything_as_it_was(monkeypatch):
    with EmbeddingDatabase({"t": 4}) as db:
        before = db.pull(db.prefetch([1, 2, 3]))

        def fail(arena, count):
            raise OutOfMemoryError("no memory for more rows")

        with monkeypatch.context() as patch:
            patch.setattr(RecordArena, "allocate", fail)
            ticket = db.prefetch([3, 4, 5])
            with pytest.raises(OutOfMemoryError, match="no memory"):
                db.pull(ticket)
            with pytest.raises(MemoryError):
                db.push(ticket, torch.zeros(3, 4))
            assert len(db) == 3
        assert torch.equal(db.pull(db.prefetch([1, 2, 3])), before)
        assert len(db.pull(db.prefetch([3, 4, 5]))) == 3
