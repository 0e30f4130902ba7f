"""Where the shared rows of an assignment are trained, and what one more sample would add to their price.

Both are kept up to date as samples come and go. Most moves of a sample leave most of its rows as they
are, trained by the same set of workers, so a move costs little more than counting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.joint.problem import Ints, Problem
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest
from rowhaul.schedule.threads import Threads, bounds, take


class Spread(NamedTuple):
    """The state of the shared rows under an assignment.

    A line holds, first, what the price of the row grows by if each worker trains it too, then how many
    samples of each worker need it: with eight workers that is one line of the processor's cache.
    """

    lines: Ints  # rows x 2 columns
    trainers: npt.NDArray[np.uint64]  # rows: masks


def make_spread(problem: Problem, worker: Ints, threads: Threads | None = None) -> Spread:
    """The state under an assignment."""
    num_rows, width = problem.sole.shape
    spread = Spread(np.empty((num_rows, 2 * width), np.int32), np.empty(num_rows, np.uint64))
    edges = bounds(num_rows)
    (threads or Threads()).share(
        lambda counter: _count(counter, edges, problem, worker, spread), len(edges) - 1
    )
    return spread


@kernel
def _count(counter, edges, problem, worker, spread):
    width = problem.sole.shape[1]
    chunk = take(counter)
    while chunk < len(edges) - 1:
        for x in range(edges[chunk], edges[chunk + 1]):
            spread.lines[x] = 0
            trainers = NOBODY
            for at in range(problem.starts[x], problem.starts[x + 1]):
                j = worker[problem.samples[at]]
                spread.lines[x, width + j] += 1
                trainers |= bit(j)
            spread.trainers[x] = trainers
            _renew(problem, spread, x)
        chunk = take(counter)


@kernel
def move(problem, spread, i, own, to):
    """Sample i goes from worker ``own`` to another; returns whether a set of trainers changed."""
    width = problem.sole.shape[1]
    lines, trainers = spread.lines, spread.trainers
    for at in range(problem.offsets[i], problem.offsets[i + 1]):
        x = np.int64(problem.rows[at])
        lines[x, width + own] -= 1
        lines[x, width + to] += 1
        left, arrived = lines[x, width + own] == 0, lines[x, width + to] == 1
        if not (left or arrived):
            continue
        before = trainers[x]
        after = before
        if left:
            after &= ~bit(own)
        if arrived:
            after |= bit(to)
        trainers[x] = after
        if before & (before - ONE) == NOBODY or after & (after - ONE) == NOBODY:
            _renew(problem, spread, x)
        else:
            if left:
                lines[x, own] = problem.many[x, own]
            if arrived:
                lines[x, to] = 0


@kernel
def price_elsewhere(problem, spread, i, own, price):
    """Set price[j] to what the cost would grow by with sample i on worker j, were it not on ``own``."""
    width = len(price)
    lines, trainers, many = spread.lines, spread.trainers, problem.many
    for j in range(width):
        price[j] = problem.linear[i, j]
    at_own, at_others = np.int64(0), np.int64(0)
    for at in range(problem.offsets[i], problem.offsets[i + 1]):
        x = np.int64(problem.rows[at])
        for j in range(width):
            price[j] += lines[x, j]
        if lines[x, width + own] == 1:  # without it, the row would have one trainer less
            at_own += many[x, own]
            others = trainers[x] & ~bit(own)
            if others & (others - ONE) == NOBODY:
                other = lowest(others)
                second = np.int64(many[x, other]) - problem.sole[x, other]
                at_others += second
                price[other] -= second
    for j in range(width):
        price[j] += at_others
    price[own] += at_own


@kernel
def cost_of(problem, spread, worker):
    """The cost of the assignment."""
    num_rows = len(spread.trainers)
    cost = np.int64(0)
    for i in range(len(worker)):
        cost += problem.linear[i, worker[i]]
    for x in range(num_rows):
        trainers = spread.trainers[x]
        if trainers & (trainers - ONE) == NOBODY:
            cost += problem.sole[x, lowest(trainers)] if trainers != NOBODY else 0
            continue
        while trainers != NOBODY:
            cost += problem.many[x, lowest(trainers)]
            trainers &= trainers - ONE
    return cost


@kernel
def _renew(problem, spread, x):
    """Set the first half of a row's line."""
    width = problem.sole.shape[1]
    lines, trainers = spread.lines, spread.trainers[x]
    if trainers == NOBODY:
        for j in range(width):
            lines[x, j] = problem.sole[x, j]
        return
    second = np.int64(0)
    if trainers & (trainers - ONE) == NOBODY:
        only = lowest(trainers)
        second = np.int64(problem.many[x, only]) - problem.sole[x, only]
    for j in range(width):
        lines[x, j] = problem.many[x, j] + second
    while trainers != NOBODY:
        lines[x, lowest(trainers)] = 0
        trainers &= trainers - ONE
