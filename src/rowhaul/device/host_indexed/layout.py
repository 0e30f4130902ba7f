"""`CardLayout`: the layout of whole rows, as a worker has it whose cache is on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from rowhaul.device.host_indexed.memory import CardMemory
from rowhaul.nn.features import FeatureGroup
from rowhaul.runtime.layout import TableLayout


@dataclass(frozen=True)
class CardLayout(TableLayout):
    """Whole rows; this worker's cache is on a card. Homes and evaluation's copies are in host memory."""

    device: torch.device = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(cls, layout: TableLayout, device: torch.device) -> CardLayout:
        """Return the same tables with the cache on a card."""
        return cls(**{one.name: getattr(layout, one.name) for one in fields(layout)}, device=device)

    def make_cache(self, groups: Sequence[FeatureGroup]) -> CardMemory:
        """Make a worker's cache: a group of tables for each group of features."""
        return CardMemory(self, groups, self.device)
