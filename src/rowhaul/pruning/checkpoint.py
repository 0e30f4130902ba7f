"""Pruned rows to and from a ``state_dict``, checkpoints and exports: only what exists, nothing padded.

By table: the keys that have an entry, which of their chunks are stored, those chunks (values, then state, one
after the other), utilities and the step they are of. By row size: what the pruner knows beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.pruning.deciding.room import RowCut
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.row_parts import Arrays

if TYPE_CHECKING:
    from rowhaul.nn import TableCollection
    from rowhaul.pruning.pool.collection import PrunedRows

FACT = "pruning"  # of a checkpoint's facts: how its rows were pruned; absent where they were not
FILE = "pruning"  # of what pruners know
ROW_PARTS = ("keys", "present", "chunks", "utilities", "touched")
PRUNER_PARTS = ("registers", "numbers", "columns", "sums")


def pruned_rows(collection: TableCollection) -> PrunedRows:
    """Return the rows of a collection that prunes in this process."""
    return cast("PrunedRows", collection.source)


def fact(settings: PruneSettings, file: str) -> dict[str, Any]:
    """Return what a manifest says of pruning; ``file`` has what pruners know."""
    return {"chunks": settings.chunks, "file": file, "settings": asdict(settings)}


def blocks(collection: TableCollection, table: str) -> Iterator[Arrays]:
    """Yield the rows of a table as blocks of the format."""
    tables, position = pruned_rows(collection).find_table(table)
    return tables.row_blocks(position)


def write(writer: Any, collection: TableCollection) -> None:
    """Write all tables of a pruned collection."""
    pruning = pruned_rows(collection)
    writer.facts[FACT] = fact(pruning.settings, writer.arrays(FILE, _pruner_arrays(pruning)))
    for config in collection.table_configs():
        dtype = str(config.data_type).removeprefix("torch.")
        rows = blocks(collection, config.name)
        writer.blocks(config.name, rows, config.embedding_dim, 0, dtype, "chunked")


def read(reader: Any, collection: TableCollection) -> None:
    """Replace every row of a collection by the checkpoint's."""
    pruning = pruned_rows(collection)
    collection.drop_gradients()
    _load_pruners(pruning, reader.arrays(reader.facts[FACT]["file"]))
    for table in reader.tables:
        tables, position = pruning.find_table(table)
        for block in reader.blocks(table):
            _check_rows(pruning, table, block, len(block["columns"]))
            tables.load_block(position, block)


def load_export(reader: Any, collection: TableCollection) -> None:
    """Fill a collection that serves: an export has neither utilities nor what pruners know for training."""
    pruning = pruned_rows(collection)
    files: dict[str, Any] = {name: table.file_layout() for name, table in reader.tables.items()}
    for name, file in files.items():
        if file.num_chunks != pruning.settings.chunks:
            raise CheckpointError(
                f"{reader.path}: rows of table {name!r} are in {file.num_chunks} chunks, those of its model "
                f"in {pruning.settings.chunks}; export again"
            )
    for tables in pruning.tables:
        columns = np.array([files[one.name].cut for one in tables.tables], np.int64)
        known = {**tables.state(), "columns": columns}
        known["numbers"][5] = columns.shape[1] == tables.dim  # whether columns are still to be chosen
        tables.restore(known)
    for name, file in files.items():
        tables, position = pruning.find_table(name)
        for block in reader.blocks(name):
            tables.load_block(position, file.chunks(block))


def state_of(pruning: PrunedRows) -> dict[str, npt.NDArray[Any]]:
    """Return everything, by the names that a ``state_dict`` has it under."""
    arrays = {f"pruning.{name}": array for name, array in _pruner_arrays(pruning).items()}
    nothing = np.empty(0, np.int64)
    for table in pruning.table_names():
        tables, position = pruning.find_table(table)
        blocks = [tables.row_block(position, nothing, nothing), *tables.row_blocks(position)]
        for part in ROW_PARTS:
            arrays[f"{table}.{part}"] = np.concatenate([block[part] for block in blocks])
    return arrays


def names_of_state(pruning: PrunedRows) -> list[str]:
    """Name the arrays of `state_of`, without making them."""
    numbers = range(len(pruning.tables))
    names = [f"pruning.{number}.{part}" for number in numbers for part in PRUNER_PARTS]
    return names + [f"{table}.{part}" for table in pruning.table_names() for part in ROW_PARTS]


def load_state(pruning: PrunedRows, arrays: Arrays) -> None:
    """Invert `state_of`; rows of another kind are refused before anything changes."""
    rows = {table: {part: arrays[f"{table}.{part}"] for part in ROW_PARTS} for table in pruning.table_names()}
    for table, block in rows.items():
        number = pruning.tables.index(pruning.find_table(table)[0])
        _check_rows(pruning, table, block, arrays[f"pruning.{number}.columns"].shape[1])
    _load_pruners(pruning, {name.removeprefix("pruning."): array for name, array in arrays.items()})
    for table, block in rows.items():
        tables, position = pruning.find_table(table)
        tables.load_block(position, block)


def _pruner_arrays(pruning: PrunedRows) -> dict[str, npt.NDArray[Any]]:
    """Return what pruners know beside rows, as ``0.registers`` and so on."""
    every = enumerate(pruning.tables)
    return {f"{number}.{name}": one for number, tables in every for name, one in tables.state().items()}


def _load_pruners(pruning: PrunedRows, arrays: Arrays) -> None:
    """Drop every row and restore what pruners knew."""
    for number, tables in enumerate(pruning.tables):
        tables.restore({part: arrays[f"{number}.{part}"] for part in PRUNER_PARTS})


def _check_rows(pruning: PrunedRows, table: str, arrays: Mapping[str, Any], columns: int) -> None:
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
