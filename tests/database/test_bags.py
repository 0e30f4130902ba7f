"""A database as a layer: ranks that train together equal one process that has all samples."""

import numpy as np
import pytest
import torch
from database_ranks import run_ranks

from rowhaul.database import DatabaseBags, DenseSum, EmbeddingDatabase
from rowhaul.errors import ConfigError, DataError
from rowhaul.optim import RowwiseAdagrad
from rowhaul.transport.in_process import InProcessNetwork

TABLES = {"a": 3, "b": 5, "c": 3}
RULE = RowwiseAdagrad(lr=0.1, initial_accumulator_value=1e-2)
NUM_STEPS, PER_RANK = 6, 7


def samples(num_ranks):
    """Of every step: keys of each table and sample, and how many of them for the one with bags."""
    random = np.random.default_rng(5)
    steps = []
    for _ in range(NUM_STEPS):
        lengths = random.integers(0, 9, num_ranks * PER_RANK)
        keys = {name: random.integers(0, 40, num_ranks * PER_RANK) for name in ("a", "c")}
        steps.append((keys, random.integers(0, 25, lengths.sum()), lengths))
    return steps


def part_of(step, first, last):
    keys, in_bags, lengths = step
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    given = {
        "c": keys["c"][first:last],
        "b": in_bags[bounds[first] : bounds[last]],
        "a": keys["a"][first:last],
    }
    return {"keys": given, "lengths": {"b": lengths[first:last]}, "pooling": {"b": "mean"}}


def top_layer():
    top = torch.nn.Linear(sum(TABLES.values()), 1, dtype=torch.float64)
    random = np.random.default_rng(1)  # PyTorch's generator is shared by the ranks, which are threads
    with torch.no_grad():
        for parameter in top.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
    return top


def train(db, network):
    bags, top = DatabaseBags(db), top_layer()
    sums = DenseSum(top.parameters(), links=network.links(db.rank))
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    first = db.rank * PER_RANK
    for step in samples(db.num_ranks):
        vectors = bags(db.prefetch(**part_of(step, first, first + PER_RANK)))
        assert vectors.shape == (PER_RANK, sum(TABLES.values()))
        (top(vectors).square().sum() / (db.num_ranks * PER_RANK)).backward()
        sums.start()
        bags.step()
        sums.finish()
        optimizer.step()
        optimizer.zero_grad()
    rows = {name: db.pull(db.prefetch(np.arange(40), name)) for name in TABLES}
    return rows, top.weight.detach(), top.bias.detach()


def train_in_one(num_ranks):
    top = top_layer()
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    with EmbeddingDatabase(TABLES, RULE, dtype="float64") as db:
        for step in samples(num_ranks):
            ticket = db.prefetch(**part_of(step, 0, num_ranks * PER_RANK))
            vectors = {name: rows.requires_grad_() for name, rows in db.pull(ticket).items()}
            joined = torch.cat([vectors[name] for name in ("c", "b", "a")], dim=1)
            (top(joined).square().sum() / len(joined)).backward()
            db.push(ticket, {name: rows.grad for name, rows in vectors.items()})
            db.update()
            optimizer.step()
            optimizer.zero_grad()
        rows = {name: db.pull(db.prefetch(np.arange(40), name)) for name in TABLES}
    return rows, top.weight.detach(), top.bias.detach()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_train_as_one_process(num_ranks):
    network = InProcessNetwork(num_ranks)
    results = run_ranks(num_ranks, train, network, tables=TABLES, optimizer=RULE, dtype="float64")
    expected_rows, *expected = train_in_one(num_ranks)
    for rows, *dense in results:
        for name in TABLES:
            torch.testing.assert_close(rows[name], expected_rows[name], rtol=0, atol=1e-9)
        for ours, theirs, of_first in zip(dense, expected, results[0][1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
            assert torch.equal(ours, of_first)


def refuse(db):
    bags = DatabaseBags(db)
    ticket = db.prefetch({"a": [1, 2], "b": [1]})
    with pytest.raises(DataError, match=r"1, 2: pass lengths="):
        bags(ticket)
    ticket = db.prefetch({"a": [1, 2], "b": [1, 1]})
    before = bags(ticket)
    with pytest.raises(DataError, match="shape"):
        db.push_joined(ticket, torch.ones(2, 3))
    bags(ticket).sum().backward()  # a ticket may be pulled again; it is pushed once
    with pytest.raises(Exception, match="pushed before"):
        before.sum().backward()
    db.update()
    with pytest.raises(ConfigError, match="one type"):
        DenseSum([torch.nn.Parameter(torch.zeros(1, dtype=d)) for d in (torch.float32, torch.float64)])


def test_mistakes_are_told():
    run_ranks(2, refuse, tables=TABLES)
