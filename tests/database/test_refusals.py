"""What the database refuses: with a reason, and with everything left as it was."""

import json

import numpy as np
import pytest
import torch

from rowhaul.checkpoint import CheckpointWriter
from rowhaul.database import EmbeddingDatabase, TicketError
from rowhaul.database.snapshot import Snapshot
from rowhaul.errors import CheckpointError, ConfigError, DataError, UnknownKeyError
from rowhaul.nn import EmbeddingBagConfig
from rowhaul.optim import SGD, Adagrad
from rowhaul.store import TableSpec


@pytest.fixture
def db():
    with EmbeddingDatabase({"t": 3, "u": 2}, SGD(lr=0.1)) as database:
        database.prefetch({"t": [1, 2], "u": [3]}).wait()
        yield database


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.tensor([1.0, 2.0]), "int64 numbers or strings, got float32"),
        ([1.5], "got float64"),
        (np.array([[1, 2]]), r"one dimension, got shape \(1, 2\)"),
        (torch.tensor(3), r"one dimension, got shape \(\)"),
        ([[1], [2, 3]], "one dimension"),
        ([1, "a"], "one dimension|int64|strings"),
        ([2**63], "uint64|int64"),
        ([2**70], "int64"),
        ([True, False], "got bool"),
        (np.array([1], np.uint64), "view them as int64"),
        (torch.ones(2, dtype=torch.bfloat16), "BFloat16"),
        ("word", r"got a string; write \['word'\]"),
        ([None], "got object"),
    ],
)
def test_keys_that_are_none(db, keys, message):
    with pytest.raises(DataError, match=message):
        db.prefetch(keys, "t")
    with pytest.raises(DataError, match=message):
        db.delete(keys, "t")
    assert len(db) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": [1]}, "several tables"),
        ({"keys": {"v": [1]}}, "no table 'v'; the tables are t, u"),
        ({"keys": [1], "table": "v"}, "no table 'v'"),
        ({"keys": {"t": [1]}, "table": "t"}, "omit table"),
        ({"keys": [1, 2], "table": "t", "lengths": [1]}, "add up to 1, but 2 keys were given"),
        ({"keys": [1, 2], "table": "t", "lengths": [3, -1]}, "must not be negative"),
        ({"keys": [1, 2], "table": "t", "lengths": [2**62] * 4 + [2]}, "but 2 keys were given"),
        ({"keys": [1, 2], "table": "t", "lengths": [1.0, 1.0]}, "whole numbers"),
        ({"keys": [1, 2], "table": "t", "lengths": [[1], [1, 0]]}, "whole numbers in one dimension"),
        (
            {"keys": [1, 2], "table": "t", "lengths": torch.ones(2, dtype=torch.bfloat16)},
            "whole numbers in one dimension",
        ),
        ({"keys": [1, 2], "table": "t", "pooling": "sum"}, "needs lengths"),
        ({"keys": [1, 2], "table": "t", "lengths": [2], "pooling": "max"}, "'sum' or 'mean', got 'max'"),
        ({"keys": {"t": [1]}, "lengths": {"t": [1]}, "pooling": {"v": "mean"}}, "no table 'v'"),
        ({"keys": {"t": [1]}, "lengths": [1]}, "lengths must be too"),
        ({"keys": {"t": [1]}, "lengths": {"u": [1]}}, "no keys"),
    ],
)
def test_requests_that_make_no_sense(db, arguments, message):
    with pytest.raises((DataError, ConfigError), match=message):
        db.prefetch(**arguments)
    assert len(db) == 3


def test_gradients_that_do_not_match_leave_the_ticket_good(db):
    ticket = db.prefetch({"t": [1, 2, 1], "u": [3]})
    good = {"t": torch.ones(3, 3), "u": torch.ones(1, 2)}
    for bad, message in [
        ({**good, "t": torch.ones(2, 3)}, r"shape \(2, 3\), but the ticket's vectors are \(3, 3\)"),
        ({**good, "u": torch.ones(1, 3)}, r"shape \(1, 3\)"),
        ({"t": good["t"]}, r"tables \['t'\], but the ticket is for \['t', 'u'\]"),
        (good["t"], "several tables"),
        ({**good, "t": torch.ones(3, 3, dtype=torch.int64)}, "floating-point"),
        ({**good, "t": None}, "no gradient"),
        ({**good, "t": torch.ones(3, 3).to_sparse()}, "dense"),
        ({**good, "t": "text"}, "tensor or an array"),
    ]:
        with pytest.raises(DataError, match=message):
            db.push(ticket, bad)
    assert db.update() == 0
    db.push(ticket, good)
    assert db.update() == 3


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_leave_rows_and_ticket_good(db, number):
    ticket = db.prefetch({"t": [1, 2, 1], "u": [3]})
    before = db.pull(ticket)
    bad = {"t": torch.ones(3, 3), "u": torch.ones(1, 2)}
    bad["t"][1, 2] = number
    with pytest.raises(DataError, match=r"table 't': the gradient of key 2 is not finite \(1 such\)"):
        db.push(ticket, bad)
    assert db.update() == 0
    assert all(torch.equal(one, before[name]) for name, one in db.pull(ticket).items())
    db.push(ticket, {name: torch.full_like(one, 3e38) for name, one in bad.items()})  # but their sum is
    db.discard_pushed()


def test_gradients_of_bags_are_finite_but_for_empty_ones(db):
    given, wrong = torch.ones(3, 3), float("nan")
    given[1] = wrong  # as a mean of nothing has it
    ticket = db.prefetch([5, 6, 7], "t", lengths=[2, 0, 1])
    db.push(ticket, given)
    assert db.update() == 3
    assert bool(torch.isfinite(db.pull(db.prefetch([5, 6, 7], "t"))).all())
    given[2] = wrong
    with pytest.raises(DataError, match="the gradient of the bag that begins with key 7 is not finite"):
        db.push(db.prefetch([5, 6, 7], "t", lengths=[2, 0, 1]), given)


def test_a_ticket_is_good_for_one_push(db):
    ticket = db.prefetch([1, 2], "t")
    before = db.pull(ticket)
    db.push(ticket, torch.ones(2, 3))
    with pytest.raises(TicketError, match="was pushed before"):
        db.push(ticket, torch.ones(2, 3))
    with pytest.raises(TicketError, match="was pushed before"):
        db.pull(ticket)
    db.update()
    assert torch.allclose(db.pull(db.prefetch([1, 2], "t")), before - 0.1)


def test_a_gradient_that_changes_before_the_update_is_noticed(db):
    ticket = db.prefetch([1, 2], "t")
    before = db.pull(ticket)
    gradient = torch.ones(2, 3)
    db.push(ticket, gradient)
    gradient.add_(1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"changed between push and update.*discard_pushed\(\)"):
            db.update()
    assert torch.equal(db.pull(db.prefetch([1, 2], "t")), before)
    assert db.step == 0
    db.discard_pushed()
    assert db.update() == 0


def test_gradients_of_inference_mode_are_copied(db):
    ticket = db.prefetch([1, 2], "t")
    before = db.pull(ticket)
    with torch.inference_mode():
        gradient = torch.ones(2, 3)
        db.push(ticket, gradient)
        gradient.zero_()
    other = db.prefetch([3], "u")
    with torch.inference_mode():
        twos = torch.full((1, 2), 2.0)
    db.push(other, twos)
    assert db.update() == 3
    assert torch.allclose(db.pull(db.prefetch([1, 2], "t")), before - 0.1)


def test_tickets_of_others_and_of_the_closed(db):
    with EmbeddingDatabase({"t": 3}) as other:
        ticket = other.prefetch([1])
        with pytest.raises(TicketError, match="another database"):
            db.pull(ticket)
    with pytest.raises(ConfigError, match="a ticket from prefetch"):
        db.pull([1, 2])
    for use in (
        lambda: other.pull(ticket),
        lambda: other.push(ticket, torch.ones(1, 3)),
        other.update,
        other.snapshot,
        lambda: other.prefetch([1]),
        lambda: len(other),
        lambda: other.delete([1]),
        other.memory,
    ):
        with pytest.raises(ConfigError, match="database is closed"):
            use()
    other.close()


def test_rates_and_outputs_that_cannot_be(db):
    for lr in (-1, float("nan"), "0.1", True):
        with pytest.raises(ConfigError, match="lr must be a number"):
            db.update(lr)
    ticket = db.prefetch([1], "t")
    for out in (torch.empty(1, 2), torch.empty(1, 3, dtype=torch.float64), [[0, 0, 0]]):
        with pytest.raises(DataError, match="out must be"):
            db.pull(ticket, out=out)
    with pytest.raises(DataError, match=r"out must be too: {table: tensor}, got Tensor"):
        db.pull(db.prefetch({"t": [1], "u": [3]}), out=torch.empty(1, 3))
    assert db.step == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": {}}, "needs a table"),
        ({"tables": {"a": 0}}, "dim must be"),
        ({"tables": {"a": True}}, "dim must be"),
        ({"tables": {"": 3}}, "name"),
        ({"tables": [("a", 3)]}, "TableSpec or EmbeddingBagConfig"),
        ({"tables": [TableSpec("a", 3, 1, -1)]}, "between 1 and -1"),
        (
            {"tables": EmbeddingBagConfig(embedding_dim=3, name="a", feature_names=["f"], frozen=True)},
            "table 'a' is frozen, but .* leave out frozen=True",
        ),
        ({"tables": [TableSpec("a", 3, 0, 1)] * 2}, "two tables are called 'a'"),
        ({"tables": {"a": 3}, "optimizer": "sgdd"}, "unknown row optimizer 'sgdd'"),
        ({"tables": {"a": 3}, "optimizer": SGD(lr=1), "lr": 2}, "already has a learning rate"),
        ({"tables": {"a": 3}, "lr": -1}, "lr must be"),
        ({"tables": {"a": 3}, "dtype": "float16"}, "float32 or float64"),
        ({"tables": {"a": 3}, "dtype": "nonsense"}, "float32 or float64"),
        ({"tables": {"a": 3}, "num_threads": 0}, "num_threads"),
        ({"tables": {"a": 3}, "seed": 0.5}, "seed"),
    ],
)
def test_databases_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EmbeddingDatabase(**arguments)


def test_a_snapshot_inserts_nothing_and_knows_what_is_unknown(db):
    snapshot = db.snapshot("error")
    with pytest.raises(UnknownKeyError, match="key 9 was never trained"):
        snapshot.pull([1, 9], "t")
    with pytest.raises(ConfigError, match="on_unknown must be one of"):
        db.snapshot("zero")
    db.snapshot().pull([9], "t")
    assert len(db) == 3
    snapshot.close()
    with pytest.raises(ConfigError, match="snapshot is closed"):
        snapshot.pull([1], "t")


@pytest.mark.parametrize("called", ["find", "read"])
def test_a_snapshot_closed_during_a_pull_says_so(db, monkeypatch, called):
    snapshot = db.snapshot()
    method = getattr(Snapshot, called)

    def close_first(*arguments):
        snapshot.close()
        return method(*arguments)

    monkeypatch.setattr(Snapshot, called, close_first)
    with pytest.raises(ConfigError, match="snapshot is closed"):
        snapshot.pull([1, 2], "t")


def test_a_snapshot_closed_while_its_rows_are_written_says_so(db):
    snapshot = db.snapshot()
    blocks = snapshot.blocks("t")
    snapshot.close()
    with pytest.raises(ConfigError, match="snapshot is closed"):
        next(blocks)


def test_a_thread_cannot_delete_while_it_reads_a_snapshot(db):
    snapshot = db.snapshot()
    blocks = snapshot.blocks("t")
    next(blocks)
    for refused in (lambda: db.delete([1], "t"), lambda: next(snapshot.blocks("u"))):
        with pytest.raises(ConfigError, match="snapshot are being read; finish or close the iterator first"):
            refused()
    assert len(db) == 3
    blocks.close()
    assert db.delete([1], "t") == 1
    assert sum(len(keys) for keys, _ in snapshot.blocks("t")) == 2
    assert db.delete([2], "t") == 1


def write_checkpoint(path, facts, format="whole"):
    with CheckpointWriter(path) as writer:
        writer.facts.update(facts)
        for name, dim in (("t", 3), ("u", 2)):
            block = {"keys": np.array([1, 2]), "values": np.ones((2, dim), np.float32)}
            writer.blocks(name, [block], dim, 0, "float32", format)


def test_rows_that_are_not_whole_rows_of_ids_are_refused(db, tmp_path):
    for format in ("slots", "slots-int8", "chunked"):
        write_checkpoint(tmp_path / format, {"row_optimizer": "sgd", "row_steps": [3]}, format)
        with pytest.raises(CheckpointError, match=f"table 't' is in format '{format}'.*without them"):
            db.load(tmp_path / format)
        assert len(db) == 3


def test_the_steps_of_a_checkpoint_written_by_hand(db, tmp_path):
    write_checkpoint(tmp_path / "without", {"row_optimizer": "sgd"})
    with pytest.raises(CheckpointError, match="does not say how many steps"):
        db.load(tmp_path / "without")
    write_checkpoint(tmp_path / "unnamed", {"step": 10})
    with pytest.raises(CheckpointError, match="no row_optimizer in its facts"):
        db.load(tmp_path / "unnamed")
    assert len(db) == 3
    write_checkpoint(tmp_path / "with", {"row_optimizer": "sgd", "step": 10})
    db.load(tmp_path / "with")
    assert (len(db), db.step) == (4, 10)


def test_damaged_and_foreign_checkpoints_change_nothing(db, tmp_path):
    db.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="choose another folder"):
        db.save(tmp_path / "saved")
    ticket = db.prefetch([1, 2], "t")
    db.push(ticket, torch.ones(2, 3))
    db.update()
    trained = db.pull(db.prefetch([1, 2], "t"))
    for file in sorted((tmp_path / "saved").glob("rows-*")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=file.name):
            db.load(tmp_path / "saved")
        file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        db.load(tmp_path / "nowhere")
    assert torch.equal(db.pull(db.prefetch([1, 2], "t")), trained)
    assert db.step == 1
    for tables, optimizer in (({"t": 4, "u": 2}, SGD(lr=0.1)), ({"t": 3}, SGD(lr=0.1))):
        with (
            EmbeddingDatabase(tables, optimizer) as other,
            pytest.raises(CheckpointError, match="other tables"),
        ):
            other.load(tmp_path / "saved")
    with EmbeddingDatabase({"t": 3, "u": 2}, Adagrad(lr=1)) as other:
        with pytest.raises(CheckpointError, match="sgd"):
            other.load(tmp_path / "saved")
        assert len(other) == 0
    facts = json.loads((tmp_path / "saved" / "manifest.json").read_text())["facts"]
    assert facts["row_optimizer"] == "sgd"


def test_another_seed_than_the_saved_one_is_told(tmp_path):
    with EmbeddingDatabase({"t": 3}, seed=1) as db:
        db.prefetch([1]).wait()
        db.save(tmp_path / "saved")
    with (
        EmbeddingDatabase({"t": 3}, seed=2) as other,
        pytest.warns(UserWarning, match="saved with seed=1, and this database has seed=2"),
    ):
        other.load(tmp_path / "saved")
    with EmbeddingDatabase({"t": 3}, seed=1) as same:  # a warning would be an error
        same.load(tmp_path / "saved")
