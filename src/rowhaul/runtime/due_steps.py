"""Steps on split rows in the turn in which their gradients arrive: summed where they lie, shelved nowhere.

Most gradients are stepped as soon as they are there, so they need no place to wait. Those that came in
earlier turns, and a peer's own, are on their shelves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phase_kernels import pick_rows
from rowhaul.runtime.phases import DueSteps, Kinds, Payloads
from rowhaul.runtime.record_kernels import buffered_rows, note_buffered, note_gradients, sum_gradients
from rowhaul.runtime.row_locations import Located, RowLocations
from rowhaul.runtime.row_memory import MissingRowError, Rates
from rowhaul.transport.base import Bytes

Ints = npt.NDArray[np.int64]


class PhaseSteps:
    """The steps that one memory of a rank takes in a turn, of rows of the batch.

    Args:
        steps: what is due.
        where: the rows of the plan.
        located: the same, in this memory.
    """

    def __init__(self, steps: DueSteps, where: RowLocations, located: Located) -> None:
        self._steps, self._where, self._located = steps, where, located
        self._num_workers = int(np.bitwise_or.reduce(steps.contributors)).bit_length()
        self._gradients: Ints = np.zeros((len(steps), self._num_workers), np.int64)

    def note(self, payloads: Payloads, kinds: Kinds, arrived: Bytes, done: npt.NDArray[np.uint8]) -> None:
        """Find the gradients that came for these steps, and mark them as done; ``arrived`` must stay."""
        if not payloads.has_gradients:
            return
        where, steps = self._where, self._steps
        step_of_row = np.zeros(len(self._located.records), np.int32)
        step_of_row[steps.row] = np.arange(1, len(steps) + 1, dtype=np.int32)
        note_gradients(
            payloads.kind, payloads.payload, payloads.table, payloads.row, payloads.source, payloads.offsets,
            kinds, step_of_row, steps.contributors, where.value_bytes, where.record_bytes,
            arrived.ctypes.data, done, self._gradients,
        )  # fmt: skip

    def take(self, rates: Rates) -> None:
        """Take the steps; what waited for them on shelves leaves those."""
        memory = self._located.memory
        assert memory is not None
        for number, group in enumerate(memory.groups):
            places, starts = pick_rows(self._steps.table, *memory.places, number, len(group.tables))
            if not len(places):
                continue
            gradients, contributors = self._gradients[places], self._steps.contributors[places]
            keys, taken = self._steps.key[places], []
            for worker in range(self._num_workers):
                waiting = buffered_rows(contributors, gradients, keys, starts, worker)
                if len(waiting[0]):
                    buffer = memory.buffer(worker, number)
                    locations = memory.take_gradients_of(worker, number, waiting[1], waiting[2])
                    arena = buffer.arena
                    note_buffered(
                        arena.addresses,
                        arena.shift,
                        arena.record_bytes,
                        waiting[0],
                        locations,
                        worker,
                        gradients,
                    )
                    taken.append((arena, locations))
            sums = np.empty((len(places), group.dim), group.dtype)
            sum_gradients(gradients, sums)
            for arena, locations in taken:
                arena.release(locations)
            records = self._located.records[self._steps.row[places]]
            if records.min() < 0:  # an address would be made of it all the same
                raise MissingRowError(
                    f"key {int(keys[records.argmin()])} is to be stepped and is not there, table "
                    f"{int(self._steps.table[places][records.argmin()])}; please report this"
                )
            memory.apply(group, records, sums, self._steps.trained[places], rates)
