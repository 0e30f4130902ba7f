"""Where the shared rows of an assignment are trained, and what one more sample would add to their price.

Both are kept up to date as samples come and go. Most moves of a sample leave most of its rows as they
are, trained by the same set of workers, so a move costs little more than counting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.joint.problem import Indices, Ints


class Spread(NamedTuple):
    """The state of the shared rows under an assignment."""

    users: Indices  # rows x workers: samples of the worker that need the row
    num_trainers: Indices  # rows
    added: Ints  # rows x workers: what the price of the row grows by if the worker trains it too


@kernel
def make_spread(problem, worker):
    """The state under an assignment."""
    num_rows, num_workers = problem.sole.shape
    spread = Spread(
        np.zeros((num_rows, num_workers), np.int32),
        np.zeros(num_rows, np.int32),
        np.empty((num_rows, num_workers), np.int64),
    )
    for i in range(len(worker)):
        for at in range(problem.offsets[i], problem.offsets[i + 1]):
            spread.users[problem.rows[at], worker[i]] += 1
    for x in range(num_rows):
        _renew(problem, spread, x)
    return spread


@kernel
def move(problem, spread, i, own, to):
    """Sample i goes from worker ``own`` to another."""
    for at in range(problem.offsets[i], problem.offsets[i + 1]):
        x = np.int64(problem.rows[at])
        spread.users[x, own] -= 1
        spread.users[x, to] += 1
        left, arrived = spread.users[x, own] == 0, spread.users[x, to] == 1
        if not (left or arrived):
            continue
        if spread.num_trainers[x] < 4:
            _renew(problem, spread, x)
            continue
        if left:
            spread.num_trainers[x] -= 1
            spread.added[x, own] = problem.many[x, own]
        if arrived:
            spread.num_trainers[x] += 1
            spread.added[x, to] = 0


@kernel
def price_elsewhere(problem, spread, i, own, price):
    """Set price[j] to what the cost would grow by with sample i on worker j, were it not on ``own``."""
    num_workers = len(price)
    for j in range(num_workers):
        price[j] = problem.linear[i, j]
    for at in range(problem.offsets[i], problem.offsets[i + 1]):
        x = problem.rows[at]
        if spread.users[x, own] > 1 or spread.num_trainers[x] > 2:
            for j in range(num_workers):
                price[j] += spread.added[x, j]
            if spread.users[x, own] == 1:
                price[own] += problem.many[x, own]
        elif spread.num_trainers[x] == 1:
            for j in range(num_workers):
                price[j] += problem.sole[x, j]
        else:
            other = 0
            while other == own or spread.users[x, other] == 0:
                other += 1
            second = problem.many[x, other] - problem.sole[x, other]
            for j in range(num_workers):
                price[j] += problem.many[x, j] + second
            price[other] -= problem.many[x, other] + second


@kernel
def cost_of(problem, spread, worker):
    """The cost of the assignment."""
    num_rows, num_workers = problem.sole.shape
    cost = 0
    for i in range(len(worker)):
        cost += problem.linear[i, worker[i]]
    for x in range(num_rows):
        alone = spread.num_trainers[x] == 1
        for j in range(num_workers):
            if spread.users[x, j] > 0:
                cost += problem.sole[x, j] if alone else problem.many[x, j]
    return cost


@kernel
def _renew(problem, spread, x):
    num_workers = problem.sole.shape[1]
    num_trainers, trainer = 0, 0
    for j in range(num_workers):
        if spread.users[x, j] > 0:
            num_trainers += 1
            trainer = j
    spread.num_trainers[x] = num_trainers
    if num_trainers == 0:
        for j in range(num_workers):
            spread.added[x, j] = problem.sole[x, j]
    elif num_trainers == 1:
        second = problem.many[x, trainer] - problem.sole[x, trainer]
        for j in range(num_workers):
            spread.added[x, j] = problem.many[x, j] + second
        spread.added[x, trainer] = 0
    else:
        for j in range(num_workers):
            spread.added[x, j] = 0 if spread.users[x, j] > 0 else problem.many[x, j]
