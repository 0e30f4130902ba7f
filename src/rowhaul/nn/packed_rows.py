"""`RowPrecision`: how a collection is told to hold its rows in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.local_rows import LocalRows
from rowhaul.optim import RowOptimizerRule
from rowhaul.store.packing import PLAIN, check_row_dtype


@dataclass(frozen=True)
class RowPrecision:
    """Holds the values of rows in few bits, in memory, on disk and on the wire; see docs/row-precision.md.

    Args:
        row_dtype: bfloat16, float16 or int8; float32 holds rows as they are computed.
    """

    row_dtype: str = PLAIN

    def __post_init__(self) -> None:
        check_row_dtype(self.row_dtype)

    @property
    def row_format(self) -> str:
        """The format of the rows, see `rowhaul.store.row_format`."""
        return "whole" if self.row_dtype == PLAIN else self.row_dtype

    def make_rows(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, on_unknown: str
    ) -> LocalRows:
        """Make the rows of a collection in this process."""
        return LocalRows(groups, optimizer, seed, self.row_dtype)

    def layout(self, whole: Any) -> Any:
        """Turn the layout of whole rows into that of a cluster's rows."""
        return replace(whole, row_dtype=self.row_dtype)


def row_dtype_of(settings: object) -> str:
    """Return the type that rows are held in under settings; float32 by default."""
    return str(getattr(settings, "row_dtype", PLAIN))
