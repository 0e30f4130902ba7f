"""`CardRead`: how a model reads rows of `CardTables`, and what it leaves as gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.device.batches import Bags
from rowhaul.device.host_indexed.messages import moved
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.pooled import PooledRead
from rowhaul.nn.row_source import Int64s

if TYPE_CHECKING:
    from rowhaul.device.host_indexed.tables import CardTables


class CardRead(PooledRead):
    """One batch's use of tables whose records are on a card; gradients stay there."""

    def __init__(self, tables: CardTables, group: FeatureGroup, *arguments: Any) -> None:
        super().__init__(group, tables.arena, *arguments)
        self.device, self._tables = tables.device, tables
        self._there: tuple[Tensor, Tensor | None, Bags] | None = None

    def pool(self, weights: Tensor | None, out: Any) -> None:
        """Write this group's columns of ``out``."""
        records, spare, _ = self._on_card()
        self._tables.card.pool(records, self._bags(weights), spare, torch.as_tensor(out))

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Any) -> None:
        """Sum gradients per distinct row and keep them for the step."""
        lookup = self.lookup
        numbers = moved(lookup.inverse.astype(np.int32, copy=False), self.device)
        gradients: Any = self._tables.card.sum_rows(
            numbers, len(lookup.keys), self._bags(weights), torch.as_tensor(pooled_gradients)
        )
        self.keep(lookup, gradients)

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
            lookup, device = self.lookup, self.device
            records = moved(lookup.locations[lookup.inverse].astype(np.int32), device)
            spare = moved(lookup.spare, device) if len(lookup.spare) else None
            self._there = records, spare, _bags_of(self.group, self.offsets, device)
        return self._there


def _bags_of(group: FeatureGroup, offsets: Int64s, device: torch.device) -> Bags:
    """Bags as kernels take them."""
    num_bags, num_ids = len(offsets) - 1, int(offsets[-1])
    lengths = np.diff(offsets)
    columns = moved(group.columns, device)
    is_mean = moved(group.is_mean.astype(np.int32), device)
    num_samples = num_bags // len(group.columns)
    if (lengths == 1).all():
        return Bags(num_samples, num_ids, None, None, columns, is_mean)
    bags = np.repeat(np.arange(num_bags, dtype=np.int32), lengths)
    return Bags(num_samples, num_ids, moved(offsets, device), moved(bags, device), columns, is_mean)
