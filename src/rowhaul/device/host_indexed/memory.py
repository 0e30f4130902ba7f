"""`CardMemory`: a worker's cache on its card, with buffered gradients of split rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.device.host_indexed.arena import CardArena
from rowhaul.device.host_indexed.messages import Bytes, Uploads, moved, pinned_buffer
from rowhaul.device.host_indexed.tables import CardTables
from rowhaul.nn.features import FeatureGroup
from rowhaul.runtime.gradient_buffer import GradientBuffer
from rowhaul.runtime.phases import Kinds, Payloads, RankPhases
from rowhaul.runtime.row_locations import Located, Sizes
from rowhaul.runtime.row_memory import Buffered, Ints, RowMemory
from rowhaul.schedule.plan import Payload
from rowhaul.store import TableGroup
from rowhaul.store.keyed import locate_or_add

if TYPE_CHECKING:
    from rowhaul.runtime.layout import TableLayout


class CardGradients(GradientBuffer):
    """Vectors by (table, key), on a card."""

    arena: CardArena

    def __init__(self, group: CardTables, uploads: Uploads) -> None:
        super().__init__(len(group.tables), *group.gradient_shape)
        self.arena = CardArena(group.dim, 0, group.card.dtype, group.device, uploads)

    def write(self, tables: Ints, keys: Ints, gradients: Any) -> None:
        """Set the gradients of different rows, whether or not there are any."""
        locations, _ = locate_or_add(self, tables, keys)
        if isinstance(gradients, Tensor):
            self.arena.put(locations, gradients)
        else:
            self.arena.write(locations, gradients)


class CardLocated(Located):
    """The rows of a plan in a cache on a card, by the numbers of their records."""

    memory: CardMemory

    def pack(self, payloads: Payloads, kinds: Kinds, sizes: Sizes, out: Bytes) -> int:
        """Copy records into the buffer of a phase; return a payload whose record is missing, or -1."""
        return self._move(payloads, kinds, sizes, CardArena.copy_out, out)

    def unpack(self, payloads: Payloads, kinds: Kinds, sizes: Sizes, given: Bytes) -> int:
        """Overwrite records with those received; return a payload whose record is missing, or -1."""
        return self._move(payloads, kinds, sizes, CardArena.copy_in, given)

    def _move(self, payloads: Payloads, kinds: Kinds, sizes: Sizes, copy: Any, buffer: Bytes) -> int:
        chosen = np.flatnonzero(kinds[payloads.kind] & ((payloads.payload & int(Payload.VALUES)) != 0))
        rows = payloads.row[chosen]
        missing = np.flatnonzero(self.records[rows] < 0)
        if len(missing):
            return int(chosen[missing[0]])
        tables = self.phases.tables[rows]
        value_bytes, record_bytes = (one[tables] for one in sizes)
        has_state = (payloads.payload[chosen] & int(Payload.STATE)) != 0
        lengths = np.where(has_state, record_bytes, value_bytes)
        for number, places, _ in self.memory.by_group(tables):
            some = self.records[rows[places]], lengths[places], payloads.offsets[chosen[places]]
            copy(self.memory.groups[number].arena, *some, buffer)
        return -1

    def _note(self, number: int, places: Ints, locations: Ints) -> None:
        found = locations >= 0
        self.records[places[found]] = locations[found]


class CardMemory(RowMemory):
    """A worker's cache: indexes in host memory, records and buffered gradients on a card.

    Args:
        layout: the tables.
        features: of the model, by row size.
        device: the card.
    """

    sums_where_received = False  # gradients arrive in host memory, rows are stepped on the card

    def __init__(self, layout: TableLayout, features: Sequence[FeatureGroup], device: torch.device) -> None:
        self.device, self._uploads = device, Uploads(device)
        tables = [CardTables(one, layout.optimizer, layout.seed, device, self._uploads) for one in features]
        super().__init__(layout, tables, makes_rows=False)

    def locate(self, phases: RankPhases) -> CardLocated:
        """Prepare to locate the rows of a plan."""
        return CardLocated(self, phases)

    def message_buffer(self, num_bytes: int) -> Bytes:
        """Memory for the messages of a phase, which the card can write to."""
        return pinned_buffer(num_bytes, self.device)

    def finish_packing(self) -> None:
        """Wait until the card has written what is sent."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def sum_gradients(self, number: int, received: Ints, buffered: Buffered) -> Any:
        """Sum gradients of rows of a group in the order of workers; all of them wait on the card."""
        group = self.groups[number]
        sums = torch.zeros((len(received), group.dim), dtype=self._card(group).dtype, device=self.device)
        for worker, places, locations in buffered:
            arena = self.buffer(worker, number).arena
            assert isinstance(arena, CardArena)
            there = moved(places, self.device)
            sums[there] = sums[there] + arena.rows(locations)
        return sums

    def buffer_gradients(
        self,
        number: int,
        positions: Ints,
        keys: Ints,
        worker: int,
        gradients: Any,
        iteration: int,
        *,
        accumulate: bool = False,
    ) -> None:
        """Buffer a worker's gradients until they are pushed; with bounded staleness they accumulate."""
        buffer = self.buffer(worker, number)
        if accumulate:
            locations, added = locate_or_add(buffer, positions, keys)
            old = np.setdiff1d(np.arange(len(keys)), added)
            if len(old):
                assert isinstance(buffer.arena, CardArena)
                gradients, there = gradients.clone(), moved(old, self.device)
                gradients[there] = buffer.arena.rows(locations[old]) + gradients[there]
        buffer.write(positions, keys, gradients)

    def _make_buffer(self, group: TableGroup) -> CardGradients:
        assert isinstance(group, CardTables)
        return CardGradients(group, self._uploads)

    def _card(self, group: TableGroup) -> Any:
        assert isinstance(group, CardTables)
        return group.card
