"""`CardRows`: a worker's rows as the model reads them, from a cache on its card."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.device.batches import Bags
from rowhaul.device.cluster.messages import moved
from rowhaul.device.cluster.tables import CardTables
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import Pending, rows_of_parts
from rowhaul.nn.pooled import KeepGradients
from rowhaul.nn.row_source import Int64s
from rowhaul.runtime.worker_rows import CachedRows
from rowhaul.store import Lookup


class CardRead:
    """One batch's use of tables whose records are on a card."""

    def __init__(
        self,
        tables: CardTables,
        group: FeatureGroup,
        lookup: Lookup,
        entries: slice | Int64s,
        offsets: Int64s,
        keep: KeepGradients,
    ) -> None:
        self.device, self.entries = tables.device, entries
        self._tables, self._group, self._lookup, self._keep = tables, group, lookup, keep
        self._offsets = offsets
        self._there: tuple[Tensor, Tensor | None, Bags] | None = None

    def pool(self, weights: Tensor | None, out: Any) -> None:
        """Write this group's columns of ``out``."""
        records, spare, _ = self._on_card()
        self._tables.card.pool(records, self._bags(weights), spare, torch.as_tensor(out))

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Any) -> None:
        """Sum gradients per distinct row and keep them for the step."""
        lookup = self._lookup
        numbers = moved(lookup.inverse.astype(np.int32, copy=False), self.device)
        gradients: Any = self._tables.card.sum_rows(
            numbers, len(lookup.keys), self._bags(weights), torch.as_tensor(pooled_gradients)
        )
        self._keep(lookup, gradients)

    def weight_gradients(self, pooled_gradients: Any) -> Any:
        """Return the gradient of each id's weight."""
        records, spare, bags = self._on_card()
        return self._tables.card.weight_gradients(records, bags, spare, torch.as_tensor(pooled_gradients))

    def _bags(self, weights: Tensor | None) -> Bags:
        bags = self._on_card()[2]
        if weights is None:
            return bags
        chosen = weights.detach().cpu()[self.entries].to(self._tables.card.dtype)
        return replace(bags, weights=chosen.contiguous().to(self.device))

    def _on_card(self) -> tuple[Tensor, Tensor | None, Bags]:
        """The record of each id, rows that are not stored, and the bags."""
        if self._there is None:
            lookup, device = self._lookup, self.device
            records = moved(lookup.locations[lookup.inverse].astype(np.int32), device)
            spare = moved(lookup.spare, device) if len(lookup.spare) else None
            self._there = records, spare, _bags_of(self._group, self._offsets, device)
        return self._there


def _bags_of(group: FeatureGroup, offsets: Int64s, device: torch.device) -> Bags:
    """Bags as kernels take them."""
    num_bags, num_ids = len(offsets) - 1, int(offsets[-1])
    lengths = np.diff(offsets)
    columns = moved(group.columns, device)
    is_mean = moved(group.is_mean.astype(np.int32), device)
    num_samples = num_bags // len(group.features)
    if (lengths == 1).all():
        return Bags(num_samples, num_ids, None, None, columns, is_mean)
    bags = np.repeat(np.arange(num_bags, dtype=np.int32), lengths)
    return Bags(num_samples, num_ids, moved(offsets, device), moved(bags, device), columns, is_mean)


class CardRows(CachedRows):
    """The row source of a worker whose cache is on its card; gradients stay there, too."""

    def _read(self, number: int, features: KeyedJaggedTensor, training: bool, on_unknown: str) -> Any:
        group, tables = self.groups[number], self.tables[number]
        assert isinstance(tables, CardTables)
        ids, entries, offsets = group.ids_of(features)
        lookup = self.look_up(number, ids, training, on_unknown)
        keep = partial(self._keep, number, tables.arena)
        return CardRead(tables, group, lookup, entries, offsets, keep)

    def take_gradients(self, number: int, step: int = 0) -> Pending | None:
        """Remove a group's gradients, summed over backward passes, with the rows they are for."""
        if len(self.pending[number]) < 2:
            return super().take_gradients(number, step)
        pending, self.pending[number] = self.pending[number], []
        rows, places = rows_of_parts(pending, len(self.tables[number].tables))
        parts: list[Any] = [gradients for _, gradients in pending]
        sums: Any = parts[0].new_zeros((len(rows.keys), parts[0].shape[1]))
        for where, part in zip(places, parts, strict=True):
            there = moved(where, part.device)
            sums[there] = sums[there] + part
        return rows, sums

    def _no_gradients(self, dim: int) -> Any:
        return torch.empty((0, dim), dtype=self.groups[0].dtype)
