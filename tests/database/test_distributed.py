"""A database over several ranks equals one database that gets what all ranks give."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from database_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.database import EmbeddingDatabase
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store import TableSpec

TABLES = [TableSpec("a", 3, -1, 1), TableSpec("b", 3, 0, 2), TableSpec("c", 40, -0.1, 0.1)]
RULES = [SGD(lr=0.3), Adagrad(lr=0.1, initial_accumulator_value=1e-3), Adam(lr=0.1)]
RULES += [RowwiseAdagrad(lr=0.1, initial_accumulator_value=1e-2)]
NASTY = [0, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max]
KEYS = st.one_of(st.integers(0, 30), st.sampled_from(NASTY))
NAMES = ["a", "b", "c"]


@st.composite
def asks(draw, num_ranks):
    """What every rank asks for: keys of some tables, as they are or in bags, or nothing."""
    asked = []
    for _ in range(num_ranks):
        request = {"keys": {}, "lengths": {}, "pooling": {}}
        for table in draw(st.sets(st.sampled_from(NAMES))):
            if draw(st.booleans()):
                request["keys"][table] = draw(st.lists(KEYS, max_size=10))
                continue
            lengths = draw(st.lists(st.integers(0, 6), max_size=4))
            request["keys"][table] = draw(st.lists(KEYS, min_size=sum(lengths), max_size=sum(lengths)))
            request["lengths"][table] = lengths
            request["pooling"][table] = draw(st.sampled_from(["sum", "mean"]))
        asked.append(request)
    return asked


@st.composite
def histories(draw):
    num_ranks = draw(st.integers(1, 4))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["train", "train", "train", "delete", "migrate", "snapshot", "save"]))
        if kind == "train":
            steps.append((kind, [draw(asks(num_ranks)) for _ in range(draw(st.integers(1, 2)))]))
        elif kind in ("delete", "migrate"):
            keys = [draw(st.lists(KEYS, max_size=8)) for _ in range(num_ranks)]
            steps.append((kind, draw(st.sampled_from(NAMES)), keys, draw(st.integers(0, num_ranks - 1))))
        else:
            steps.append((kind, draw(asks(num_ranks))))
    return num_ranks, draw(st.sampled_from(RULES)), steps


def gradient(rank, step, ask, table, shape):
    return np.random.default_rng([rank, step, ask, NAMES.index(table)]).normal(size=shape)


def follow(db, steps, folder):
    """One rank's part of a history: everything it read, and how many rows each call touched."""
    seen = []
    for number, (kind, *rest) in enumerate(steps):
        if kind == "train":
            tickets = [db.prefetch(**asked[db.rank]) for asked in rest[0]]
            pulled = [db.pull(ticket) for ticket in tickets]
            seen.append([{table: rows.clone() for table, rows in one.items()} for one in pulled])
            for ask, (ticket, rows) in enumerate(zip(tickets, pulled, strict=True)):
                db.push(ticket, {t: gradient(db.rank, number, ask, t, v.shape) for t, v in rows.items()})
            db.update()
        elif kind == "delete":
            seen.append(db.delete(rest[1][db.rank], rest[0]))
        elif kind == "migrate":
            db.migrate(rest[1][db.rank], rest[2], rest[0])
        elif kind == "snapshot":
            with db.snapshot("default") as snapshot:
                ticket = db.prefetch(**rest[0][db.rank])
                changed = {t: np.ones(v.shape) for t, v in db.pull(ticket).items()}
                db.push(ticket, changed)
                db.update()
                seen.append(snapshot.pull(**rest[0][db.rank]))
        else:
            db.save(folder / str(number))
            db.load(folder / str(number))
        seen.append(db.total_rows())
    return seen


def follow_in_one(db, steps, num_ranks):
    """The same history in one process, for all ranks."""
    seen = [[] for _ in range(num_ranks)]
    for number, (kind, *rest) in enumerate(steps):
        if kind == "train":
            tickets = [[db.prefetch(**asked[rank]) for asked in rest[0]] for rank in range(num_ranks)]
            for rank in range(num_ranks):
                pulled = [db.pull(ticket) for ticket in tickets[rank]]
                seen[rank].append(pulled)
                for ask, (ticket, rows) in enumerate(zip(tickets[rank], pulled, strict=True)):
                    db.push(ticket, {t: gradient(rank, number, ask, t, v.shape) for t, v in rows.items()})
            db.update()
        elif kind == "delete":
            count = db.delete([key for keys in rest[1] for key in keys], rest[0])
            for rank in range(num_ranks):
                seen[rank].append(count)
        elif kind == "snapshot":
            with db.snapshot("default") as snapshot:
                tickets = [db.prefetch(**rest[0][rank]) for rank in range(num_ranks)]
                for ticket in tickets:
                    db.push(ticket, {t: np.ones(v.shape) for t, v in db.pull(ticket).items()})
                db.update()
                for rank in range(num_ranks):
                    seen[rank].append(snapshot.pull(**rest[0][rank]))
        for rank in range(num_ranks):
            seen[rank].append({name: db.num_rows(name) for name in NAMES})
    return seen


def compare(ours, theirs):
    if isinstance(ours, torch.Tensor):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            compare(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            compare(one, other)
    else:
        assert ours == theirs


@given(histories())
@settings(max_examples=30)
def test_ranks_together_are_one_database(history):
    num_ranks, rule, steps = history
    with tempfile.TemporaryDirectory() as folder:
        over_ranks = run_ranks(
            num_ranks, follow, steps, Path(folder), tables=TABLES, optimizer=rule, dtype="float64", seed=3
        )
    with EmbeddingDatabase(TABLES, rule, dtype="float64", seed=3) as one:
        compare(over_ranks, follow_in_one(one, steps, num_ranks))
