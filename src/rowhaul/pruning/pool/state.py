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
from rowhaul.pruning.pool.lookups import RowBlock
from rowhaul.pruning.pool.pruner import Pruner
from rowhaul.pruning.pool.tables import PrunedTables

if TYPE_CHECKING:
    from rowhaul.pruning.pool.collection import PrunedRows

Arrays = dict[str, npt.NDArray[Any]]
ROW_PARTS = ("keys", "present", "chunks", "utilities", "touched")
PRUNER_PARTS = ("registers", "numbers", "columns", "sums")


def pruner_arrays(pruning: PrunedRows) -> Arrays:
    """What pruners know beside rows, as ``0.registers`` and so on."""
    arrays: Arrays = {}
    for number, pruner in enumerate(pruning.pruners):
        for name, part in zip(PRUNER_PARTS, pruner.state(), strict=True):
            arrays[f"{number}.{name}"] = part
    return arrays


def row_arrays(pruning: PrunedRows, table: str) -> Iterator[Arrays]:
    """The rows of a table, block by block."""
    pruning.wait()
    tables, position = _find(pruning, table)
    for block in tables.row_blocks(position):
        parts = (block.keys, block.present, block.records, block.utilities, block.touched)
        yield dict(zip(ROW_PARTS, parts, strict=True))


def no_rows(pruning: PrunedRows, table: str) -> Arrays:
    """The arrays of a table without rows."""
    tables, _ = _find(pruning, table)
    num_chunks, width = tables.pool.num_chunks, tables.pool.arena.width
    return {
        "keys": np.empty(0, dtype=np.int64),
        "present": np.empty((0, num_chunks), dtype=np.bool_),
        "chunks": np.empty((0, width), dtype=tables.dtype),
        "utilities": np.empty((0, num_chunks), dtype=np.float32),
        "touched": np.empty(0, dtype=np.int32),
    }


def stored_columns(pruning: PrunedRows, table: str) -> Arrays:
    """Which columns of a table's rows are stored, and where chunks begin among them."""
    tables, position = _find(pruning, table)
    return {"columns": tables.columns[position], "starts": tables.pool.starts}


def check_rows(pruning: PrunedRows, table: str, arrays: Mapping[str, Any], columns: int) -> None:
    """Refuse rows of another kind; ``columns`` are those that rows of the table keep there."""
    tables, _ = _find(pruning, table)
    num_chunks = arrays["present"].shape[1]
    if num_chunks != tables.pool.num_chunks:
        raise CheckpointError(
            f"table {table!r} was pruned with {num_chunks} chunks a row, here rows have "
            f"{tables.pool.num_chunks}; set prune.chunks to {num_chunks}, or train anew"
        )
    keys, chunks = arrays["keys"], arrays["chunks"]
    width = _width(tables, columns)
    if chunks.shape != (int(np.count_nonzero(arrays["present"])), width) or len(np.unique(keys)) != len(keys):
        raise CheckpointError(
            f"table {table!r}: {np.count_nonzero(arrays['present']):,} chunks with records of shape "
            f"{chunks.shape}; this model needs {width} elements a chunk ({tables.optimizer.name}, "
            f"{columns} values a row)"
        )


def load_pruners(pruning: PrunedRows, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Forget every row and take over what pruners knew."""
    for number, pruner in enumerate(pruning.pruners):
        pruner.restore(*(arrays[f"{number}.{name}"] for name in PRUNER_PARTS))


def load_rows(pruning: PrunedRows, table: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Add rows as `row_arrays` gave them."""
    tables, position = _find(pruning, table)
    tables.load_block(position, RowBlock(*(np.ascontiguousarray(arrays[name]) for name in ROW_PARTS)))


def pruner_of(pruning: PrunedRows, table: str) -> tuple[int, Pruner]:
    """Which pruner a table belongs to."""
    tables, _ = _find(pruning, table)
    for number, pruner in enumerate(pruning.pruners):
        if tables in pruner.groups:
            return number, pruner
    raise AssertionError("every table has a pruner")


def _width(tables: PrunedTables, num_columns: int) -> int:
    """Elements of a chunk with its state, as checkpoints have them even where only values are held."""
    largest = -(-num_columns // tables.pool.num_chunks)
    smallest = num_columns // tables.pool.num_chunks
    return max(size + tables.optimizer.state_width(size) for size in (largest, smallest))


def _find(pruning: PrunedRows, table: str) -> tuple[PrunedTables, int]:
    for group in pruning.groups:
        for position, spec in enumerate(group.pruned.tables):
            if spec.name == table:
                return group.pruned, position
    raise AssertionError(f"no table {table!r}")


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
    numbers = range(len(pruning.pruners))
    names = [f"pruning.{number}.{part}" for number in numbers for part in PRUNER_PARTS]
    return names + [f"{table}.{part}" for table in tables for part in ROW_PARTS]


def load_state(pruning: PrunedRows, tables: Sequence[str], arrays: Arrays) -> None:
    """The inverse of `state_of`; rows of another kind are refused before anything changes."""
    for table in tables:
        number, _ = pruner_of(pruning, table)
        rows = {part: arrays[f"{table}.{part}"] for part in ROW_PARTS}
        check_rows(pruning, table, rows, arrays[f"pruning.{number}.columns"].shape[1])
    load_pruners(pruning, {name.removeprefix("pruning."): array for name, array in arrays.items()})
    for table in tables:
        load_rows(pruning, table, {part: arrays[f"{table}.{part}"] for part in ROW_PARTS})
