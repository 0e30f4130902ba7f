"""A table joined to the log by an integer key: held in memory, sorted by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.formats.source import Derive, TextInput
from rowhaul.data.text.reader import BadLines, read_text
from rowhaul.errors import DataError


@dataclass(frozen=True)
class SideTable:
    """The columns of a table in the order of its keys."""

    keys: npt.NDArray[np.int64]
    columns: dict[str, pa.Array]

    def join(self, keys: pa.Array) -> dict[str, pa.Array]:
        """The columns for each of ``keys``; null where a key is missing or not in the table."""
        wanted = keys.fill_null(0).to_numpy(zero_copy_only=False)
        found = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        unmatched = self.keys[found] != wanted
        if keys.null_count:
            unmatched |= keys.is_null().to_numpy(zero_copy_only=False)
        rows = pa.array(found, mask=unmatched)
        return {name: column.take(rows) for name, column in self.columns.items()}


def make_join(sides: Sequence[tuple[TextInput, str, str]], seed: int) -> Derive:
    """Join side tables to a log: a file each, the name of its key, and that of the log's column of it."""
    tables = [(read_side_table(one, key, seed), column) for one, key, column in sides]

    def derive(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], None]:
        for table, column in tables:
            columns = columns | table.join(columns[column])
        return columns, None

    return derive


def read_side_table(one: TextInput, key: str, seed: int) -> SideTable:
    """Read a whole file. Every line must be good: a skipped one would silently unmatch many rows."""
    runs = [
        rows for rows in read_text(one.file, one.layout, one.start, BadLines(skip=False), seed) if len(rows)
    ]
    if not runs:
        raise DataError(f"{one.file} holds no rows")
    columns = {name: pa.concat_arrays([rows.columns[name] for rows in runs]) for name in runs[0].columns}
    keys = columns.pop(key)
    if keys.null_count:
        raise DataError(
            f"{one.file}: column {key!r} is missing in {keys.null_count:,} rows; each row needs one"
        )
    numbers = keys.to_numpy()
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    twice = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(twice):
        raise DataError(f"{one.file}: {key} {numbers[twice[0]]} has more than one row; keep one of them")
    return SideTable(numbers, {name: column.take(pa.array(order)) for name, column in columns.items()})
