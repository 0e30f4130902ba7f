"""The gradients of a phase: packed from a worker's buffers, and stepped or buffered where they arrive.

Most gradients are stepped as soon as they arrive, so they are summed in the receive buffer. Those received in
earlier phases, and a peer's own, are in the gradient buffers of `RowMemory`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phase_kernels import pick_gradients
from rowhaul.runtime.phases import FROM_CACHE, TO_CACHE, TO_HOME, DueSteps, Kinds, Payloads
from rowhaul.runtime.record_kernels import buffered_rows, note_gradients, steps_of_group
from rowhaul.runtime.row_locations import Located, RowLocations
from rowhaul.runtime.row_memory import MissingRowError, Rates, RowMemory
from rowhaul.store.keyed import copy_in, copy_out, find_or_add
from rowhaul.store.packing import RowNames
from rowhaul.transport.base import Bytes

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]


def pack_payloads(where: RowLocations, sent: Payloads, *, keep_gradients: bool = False) -> Bytes:
    """Write the records and gradients that are sent into a buffer; remove the gradients unless kept."""
    out = where.memory.message_buffer(sent.num_bytes)
    if len(sent):
        where.pack(sent, out)
        if where.cache.memory is not None and sent.has_gradients:
            _pack_gradients(where.cache, where.cache.memory, sent, out, keep_gradients)
        where.memory.finish_packing()
    return out


def _pack_gradients(located: Located, cache: RowMemory, sent: Payloads, out: Bytes, keep: bool) -> None:
    none = np.zeros(len(sent), np.uint8)
    for number, worker, keys, starts, offsets in _gradients_among(located, sent, FROM_CACHE, none):
        buffer = cache.buffer(worker, number)
        locations = cache.take_gradients(worker, number, keys, starts, keep=keep)
        copy_out(buffer, locations, np.full(len(keys), buffer.arena.record_bytes), offsets, out)
        if not keep:
            buffer.arena.release(locations)


def unpack_payloads(
    where: RowLocations,
    received: Payloads,
    arrived: Bytes,
    home_steps: DueSteps,
    peer_steps: DueSteps,
    rates: Rates,
) -> None:
    """Store what a phase has brought and take the steps that are due; records for the cache must wait."""
    if len(received):
        where.unpack_at_home(received, arrived)
    for steps, located, kinds in ((home_steps, where.home, TO_HOME), (peer_steps, where.cache, TO_CACHE)):
        if located.memory is None or not (len(steps) or received.has_gradients):
            continue
        due = PhaseSteps(steps, located)
        if received.has_gradients:
            done = np.zeros(len(received), np.uint8)  # gradients that are stepped at once
            if located.memory.sums_where_received:
                due.note(where, received, kinds, arrived, done)
            _buffer_gradients(located, received, kinds, arrived, done)
        due.take(rates)


def _buffer_gradients(
    located: Located, received: Payloads, kinds: Kinds, arrived: Bytes, done: Flags
) -> None:
    """Buffer received gradients per worker, skipping those that are stepped at once."""
    assert located.memory is not None
    for number, worker, keys, starts, offsets in _gradients_among(located, received, kinds, done):
        buffer = located.memory.buffer(worker, number)
        locations, _ = find_or_add(buffer, keys, starts)
        copy_in(buffer, locations, np.full(len(keys), buffer.arena.record_bytes), offsets, arrived)


def _gradients_among(
    located: Located, payloads: Payloads, kinds: Kinds, done: Flags
) -> Iterator[tuple[int, int, Ints, Ints, Ints]]:
    """Yield the gradients among payloads: group, worker, keys table by table, starts and offsets."""
    phases, memory = located.phases, located.memory
    assert memory is not None
    for number, group in enumerate(memory.groups):
        keys, starts, offsets = pick_gradients(
            payloads.kind, payloads.payload, payloads.source, payloads.row, payloads.offsets, kinds, done,
            phases.tables, phases.keys, *memory.places, number, len(group.tables),
            group.value_bytes, group.arena.record_bytes,
        )  # fmt: skip
        for worker in range(len(starts)):
            first, last = starts[worker, [0, -1]].tolist()
            if first < last:
                yield number, worker, keys[first:last], starts[worker] - first, offsets[first:last]


class PhaseSteps:
    """The steps that a rank takes on rows of one memory in a phase."""

    def __init__(self, steps: DueSteps, located: Located) -> None:
        self._steps, self._located = steps, located
        num_workers = int(np.bitwise_or.reduce(steps.contributors)).bit_length()
        self._gradients: Ints = np.zeros((len(steps), num_workers), np.int64)  # addresses

    def note(
        self, where: RowLocations, received: Payloads, kinds: Kinds, arrived: Bytes, done: Flags
    ) -> None:
        """Find the gradients received for these steps and mark them as done; ``arrived`` must stay alive."""
        steps = self._steps
        if not len(steps):
            return
        step_of_row = np.zeros(len(self._located.records), np.int32)
        step_of_row[steps.row] = np.arange(1, len(steps) + 1, dtype=np.int32)
        note_gradients(
            received.kind, received.payload, received.row, received.source, received.offsets, kinds,
            step_of_row, steps.contributors, where.phases.tables, *where.sizes,
            arrived.ctypes.data, done, self._gradients,
        )  # fmt: skip

    def take(self, rates: Rates) -> None:
        """Sum each row's gradients in rank order and take one optimizer step; remove buffered gradients."""
        if not len(self._steps):
            return
        memory, phases, steps = self._located.memory, self._located.phases, self._steps
        assert memory is not None
        for number, group in enumerate(memory.groups):
            keys, starts, records, contributors, trained, gradients, waiting, missing = steps_of_group(
                steps.row, steps.contributors, steps.trained, self._gradients, phases.tables, phases.keys,
                self._located.records, *memory.places, number, len(group.tables),
            )  # fmt: skip
            if not len(keys):
                continue
            if missing >= 0:  # would be taken for an address
                raise MissingRowError(
                    f"key {int(phases.keys[missing])} of table number {int(phases.tables[missing])} is to be "
                    "stepped and is not there; please report this"
                )
            buffered = []
            for worker in range(int(waiting).bit_length()):
                if not int(waiting) >> worker & 1:
                    continue
                places, their_keys, their_starts = buffered_rows(
                    contributors, gradients, keys, starts, worker
                )
                locations = memory.take_gradients(worker, number, their_keys, their_starts)
                buffered.append((worker, places, locations))
            sums = memory.sum_gradients(number, gradients, buffered)
            for worker, _, locations in buffered:
                memory.buffer(worker, number).arena.release(locations)
            tables = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            memory.apply(group, records, sums, trained, rates, RowNames(tables, keys))
