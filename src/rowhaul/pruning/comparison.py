"""How far apart pruned rows are: which chunks are stored, what is in them, how useful they were.

A cluster has read some batches ahead, whose new rows have chunks already: rows that no worker has trained,
and that the other side does not know, must be as they begin, and are no difference then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.room import RowCut
from rowhaul.pruning.layout import ChunkLayout, fresh_records
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.row_format import RowFormat
from rowhaul.store.row_parts import Arrays, Int64s, Lines
from rowhaul.store.whole_rows import row_names


def empty_block(layout: ChunkLayout, table: str) -> Arrays:
    """Return a block without rows, cut as a layout says."""
    return {
        "keys": np.empty(0, np.int64),
        "present": np.empty((0, layout.num_chunks), np.bool_),
        "chunks": np.empty((0, layout.cut.width), layout.dtype),
        "utilities": np.empty((0, layout.num_chunks), np.float32),
        "touched": np.empty(0, np.int32),
        "columns": layout.column_matrix[_number(layout, table)],
        "starts": layout.cut.starts,
    }


def aligned(
    format: RowFormat, layout: ChunkLayout, table: str, found: Arrays, expected: Arrays
) -> Iterator[Lines]:
    """Put the rows of two trainings side by side; numbers are those of chunks that both have."""
    if not len(found["keys"]):
        found = format.select(expected, np.zeros(len(expected["keys"]), np.bool_))
    if not len(expected["keys"]):
        expected = format.select(found, np.zeros(len(found["keys"]), np.bool_))
    columns = found["columns"], expected["columns"]
    if not np.array_equal(*columns):
        most = max(map(len, columns))
        padded = [np.pad(one, (0, most - len(one)), constant_values=-1)[None] for one in columns]
        yield Lines("columns kept", padded[0], padded[1], lambda line: f"table {table}")
        return
    expected = _with_untrained(format, expected, found, layout, table)
    keys = np.union1d(found["keys"], expected["keys"])
    here, there = _spread(found, keys), _spread(expected, keys)
    lacking = ~np.isin(keys, found["keys"]), ~np.isin(keys, expected["keys"])
    name = row_names(table, keys)
    both = here["present"] & there["present"]
    cut = RowCut(len(columns[0]), layout.num_chunks, layout.optimizer)
    number = np.arange(here["chunks"].shape[2])
    is_value, is_stored = number < cut.sizes[:, None], number < cut.widths[:, None]

    def lines(kind: str, mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> Lines:
        flat = len(keys), int(np.prod(mine.shape[1:]))
        return Lines(kind, mine.reshape(flat), theirs.reshape(flat), name, lacking)

    yield lines("stored chunks", here["present"].astype(np.int8), there["present"].astype(np.int8))
    for kind, which in (("rows", is_value), ("optimizer state", is_stored & ~is_value)):
        chosen = both[:, :, None] & which
        yield lines(kind, *(np.where(chosen, one["chunks"], 0) for one in (here, there)))
    yield lines("utilities", here["utilities"], there["utilities"])


def _number(layout: ChunkLayout, table: str) -> int:
    return [spec.name for spec in layout.rows].index(table)


def _with_untrained(
    format: RowFormat, rows: Arrays, others: Arrays, layout: ChunkLayout, table: str
) -> Arrays:
    """Add those of the other rows that these lack and that were never trained, as they begin."""
    more = ~np.isin(others["keys"], rows["keys"]) & ~others["utilities"].any(axis=1)
    if not more.any():
        return rows
    added = dict(format.select(others, more))
    if len(added["columns"]) < layout.column_matrix.shape[1]:  # chosen while it was trained
        layout = layout.narrowed(np.tile(added["columns"], (len(layout.rows), 1)))
    memory, chunks = RowMemory(layout), np.zeros_like(added["chunks"])
    row_of_chunk, places = np.nonzero(added["present"])
    for place, width in enumerate(layout.cut.widths):
        some, number = np.flatnonzero(places == place), _number(layout, table) * layout.num_chunks + place
        chunks[some, :width] = fresh_records(memory, number, added["keys"][row_of_chunk[some]])
    return format.join([rows, {**added, "chunks": chunks}])


def _spread(block: Arrays, keys: Int64s) -> dict[str, npt.NDArray[Any]]:
    """Spread rows over all keys, zeros where there is nothing; chunks are rows x chunks x elements."""
    order = np.searchsorted(keys, block["keys"])
    row, place = np.nonzero(block["present"])
    shape = len(keys), block["present"].shape[1]
    every = {name: np.zeros(shape, block[name].dtype) for name in ("present", "utilities")}
    for name, array in every.items():
        array[order] = block[name]
    chunks = np.zeros((*shape, block["chunks"].shape[1]), block["chunks"].dtype)
    chunks[order[row], place] = block["chunks"]
    return {**every, "chunks": chunks}
