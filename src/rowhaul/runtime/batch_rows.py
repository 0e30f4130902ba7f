"""The located rows of a batch that one worker trains: the model reads, steps and buffers by them.

Rows are sorted by what becomes of their gradients, so that each part is a slice: first the rows that the
worker steps itself, then rows shared with other workers, then replicated rows, last rows not admitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.record_kernels import sort_by_role
from rowhaul.runtime.row_locations import Located
from rowhaul.schedule.row_states import State
from rowhaul.store.distinct import KnownRows
from rowhaul.store.packing import RowNames

Ints = npt.NDArray[np.int64]

_STATES = int(State.REPLICATED), int(State.NOT_ADMITTED)


@dataclass(frozen=True)
class BatchRows:
    """The rows of one group that a worker trains in an iteration."""

    number: int  # of the group
    rows: KnownRows  # rows that are not admitted have location -1, and are not in its order
    own: slice
    shared: slice
    replicated: slice
    # The locations of all replicated rows of the batch in this group, and which of them this worker trains.
    replicated_locations: Ints
    replicated_here: Ints
    replicated_names: RowNames

    def __len__(self) -> int:
        return len(self.rows.keys)

    @property
    def moving(self) -> slice:
        """Rows that move between ranks: all but replicated rows and rows not admitted."""
        return slice(0, self.replicated.start)

    @property
    def all_admitted(self) -> bool:
        """Whether every row has a record."""
        return int(self.replicated.stop) == len(self)


def batch_rows(located: Located, *, bounded: bool) -> list[BatchRows]:
    """Sort the rows that a worker trains, once all of them are in its cache.

    With bounded staleness a worker steps its copy of every row, shared or not.
    """
    cache, plan = located.memory, located.phases.plan
    assert cache is not None
    found = []
    for number, group in enumerate(cache.groups):
        keys, tables, locations, roles, order, ordered, starts, copied, here, *names = sort_by_role(
            plan.tables, plan.keys, plan.trainers, plan.states, located.records, located.phases.rank, bounded,
            *cache.places, number, len(group.tables), *_STATES,
        )  # fmt: skip
        if not len(keys) and not len(copied):
            continue
        own, shared, replicated, rest = roles[:4].tolist()
        found.append(
            BatchRows(
                number,
                KnownRows(keys, tables, locations, order, ordered, starts),
                slice(own, shared),
                slice(shared, replicated),
                slice(replicated, rest),
                copied,
                here,
                RowNames(*names),
            )
        )
    return found
