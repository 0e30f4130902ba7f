"""Change the set of replicated rows between two segments; what moves is a plan like any other.

Rows that leave the set go home: all workers hold the same record, the lowest one pushes it. Rows that enter
it are flushed to their homes, and every worker pulls the record; rows never trained are made by each worker.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.flush import RECORD, flush_plan
from rowhaul.runtime.mover import Job, Mover
from rowhaul.runtime.phases import RankPhases
from rowhaul.schedule import HotRows, Scheduler
from rowhaul.schedule.plan import Kind, Moves, Plan
from rowhaul.schedule.row_states import State
from rowhaul.schedule.row_tracker import Replacement
from rowhaul.schedule.topology import homes_of


def replacing_plan(scheduler: Scheduler, hot: HotRows) -> Plan:
    """Make a scheduler replicate these rows and no others; return the plan that moves rows accordingly.

    The plan's rows are those that enter; ``evicted`` are the copies of those that leave.
    """
    before = scheduler.states()
    change = scheduler.replicate(hot)
    topology, sizes = scheduler.settings.topology, scheduler.settings.sizes
    chosen = _are_among(before["tables"], before["keys"], change.entering)
    chosen |= _are_among(before["tables"], before["keys"], change.leaving)
    flushing = flush_plan({name: column[chosen] for name, column in before.items()}, topology, sizes)
    fresh = np.isin(change.states, (State.FRESH, State.NOT_ADMITTED))
    pulls = _pulls(scheduler, change, ~fresh)
    local = pulls.source == pulls.target
    workers = topology.num_workers
    return replace(
        flushing,
        tables=change.entering.tables,
        keys=change.entering.keys,
        trainers=np.full(len(fresh), 2**workers - 1, np.uint64),
        states=np.where(fresh, State.FRESH, State.HOME).astype(np.uint8),
        moves=flushing.moves.followed_by(pulls.some(~local)),
        local_moves=(
            None if flushing.local_moves is None else flushing.local_moves.followed_by(pulls.some(local))
        ),
        evicted_from=np.repeat(np.arange(workers, dtype=np.int16), len(change.leaving)),
        evicted_tables=np.tile(change.leaving.tables, workers),
        evicted_keys=np.tile(change.leaving.keys, workers),
    )


def carry_out(mover: Mover, plan: Plan) -> None:
    """Carry out a `replacing_plan` on one rank; all ranks call it together."""
    mover.late(Job(plan, RankPhases(plan, mover.rank)))
    mover.wait_sent()


def _pulls(scheduler: Scheduler, change: Replacement, chosen: npt.NDArray[np.bool_]) -> Moves:
    """Make every worker pull the records of entering rows from their homes."""
    topology, sizes = scheduler.settings.topology, scheduler.settings.sizes
    tables, keys = change.entering.tables[chosen], change.entering.keys[chosen]
    row = np.repeat(np.arange(len(keys)), topology.num_workers)
    return Moves(
        np.full(len(row), Kind.MISS_PULL, np.uint8),
        np.full(len(row), RECORD, np.uint8),
        tables[row],
        keys[row],
        homes_of(tables, keys, topology)[row],
        np.tile(np.arange(topology.num_workers, dtype=np.int16), len(keys)),
        np.array(sizes.records, np.int64)[tables[row]],
        np.zeros(len(row), np.int32),
        np.zeros(len(row), np.uint8),
        np.ones(len(row), np.uint8),  # second: after the pushes
    )


def _are_among(
    tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], rows: HotRows
) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(keys), np.bool_)
    for table in np.unique(rows.tables):
        here = tables == table
        found[here] = np.isin(keys[here], rows.keys[rows.tables == table])
    return found
