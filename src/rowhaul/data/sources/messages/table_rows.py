"""Samples that are columns already: which of them can be trained on, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowhaul.data.columns import Mask, is_list
from rowhaul.data.sources.messages.showing import BRIEFLY, value_text


class CheckedRows:
    """Rows of which some cannot be trained on.

    Attributes:
        columns: as they will be decoded.
        usable: the rows that can be trained on.
        why: by row, the first reason why it cannot.
    """

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._given = rows
        self.columns: dict[str, pa.Array] = dict(zip(rows.schema.names, rows.columns, strict=True))
        self.usable: Mask = np.ones(len(rows), np.bool_)
        self.why: dict[int, str] = {}

    def check(
        self,
        name: str,
        what: str,
        needed: str,
        holds: Callable[[pa.DataType], bool],
        numbers: Callable[[pa.Array], tuple[Any, Mask]],
    ) -> None:
        """Note in which rows a column has no number; ``numbers`` also returns where it has one."""
        column = self.known(name, holds)
        if column is None:
            self.leave_out(name, f"; {needed}", what)
            column = self.columns[name]
        self.note(numbers(column)[1], f"{what} {name!r} is", name, f"; {needed}")

    def known(self, name: str, holds: Callable[[pa.DataType], object]) -> pa.Array | None:
        """Return a column if its type is one that is decoded, or its values, such as a view's, make one."""
        if not holds(self.columns[name].type):
            try:
                self.columns[name] = pa.array(self.columns[name].to_pylist())
            except (pa.ArrowException, ValueError, OverflowError, TypeError):
                return None
        return self.columns[name] if holds(self.columns[name].type) else None

    def leave_out(self, name: str, why: str, what: str = "id field") -> None:
        """Take a column for one without values: rows that have one there cannot be trained on."""
        self.note(~has_values(self.columns[name]), f"{what} {name!r} is", name, why)
        self.columns[name] = pa.nulls(len(self._given), pa.float64() if what != "id field" else pa.int64())

    def note(self, good: Mask, what: str, name: str, why: str) -> None:
        """Note the rows in which the value of a column cannot be trained on."""
        if good.all():
            return
        for row in np.flatnonzero(self.usable & ~good).tolist():
            self.why[row] = f"{what} {value_text(self._given.column(name)[row])[:BRIEFLY]}{why}"
        self.usable &= good

    def usable_rows(self) -> pa.RecordBatch:
        """Return the rows that can be trained on."""
        rows = pa.record_batch(list(self.columns.values()), list(self.columns))
        return rows if not self.why else rows.filter(pa.array(self.usable))


def lengths_of(column: pa.Array) -> npt.NDArray[Any]:
    """Count the elements of the lists in a column."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False))


def has_values(column: pa.Array) -> Mask:
    """Where a column has a value, or a list with one."""
    if is_list(column.type):
        return np.asarray(lengths_of(column) > 0, np.bool_)
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def batches_of(table: pa.Table) -> list[pa.RecordBatch]:
    """Return a table as one batch, or as several where one dictionary cannot hold all of its texts."""
    try:
        whole = table.combine_chunks()
    except pa.ArrowException:
        whole = table
    return [one for one in whole.to_batches() if len(one)]
