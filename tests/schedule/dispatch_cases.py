"""Random small tasks for dispatchers, and their costs in slow, obvious Python."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rowhaul.schedule.dispatch.task import DispatchTask


def make_task(
    samples,
    rows,
    prices,
    capacities,
    *,
    seed=0,
    peer_to_peer=False,
):
    """A task from lists: ``samples`` of row numbers, ``rows`` of dictionaries that name what is not usual."""

    def column(name, usual, dtype):
        return np.array([row.get(name, usual) for row in rows], dtype)

    latest = [row.get("latest", [row["owner"]] if row.get("owner", -1) >= 0 else []) for row in rows]
    return DispatchTask(
        offsets=np.cumsum([0, *map(len, samples)], dtype=np.int64),
        rows=np.array([row for sample in samples for row in sample], np.int32),
        tables=column("table", 0, np.int32),
        latest=np.array([mask_of(workers) for workers in latest], np.uint64),
        owner=column("owner", -1, np.int16),
        partial=np.array([mask_of(row.get("partial", [])) for row in rows], np.uint64),
        free=column("free", 0, np.uint8),
        home=column("home", -1, np.int16),
        record_size=column("record_size", 1, np.int64),
        value_size=column("value_size", 1, np.int64),
        next_use=np.zeros(len(rows), np.int32),
        prices=np.array(prices, np.int64),
        capacities=np.array(capacities, np.int64),
        seed=seed,
        peer_to_peer=peer_to_peer,
    )


def mask_of(workers):
    return sum(1 << worker for worker in workers)


def workers_of(mask):
    return {worker for worker in range(64) if int(mask) >> worker & 1}


def samples_of(task):
    return [task.rows[task.offsets[i] : task.offsets[i + 1]].tolist() for i in range(task.num_samples)]


@st.composite
def tasks(draw, most_workers=5, most_samples=12, exact=False):
    """Tasks as a scheduler could make them; ``exact`` capacities add up to the batch."""
    num_workers = draw(st.integers(1, most_workers))
    workers = st.integers(0, num_workers - 1)
    num_rows = draw(st.integers(0, 8))
    colocated, peer_to_peer = draw(st.booleans()), draw(st.booleans())
    rows = [_draw_row(draw, workers, colocated, peer_to_peer) for _ in range(num_rows)]
    one_sample = st.lists(st.integers(0, num_rows - 1), unique=True) if num_rows else st.just([])
    samples = draw(st.lists(one_sample, max_size=most_samples))
    places = draw(st.lists(workers, min_size=len(samples), max_size=len(samples) + (0 if exact else 4)))
    return make_task(
        samples,
        sorted(rows, key=lambda row: row["table"]),
        draw(st.lists(st.integers(1, 12), min_size=num_workers, max_size=num_workers)),
        np.bincount(places, minlength=num_workers) if places else [0] * num_workers,
        seed=draw(st.integers(0, 2**62)),
        peer_to_peer=peer_to_peer,
    )


def _draw_row(draw, workers, colocated, peer_to_peer):
    values = draw(st.integers(1, 4))
    row = {
        "table": draw(st.integers(0, 3)),
        "value_size": values,
        "record_size": values + draw(st.integers(0, 3)),
        "home": draw(workers) if colocated else -1,
    }
    state = draw(st.sampled_from(["home", "owned", "split", "free"]))
    if state == "home":
        row["latest"] = draw(st.sets(workers))
    elif state == "owned":
        row["owner"] = draw(workers)
    elif state == "split":
        row["partial"] = draw(st.sets(workers, min_size=1))
        if peer_to_peer and draw(st.booleans()):
            row["owner"] = min(row["partial"])  # it sums the gradients up
    else:
        row["free"] = 1
    return row


def slow_expected_cost(task):
    """ESD's cost of each sample on each worker: the nested loops of its algorithm 1."""
    cost = np.zeros((task.num_samples, task.num_workers), np.int64)
    for i, sample in enumerate(samples_of(task)):
        for j in range(task.num_workers):
            for x in sample:
                if task.free[x] or j in workers_of(task.latest[x]):
                    continue
                owner, home, size = int(task.owner[x]), int(task.home[x]), int(task.record_size[x])
                if task.peer_to_peer and owner >= 0:
                    cost[i, j] += move_cost(task, owner, j, size)
                else:
                    cost[i, j] += move_cost(task, home, j, size)
                    if owner >= 0:
                        cost[i, j] += move_cost(task, owner, home, size)
    return cost


def slow_true_cost(task, worker):
    """The moves that come before training under an assignment, row by row, by the table of row states."""
    cost = 0
    for x in range(len(task.latest)):
        trainers = {int(worker[i]) for i, sample in enumerate(samples_of(task)) if x in sample}
        if not trainers or task.free[x]:
            continue
        values, record = int(task.value_size[x]), int(task.record_size[x])
        latest, partial = workers_of(task.latest[x]), workers_of(task.partial[x])
        owner, home = int(task.owner[x]), int(task.home[x])
        pulled = record if len(trainers) == 1 else values
        direct = task.peer_to_peer and owner >= 0
        cost += sum(move_cost(task, debtor, owner if direct else home, values) for debtor in partial)
        if not direct:
            if owner >= 0 and trainers != {owner}:
                cost += move_cost(task, owner, home, record)
            cost += sum(move_cost(task, home, trainer, pulled) for trainer in trainers - latest)
        else:
            for trainer in trainers - {owner}:
                first_of_others = owner not in trainers and trainer == min(trainers)
                cost += move_cost(task, owner, trainer, record if first_of_others else pulled)
    return cost


def move_cost(task, source, target, size):
    """The links at both ends of a move; a store apart (-1) has a link that costs nothing."""
    if source == target:
        return 0
    return size * sum(int(task.prices[end]) for end in (source, target) if end >= 0)
