"""The calls of a distributed database: moving rows, what is sent, mistakes, threads and delays."""

import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from database_ranks import run_ranks

from rowhaul.checkpoint import CheckpointWriter
from rowhaul.database import DistributedEmbeddingDatabase, EmbeddingDatabase, TicketError
from rowhaul.database.distributed.dividing import owners_of
from rowhaul.errors import CheckpointError, ClusterError, ConfigError, DataError, UnknownKeyError
from rowhaul.nn import EmbeddingBagConfig
from rowhaul.optim import SGD
from rowhaul.transport.in_process import InProcessNetwork


def pull(db, keys, **how):
    return db.pull(db.prefetch(keys, **how)).clone()


def move_and_train(db):
    keys = np.arange(100)
    own = keys[db.rank :: db.num_ranks]
    before = pull(db, keys)
    db.push(db.prefetch(own), torch.ones(len(own), 4))
    db.update()
    trained = pull(db, keys)
    snapshot = db.snapshot()
    db.push(db.prefetch(own), torch.ones(len(own), 4))
    db.update()
    later = pull(db, keys)
    old_ticket = db.prefetch(keys)
    db.pull(old_ticket)
    counts = [db.num_rows("t")]
    assert db.migrate(keys if db.rank == 0 else [], 1) == np.count_nonzero(owners_of(keys, db.num_ranks) != 1)
    counts.append(db.num_rows("t"))
    with pytest.raises(TicketError, match="deleted or moved"):
        db.pull(old_ticket)
    assert torch.equal(pull(db, keys), later)
    assert torch.equal(snapshot.pull(keys), trained)
    db.push(db.prefetch(own), torch.ones(len(own), 4))
    db.update()
    assert torch.equal(snapshot.pull(keys), trained)
    snapshot.close()
    assert db.migrate(keys[:50], 0) == 50
    assert db.delete(keys[40:60]) == 20
    counts.append(db.num_rows("t"))
    assert db.migrate([5, 1000], 0) == 0  # there already, and unknown: neither moves or is made
    assert db.migrate(keys[:40], 1) == 40  # home again, for those that rank 1 owns
    assert db.total_rows() == {"t": 80}
    return before, trained, pull(db, keys), counts


def test_rows_move_with_their_state_and_everything_finds_them():
    results = run_ranks(3, move_and_train, tables={"t": 4}, optimizer="adam", lr=0.1, dtype="float64")
    with EmbeddingDatabase({"t": 4}, "adam", lr=0.1, dtype="float64") as one:
        keys = np.arange(100)
        for _ in range(3):
            one.push(one.prefetch(keys), torch.ones(100, 4))
            one.update()
        one.delete(keys[40:60])
        expected = pull(one, keys)
    for rank, (_, _, found, counts) in enumerate(results):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        assert counts[0] == np.count_nonzero(owners_of(keys, 3) == rank)
        assert counts[1:] == [[0, 40], [100, 40], [0, 0]][rank]


class CountingLinks:
    """Links that count what they send."""

    def __init__(self, links):
        self.rank, self.num_ranks, self._links, self.sent = links.rank, links.num_ranks, links, 0

    def post(self, receives, sends):
        self.sent += sum(len(data) for data in sends.values())
        return self._links.post(receives, sends)


def bytes_of_a_step(db, lengths, keys):
    """Bytes that pull and push of one ticket send between the ranks."""
    calls = db._traffic._calls
    calls._links = counting = CountingLinks(calls._links)
    ticket = db.prefetch(keys, lengths=lengths)
    rows = db.pull(ticket)
    db.push(ticket, rows)
    db.update()
    return counting.sent


def test_bags_are_pooled_where_rows_are_stored_when_that_sends_less():
    keys = np.arange(400)
    large_bags = sum(run_ranks(2, bytes_of_a_step, [200, 200], keys, tables={"t": 32}))
    small_bags = sum(run_ranks(2, bytes_of_a_step, [1] * 400, keys, tables={"t": 32}))
    headers = 2 * 3 * 8 * 8
    assert large_bags <= 2 * 2 * 2 * 32 * 4 + headers  # a sum forth and its gradient back, for every bag
    assert small_bags >= 2 * 400 * 32 * 4


def differ(db):
    ticket, other = db.prefetch([1, 2]), db.prefetch([3])
    messages = []
    ticket.wait()
    other.wait()
    for call in (
        lambda: db.pull(ticket) if db.rank else db.update(),
        lambda: db.pull(ticket),
    ):
        with pytest.raises(ClusterError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_ranks_that_call_different_things_are_told():
    for rank, (first, later) in enumerate(run_ranks(2, differ, tables={"t": 4})):
        assert "same calls in the same order" in first
        assert "calls pull 1 as call 1" in first if rank == 0 else "calls update(lr=0.01)" in first
        assert "failed before" in later


def differ_in_tickets_and_rates(db, what):
    tickets = [db.prefetch([1, 2]), db.prefetch([3, 4])]
    for ticket in tickets:
        ticket.wait()
    call = (lambda: db.pull(tickets[db.rank])) if what == "ticket" else (lambda: db.update(0.5 + db.rank))
    with pytest.raises(ClusterError) as caught:
        call()
    return str(caught.value)


def test_other_tickets_and_other_rates_are_told():
    for message in run_ranks(2, differ_in_tickets_and_rates, "ticket", tables={"t": 4}):
        assert "pull 1" in message
        assert "pull 2" in message
    for message in run_ranks(2, differ_in_tickets_and_rates, "rate", tables={"t": 4}):
        assert "update(lr=0.5)" in message
        assert "update(lr=1.5)" in message


def leave_alone(db):
    if db.rank == 1:
        return None
    with pytest.raises(ClusterError, match="has every rank made the same calls") as caught:
        db.pull(db.prefetch([1]))
    return str(caught.value)


def test_a_rank_that_does_not_call_is_an_error_after_the_time_out():
    assert "did not arrive within 0.5 s" in run_ranks(2, leave_alone, tables={"t": 4}, timeout_seconds=0.5)[0]


def test_ranks_with_other_settings_are_refused():
    network = InProcessNetwork(2, timeout_seconds=10)

    def make(rank):
        with pytest.raises(ClusterError, match=f"rank {1 - rank} has other tables"):
            DistributedEmbeddingDatabase({"t": 4 + rank}, links=[network.links(rank) for _ in range(3)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, range(2)))
    with pytest.raises(ConfigError, match="init_process_group"):
        DistributedEmbeddingDatabase({"t": 4})


def test_ranks_may_have_functions_of_their_own_for_first_values():
    network = InProcessNetwork(2, timeout_seconds=10)

    def work(rank):
        def first_values(seed, keys):
            return np.repeat(keys[:, None] + seed, 4, axis=1)

        config = EmbeddingBagConfig(embedding_dim=4, name="t", feature_names=["f"], init_fn=first_values)
        links = [network.links(rank) for _ in range(3)]
        with DistributedEmbeddingDatabase([config], seed=3, links=links) as db:
            return db.pull(db.prefetch([rank, 10, 20]))[:, 0].tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[3, 13, 23], [4, 13, 23]]


def mistakes(db, folder):
    """A rank's own mistakes are its own: the others wait until it has made up its mind."""
    if db.rank == 0:
        with pytest.raises(DataError, match="got float64"):
            db.prefetch([0.5])
    ticket = db.prefetch([1, 2])
    rows = db.pull(ticket)
    if db.rank == 1:
        with pytest.raises(DataError, match="shape"):
            db.push(ticket, torch.ones(3, 4))
        with pytest.raises(ConfigError, match="lr must be"):
            db.update(-1)
    db.push(ticket, torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"call update\(\) before"):
        db.migrate([1], 0)
    with pytest.raises(TicketError, match="pushed before"):
        db.push(ticket, torch.ones(2, 4))
    db.update(1.0)
    assert torch.allclose(pull(db, [1, 2]), rows - 1 * db.num_ranks)
    with pytest.raises(ConfigError, match="ranks 0 to 1; got 2"):
        db.migrate([1], 2)
    snapshot = db.snapshot("error")
    expected = pytest.raises(UnknownKeyError, match="key 9 ")
    if db.rank == 0:
        with expected:
            snapshot.pull([1, 9])
    else:
        snapshot.pull([1])
    snapshot.close()
    db.save(folder / "saved")
    with pytest.raises(ClusterError if db.rank else CheckpointError, match=r"save failed|choose another"):
        db.save(folder / "saved")
    if db.rank == 0:
        (file,) = (folder / "saved").glob("rows-0000-r0001*")
        file.write_bytes(file.read_bytes()[:-1])
    db.total_rows()  # all wait for that
    with pytest.raises(CheckpointError, match=r"rows-0000-r0001"):
        db.load(folder / "saved")
    assert db.total_rows() == {"t": 2}


def test_mistakes_change_nothing_and_work_goes_on(tmp_path):
    run_ranks(2, mistakes, tmp_path, tables={"t": 4}, optimizer=SGD(lr=0.1))


def save(db, path):
    ticket = db.prefetch(np.arange(200) + 10 * db.rank)
    db.push(ticket, db.pull(ticket) * 7)
    db.update()
    db.migrate(range(50), 1)
    db.save(path)
    return pull(db, range(200)), db.step


def load(db, path):
    db.load(path)
    return pull(db, range(200)), db.step, db.total_rows()["t"]


def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path):
    saved, step = run_ranks(3, save, tmp_path / "x", tables={"t": 4})[0]
    for num_ranks in (1, 2, 4):
        for rows, steps, count in run_ranks(num_ranks, load, tmp_path / "x", tables={"t": 4}):
            assert torch.equal(rows, saved)
            assert (steps, count) == (step, 220)
    with EmbeddingDatabase({"t": 4}) as one:
        one.load(tmp_path / "x")
        assert torch.equal(pull(one, range(200)), saved)
        one.save(tmp_path / "y")
    assert torch.equal(run_ranks(2, load, tmp_path / "y", tables={"t": 4})[1][0], saved)


def load_refused(db, path):
    with pytest.raises(CheckpointError, match="format 'slots'"):
        db.load(path)
    return db.total_rows()["t"]


def test_a_checkpoint_of_a_budget_is_refused_by_all_ranks(tmp_path):
    with CheckpointWriter(tmp_path / "x") as writer:
        writer.facts.update(row_optimizer="sgd", row_steps=[1])
        block = {"keys": np.arange(4), "values": np.ones((4, 4), np.float32)}
        writer.blocks("t", [block], 4, 0, "float32", "slots")
    assert run_ranks(2, load_refused, tmp_path / "x", tables={"t": 4}, optimizer=SGD(lr=0.1)) == [0, 0]


def snapshot_beside_an_update(db, told):
    """Rank 0 has finished the update, and rank 1 has not stepped its rows."""
    rows = db._rows
    push_ones(db)
    if db.rank == 1:
        step, may_step = rows.step, threading.Event()
        rows.step = lambda *arguments: (may_step.wait(30), step(*arguments))[1]
        updating = threading.Thread(target=db.update)
        updating.start()
    else:
        db.update()
    with pytest.raises(ClusterError, match="numbers of updates: 1 on rank 0, 0 on rank 1; take it"):
        db.snapshot()
    if db.rank == 1:
        may_step.set()
        updating.join()
    told.wait(30)
    assert db.memory().snapshot_bytes == 0
    with db.snapshot() as snapshot:
        assert snapshot.step == db.step == 1
        assert torch.equal(snapshot.pull([1, 2]), pull(db, [1, 2]))


def push_ones(db):
    ticket = db.prefetch([1, 2])
    db.push(ticket, torch.ones(2, 4))


def test_a_snapshot_beside_an_update_is_refused_and_may_be_tried_again():
    run_ranks(2, snapshot_beside_an_update, threading.Barrier(2), tables={"t": 4})


def snapshot_after_the_step(db):
    """The rows have moved, but `update` has not returned."""
    update, taken = db._traffic.update, []

    def update_and_look(*arguments):
        moved = update(*arguments)
        taken.append(db.snapshot())
        return moved

    db._traffic.update = update_and_look
    push_ones(db)
    db.update()
    assert torch.equal(taken[0].pull([1, 2]), pull(db, [1, 2]))
    return taken[0].step


def test_a_snapshot_counts_the_step_that_its_rows_have_taken():
    assert run_ranks(1, snapshot_after_the_step, tables={"t": 4}) == [1]


def drop_pushed(db, path):
    """Push, and drop it by a load or a call; return whether every message was waited for."""
    before = pull(db, [1, 2])
    db.save(path)
    messages = []
    for drop in (lambda: db.load(path), db.discard_pushed):
        push_ones(db)
        assert db.memory().gradient_bytes >= 2 * 4 * 4
        (pushed,) = db._traffic._pushed
        transfers = [*pushed.received, *pushed.sent]
        messages += [one for transfer in transfers for one in transfer.received.values()]
        messages += [one for transfer in transfers for one in transfer.sent.values()]
        drop()
        assert db.memory().gradient_bytes == 0
        db.migrate([1], 0)  # nothing waits
        assert db.update() == 0
        assert torch.equal(pull(db, [1, 2]), before)
    return [message.is_delivered for message in messages]


def test_what_is_dropped_has_arrived(tmp_path):
    """Gloo may break a connection when the buffer of a pending message is freed."""
    for complete in run_ranks(2, drop_pushed, tmp_path / "x", tables={"t": 4}):
        assert complete
        assert all(complete)


def discard_alone(db):
    push_ones(db)
    with pytest.raises(ClusterError) as caught:
        db.discard_pushed() if db.rank == 0 else db.update()
    return str(caught.value)


def test_one_rank_cannot_discard_alone():
    for message in run_ranks(2, discard_alone, tables={"t": 4}):
        assert "discard_pushed" in message


def train_beside_loading(db, num_steps):
    """Tickets come from a loading thread, two ahead; evaluation runs in a third thread."""
    tickets = queue.Queue(2)
    generator = np.random.default_rng(db.rank)

    def load_batches():
        for _ in range(num_steps):
            tickets.put(db.prefetch(generator.integers(0, 60, 30), lengths=[10] * 3, pooling="mean"))

    snapshot = db.snapshot()
    seen = []
    loader = threading.Thread(target=load_batches)
    evaluator = threading.Thread(target=lambda: seen.extend(snapshot.pull(range(20)) for _ in range(5)))
    loader.start()
    evaluator.start()
    for _ in range(num_steps):
        ticket = tickets.get()
        db.push(ticket, db.pull(ticket) + 1)
        db.update()
    loader.join()
    evaluator.join()
    assert all(torch.equal(one, seen[0]) for one in seen)
    return pull(db, range(60))


def test_threads_and_delays_change_no_bit():
    def delay():
        if random.random() < 0.3:
            time.sleep(random.random() * 0.002)

    runs = [
        run_ranks(3, train_beside_loading, 12, tables={"t": 8}, delay=wait, lr=0.1) for wait in (None, delay)
    ]
    assert all(torch.equal(rows, runs[0][0]) for run in runs for rows in run)


def push_what_is_not_finite(db, how):
    keys = np.arange(4) + 4 * db.rank
    ticket = db.prefetch(keys)
    before, gradients = db.pull(ticket).clone(), torch.ones(4, 4)
    push = getattr(db, how)
    bad = gradients.clone()
    bad[2, 1] = float("nan") if db.rank == 1 else 1
    with pytest.raises(DataError) as refused:
        push(ticket, bad)
    assert db.update() == 0
    assert torch.equal(db.pull(ticket), before)
    push(ticket, gradients)
    db.update()
    assert torch.equal(pull(db, keys), before - gradients)
    return str(refused.value)


@pytest.mark.parametrize("how", ["push", "push_joined"])
def test_a_gradient_that_is_not_finite_is_refused_by_all_ranks(how):
    messages = run_ranks(3, push_what_is_not_finite, how, tables={"t": 4}, optimizer=SGD(lr=1))
    assert "table 't': the gradient of key 6 is not finite" in messages[1]
    assert "a gradient of rank 1 is not finite" in messages[0] == messages[2]
