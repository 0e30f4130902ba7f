"""A pruned collection as named arrays, and back: only what exists, nothing padded.

By table: the keys that have an entry, which of their chunks are there, those chunks (values, then state, one
after the other), utilities and the step they are of. By row size: what the pruner knows beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.pruning.cut import RowCut
from rowhaul.pruning.pool.tables import RowBlock

if TYPE_CHECKING:
    from rowhaul.pruning.pool.collection import PrunedRows

Arrays = dict[str, npt.NDArray[Any]]
ROW_PARTS = ("keys", "present", "chunks", "utilities", "touched")
PRUNER_PARTS = ("registers", "numbers", "columns", "sums")


def pruner_arrays(pruning: PrunedRows) -> Arrays:
    """What pruners know beside rows, as ``0.registers`` and so on."""
    arrays: Arrays = {}
    for number, tables in enumerate(pruning.tables):
        for name, part in zip(PRUNER_PARTS, tables.state(), strict=True):
            arrays[f"{number}.{name}"] = part
    return arrays


def row_arrays(pruning: PrunedRows, table: str) -> Iterator[Arrays]:
    """The rows of a table, block by block."""
    tables, position = pruning.find_table(table)
    for block in tables.row_blocks(position):
        parts = (block.keys, block.present, block.records, block.utilities, block.touched)
        yield dict(zip(ROW_PARTS, parts, strict=True))


def no_rows(pruning: PrunedRows, table: str) -> Arrays:
    """The arrays of a table without rows."""
    tables, _ = pruning.find_table(table)
    nothing = np.empty(0, dtype=np.int64)
    present, utilities, touched = tables.map.entries.saved(nothing)
    chunks = np.empty((0, tables.arena.width), dtype=tables.dtype)
    return {"keys": nothing, "present": present, "chunks": chunks, "utilities": utilities, "touched": touched}


def stored_columns(pruning: PrunedRows, table: str) -> Arrays:
    """Which columns of a table's rows are stored, and where chunks begin among them."""
    tables, position = pruning.find_table(table)
    return {"columns": tables.columns[position], "starts": tables.cut.starts}


def check_rows(pruning: PrunedRows, table: str, arrays: Mapping[str, Any], columns: int) -> None:
    """Refuse rows of another kind; ``columns`` are those that rows of the table keep there."""
    tables, _ = pruning.find_table(table)
    num_chunks = arrays["present"].shape[1]
    if num_chunks != tables.cut.num_chunks:
        raise CheckpointError(
            f"table {table!r} was pruned with {num_chunks} chunks a row, here rows have "
            f"{tables.cut.num_chunks}; set prune.chunks to {num_chunks}, or train anew"
        )
    keys, chunks = arrays["keys"], arrays["chunks"]
    width = RowCut(columns, tables.cut.num_chunks, tables.optimizer).width
    if chunks.shape != (int(np.count_nonzero(arrays["present"])), width) or len(np.unique(keys)) != len(keys):
        raise CheckpointError(
            f"table {table!r}: {np.count_nonzero(arrays['present']):,} chunks with records of shape "
            f"{chunks.shape}; this model needs {width} elements a chunk ({tables.optimizer.name}, "
            f"{columns} values a row)"
        )


def load_pruners(pruning: PrunedRows, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Forget every row and take over what pruners knew."""
    for number, tables in enumerate(pruning.tables):
        tables.restore(*(arrays[f"{number}.{name}"] for name in PRUNER_PARTS))


def load_rows(pruning: PrunedRows, table: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Add rows as `row_arrays` gave them."""
    tables, position = pruning.find_table(table)
    tables.load_block(position, RowBlock(*(np.ascontiguousarray(arrays[name]) for name in ROW_PARTS)))


def state_of(pruning: PrunedRows, tables: Sequence[str]) -> Arrays:
    """Everything, by the names that a ``state_dict`` has it under."""
    arrays = {f"pruning.{name}": array for name, array in pruner_arrays(pruning).items()}
    for table in tables:
        blocks = [no_rows(pruning, table), *row_arrays(pruning, table)]
        for part in ROW_PARTS:
            arrays[f"{table}.{part}"] = np.concatenate([block[part] for block in blocks])
    return arrays


def names_of_state(pruning: PrunedRows, tables: Sequence[str]) -> list[str]:
    """The names of `state_of`, without making it."""
    numbers = range(len(pruning.tables))
    names = [f"pruning.{number}.{part}" for number in numbers for part in PRUNER_PARTS]
    return names + [f"{table}.{part}" for table in tables for part in ROW_PARTS]


def load_state(pruning: PrunedRows, tables: Sequence[str], arrays: Arrays) -> None:
    """The inverse of `state_of`; rows of another kind are refused before anything changes."""
    for table in tables:
        number = pruning.tables.index(pruning.find_table(table)[0])
        rows = {part: arrays[f"{table}.{part}"] for part in ROW_PARTS}
        check_rows(pruning, table, rows, arrays[f"pruning.{number}.columns"].shape[1])
    load_pruners(pruning, {name.removeprefix("pruning."): array for name, array in arrays.items()})
    for table in tables:
        load_rows(pruning, table, {part: arrays[f"{table}.{part}"] for part in ROW_PARTS})
