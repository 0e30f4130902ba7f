"""The database against a dictionary of rows, over generated histories."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_database import PlainDatabase

from rowhaul.database import EmbeddingDatabase, TicketError
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store import TableSpec

NASTY = [0, -1, 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2**62, -(2**33)]
KEYS = st.one_of(st.integers(-8, 8), st.sampled_from(NASTY))
RULES = [SGD(lr=0.3), Adagrad(lr=0.1, initial_accumulator_value=1e-3), Adam(lr=0.1, weight_decay=0.01)]
RULES += [RowwiseAdagrad(lr=0.1), RowwiseAdagrad(lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5)]
TABLES = [TableSpec("a", 3, -1, 1), TableSpec("b", 3, 0, 2), TableSpec("c", 5, -0.1, 0.1)]
NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def requests(draw):
    """Keys of some tables, as they are or in bags."""
    asked = {}
    for table in draw(st.sets(NAMES, min_size=1)):
        if draw(st.booleans()):
            asked[table] = (draw(st.lists(KEYS, max_size=12)), None, "sum")
        else:
            lengths = draw(st.lists(st.integers(0, 4), max_size=5))
            keys = draw(st.lists(KEYS, min_size=sum(lengths), max_size=sum(lengths)))
            asked[table] = (keys, lengths, draw(st.sampled_from(["sum", "mean"])))
    return asked


class Histories(RuleBasedStateMachine):
    """Every call in any order: rows, states and counts stay those of the dictionary."""

    @initialize(rule_of=st.sampled_from(RULES), threads=st.integers(1, 2))
    def begin(self, rule_of, threads):
        self.db = EmbeddingDatabase(TABLES, rule_of, dtype="float64", seed=5, num_threads=threads)
        self.plain = PlainDatabase(self.db.settings)
        self.random = np.random.default_rng(3)
        self.tickets, self.snapshots = [], []  # each with what it was asked for, or the dictionary then

    def teardown(self):
        if hasattr(self, "db"):
            self.db.close()

    @rule(asked=requests())
    def prefetch(self, asked):
        lengths = {table: lengths for table, (_, lengths, _) in asked.items() if lengths is not None}
        pooling = {table: asked[table][2] for table in lengths}
        keys = {table: keys for table, (keys, _, _) in asked.items()}
        ticket = self.db.prefetch(keys, lengths=lengths, pooling=pooling)
        ticket.wait()
        for table, given in keys.items():
            self.plain.insert(table, given)
        self.tickets.append((ticket, asked, set()))

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 100), pushes=st.booleans())
    def use_ticket(self, which, pushes):
        ticket, asked, gone = self.tickets[which % len(self.tickets)]
        if any((table, key) in gone for table, (keys, _, _) in asked.items() for key in keys):
            with pytest.raises(TicketError, match="were deleted"):
                self.db.pull(ticket)
            with pytest.raises(TicketError, match="were deleted"):
                self.db.push(ticket, {})
            return
        pulled = self.db.pull(ticket)
        for table, given in asked.items():
            np.testing.assert_allclose(pulled[table], self.plain.pull(table, *given), rtol=1e-11, atol=1e-13)
        if pushes:
            gradients = {table: self.random.normal(size=rows.shape) for table, rows in pulled.items()}
            self.db.push(ticket, gradients)
            for table, (keys, lengths, pooling) in asked.items():
                self.plain.push(table, keys, gradients[table], lengths, pooling)
            self.tickets.remove((ticket, asked, gone))

    @rule(asked=requests())
    def train(self, asked):
        self.prefetch(asked)
        self.use_ticket(len(self.tickets) - 1, True)
        self.update(None)

    @rule(lr=st.sampled_from([None, 0.0, 0.05]))
    def update(self, lr):
        expected = self.plain.update(self.db.settings.optimizer.lr if lr is None else lr)
        assert self.db.update(lr) == expected

    @rule(table=NAMES, keys=st.lists(KEYS, max_size=6))
    def delete(self, table, keys):
        assert self.db.delete({table: keys}) == self.plain.delete(table, keys)
        for _, _, gone in self.tickets:
            gone |= {(table, key) for key in keys}

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 100))
    def delete_what_a_ticket_knows(self, which):
        _, asked, _ = self.tickets[which % len(self.tickets)]
        for table, (keys, _, _) in asked.items():
            self.delete(table, keys[-1:])

    @rule(on_unknown=st.sampled_from(["init", "default"]))
    def take_snapshot(self, on_unknown):
        if len(self.snapshots) < 3:
            self.snapshots.append((self.db.snapshot(on_unknown), self.plain.copy(), on_unknown))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 100), asked=requests(), closes=st.booleans())
    def read_snapshot(self, which, asked, closes):
        snapshot, then, on_unknown = self.snapshots[which % len(self.snapshots)]
        for table, (keys, lengths, pooling) in asked.items():
            cut = {} if lengths is None else {"lengths": lengths, "pooling": pooling}
            expected = then.pull(table, keys, lengths, pooling, on_unknown)
            np.testing.assert_allclose(snapshot.pull(keys, table, **cut), expected, rtol=1e-11, atol=1e-13)
        self.check_all_rows(snapshot, then)
        if closes:
            snapshot.close()
            self.snapshots.remove((snapshot, then, on_unknown))

    @rule(from_snapshot=st.booleans())
    def save_and_load(self, from_snapshot):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            then = self.plain
            if from_snapshot and self.snapshots:
                snapshot, then, _ = self.snapshots[-1]
                snapshot.save(path)
            else:
                self.db.save(path)
            self.db.load(path)
        self.plain = then.copy()
        self.plain.pushed.clear()
        for ticket, _, _ in self.tickets:
            with pytest.raises(TicketError, match="before a load"):
                self.db.pull(ticket)
        self.tickets.clear()

    @invariant()
    def counts_agree(self):
        if hasattr(self, "db"):
            assert len(self.db) == sum(len(rows) for rows in self.plain.rows.values())
            assert self.db.step == self.plain.number

    def check_all_rows(self, snapshot, plain):
        for table, rows in plain.rows.items():
            assert snapshot.num_rows(table) == len(rows)
            found = {
                int(key): record
                for keys, records in snapshot.blocks(table)
                for key, record in zip(keys, records, strict=True)
            }
            assert found.keys() == rows.keys()
            for key, (row, state) in rows.items():
                np.testing.assert_allclose(found[key], [*row, *state], rtol=1e-11, atol=1e-13)

    @rule()
    def all_rows_and_states_agree(self):
        with self.db.snapshot("error") as snapshot:
            self.check_all_rows(snapshot, self.plain)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=8, stateful_step_count=25)


def random_request(random):
    """Keys of some tables, many of them asked for before."""
    asked = {}
    for table in random.permutation(["a", "b", "c"])[: random.integers(1, 4)].tolist():
        lengths = None if random.integers(2) else random.integers(0, 4, random.integers(1, 5)).tolist()
        count = random.integers(1, 12) if lengths is None else sum(lengths)
        keys = [int(key) for key in random.choice([*range(-8, 9), *NASTY], count)]
        asked[table] = (keys, lengths, str(random.choice(["sum", "mean"])))
    return asked


@pytest.mark.parametrize("rule_of", RULES, ids=lambda rule: rule.name)
def test_long_random_histories(rule_of):
    """The same rules, many more of them in one history than hypothesis would choose."""
    random = np.random.default_rng(RULES.index(rule_of))
    history = Histories()
    history.begin(rule_of, 2)
    for _ in range(120):
        which = int(random.integers(100))
        match str(random.choice(["prefetch", "use", "use", "train", "delete", "take", "read", "save"])):
            case "prefetch":
                history.prefetch(random_request(random))
            case "use" if history.tickets:
                history.use_ticket(which, which % 3 > 0)
                if which % 4 == 0:
                    history.update(None)
            case "train":
                history.train(random_request(random))
            case "delete" if history.tickets and which % 2:
                history.delete_what_a_ticket_knows(which)
            case "delete":  # also what was pushed and waits for an update
                history.delete(str(random.choice(["a", "b", "c"])), random.integers(-8, 9, 4).tolist())
            case "take":
                history.take_snapshot("default" if which % 2 else "init")
            case "read" if history.snapshots:
                history.read_snapshot(which, random_request(random), which % 5 == 0)
            case "save" if which % 4 == 0:
                history.save_and_load(which % 8 == 0)
        history.counts_agree()
        history.all_rows_and_states_agree()
    history.teardown()


def test_strings_are_keys_in_every_form_that_holds_them():
    import pyarrow as pa

    words = ["ä", "beta", "", "beta"]
    with EmbeddingDatabase({"t": 4}) as db:
        expected = db.pull(db.prefetch(words))
        assert db.num_rows("t") == 3
        for form in (tuple(words), np.array(words), np.array(words, object), pa.array(words)):
            assert torch.equal(db.pull(db.prefetch(form)), expected)
        assert len(db) == 3
        numbers = pa.array([5, -5])
        assert torch.equal(db.pull(db.prefetch(numbers)), db.pull(db.prefetch(torch.tensor([5, -5]))))


def test_one_row_is_the_same_whatever_the_number_of_threads():
    results = []
    for threads in (1, 2):
        with EmbeddingDatabase({"t": 64}, "adagrad", lr=0.1, num_threads=threads) as db:
            keys = np.random.default_rng(0).integers(0, 6000, 20_000)
            for repeat in range(2):
                for pooled in ({}, {"lengths": np.full(5000, 4), "pooling": "mean"}):
                    ticket = db.prefetch(keys, **pooled)
                    rows = db.pull(ticket)
                    db.push(ticket, rows * 3 + repeat)
                db.update()
            results.append(db.pull(db.prefetch(np.arange(6000))))
    assert torch.equal(*results)


def test_a_pull_into_a_given_tensor_fills_it():
    with EmbeddingDatabase({"t": 4, "u": 2}) as db:
        ticket = db.prefetch({"t": [1, 2], "u": [3]})
        out = {"t": torch.zeros(2, 4), "u": torch.zeros(1, 2)}
        given = db.pull(ticket, out=out)
        assert given["t"] is out["t"]
        assert torch.equal(db.pull(ticket)["t"], out["t"])
        assert torch.equal(db.pull(ticket)["u"], out["u"])
