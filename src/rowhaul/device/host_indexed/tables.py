"""`CardTables`: tables whose index is in host memory and whose records are on a card.

What decides on rows, plans or policies, does so on the CPU, by table and key: it knows where every record is.
The card is given numbers of records.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.host_indexed.arena import CardArena
from rowhaul.device.host_indexed.messages import Uploads, moved
from rowhaul.device.host_indexed.reads import CardRead
from rowhaul.device.host_indexed.snapshot import CardSnapshot
from rowhaul.device.tables import DeviceTables
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.pooled import KeepGradients
from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.store import Lookup, TableGroup
from rowhaul.store.index import Int64s, KeyIndex
from rowhaul.store.packing import RowNames


class CardTables(TableGroup):
    """The tables of one group of features.

    Args:
        group: the features.
        optimizer: of rows.
        seed: of first values.
        device: the card.
        uploads: brings messages there; one of its own by default.
    """

    arena: CardArena

    def __init__(
        self,
        group: FeatureGroup,
        optimizer: RowOptimizerRule,
        seed: int,
        device: torch.device,
        uploads: Uploads | None = None,
    ) -> None:
        super().__init__(group.specs, optimizer, str(group.dtype).removeprefix("torch."), seed)
        self.device, self._uploads = device, uploads or Uploads(device)
        # What works on records there; its own index stays empty.
        self.card = DeviceTables(group.specs, optimizer, group.dtype, seed, device)
        self._stepping = threading.Lock()  # training and moves step rows, at rates of different iterations
        self.arena = self._make_arena()

    def _make_arena(self) -> CardArena:
        arena = CardArena(self.dim, self.width - self.dim, self.card.dtype, self.device, self._uploads)
        self.card.arena = arena.card
        return arena

    def clear(self) -> None:
        """Forget every row."""
        self.index = KeyIndex(len(self.tables))
        self.arena = self._make_arena()

    def pooled_read(
        self,
        group: FeatureGroup,
        lookup: Lookup,
        entries: slice | Int64s,
        offsets: Int64s,
        keep: KeepGradients,
    ) -> CardRead:
        """Return a `RowRead` over these records."""
        return CardRead(self, group, lookup, entries, offsets, keep)

    def snapshot(self) -> Any:
        """Copy all rows."""
        return CardSnapshot(self.tables, self.index, self.arena)

    def update(
        self,
        records: Int64s,
        gradients: npt.NDArray[Any] | Tensor,
        lr: float,
        number: int,
        rows: RowNames | None = None,
    ) -> None:
        """One optimizer step on the given records, which must differ; the bits of a CPU."""
        if isinstance(gradients, np.ndarray):
            gradients = moved(gradients.astype(self.dtype, copy=False), self.device)
        if len(records):
            there = moved(records.astype(np.int32), self.device)
            with self._stepping:
                self.card.step_rows(there, gradients.contiguous(), lr, number)

    def _write_initial(
        self, memory: RecordMemory, records: Int64s, keys: Int64s, starts: Int64s, which: Int64s
    ) -> None:
        if memory is not self.arena:  # rows that are read and not stored
            super()._write_initial(memory, records, keys, starts, which)
        elif len(which):
            tables = np.searchsorted(starts, which, side="right") - 1
            self.card.write_initial(
                moved(keys[which], self.device),
                moved(tables.astype(np.int32), self.device),
                moved(records.astype(np.int32), self.device),
                self.arena.card,
            )
