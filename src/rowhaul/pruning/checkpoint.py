"""A pruned collection to and from checkpoints and exports: stored chunks, and what pruners know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from rowhaul.errors import CheckpointError
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.pruning.pool.state import (
    PRUNER_PARTS,
    check_rows,
    load_pruners,
    load_rows,
    pruner_arrays,
    row_arrays,
    stored_columns,
)
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.row_parts import Arrays

FACT = "pruning"  # of a checkpoint's facts: how its rows were pruned; absent where they were not
FILE = "pruning"  # of what pruners know


def pruned_rows(collection: EmbeddingBagCollection) -> PrunedRows:
    """Return the rows of a collection that prunes in this process."""
    assert isinstance(collection.source, PrunedRows)
    return collection.source


def fact(settings: PruneSettings, file: str) -> dict[str, Any]:
    """Return what a manifest says of pruning; ``file`` has what pruners know."""
    return {"chunks": settings.chunks, "file": file, "settings": asdict(settings)}


def blocks(collection: EmbeddingBagCollection, table: str) -> Iterator[Arrays]:
    """Yield the rows of a table as blocks of the format."""
    pruning = pruned_rows(collection)
    for parts in row_arrays(pruning, table):
        yield {**parts, **stored_columns(pruning, table)}


def write(writer: Any, collection: EmbeddingBagCollection) -> None:
    """Write all tables of a pruned collection."""
    pruning = pruned_rows(collection)
    writer.facts[FACT] = fact(pruning.settings, writer.arrays(FILE, pruner_arrays(pruning)))
    for config in collection.embedding_bag_configs():
        dtype = str(config.data_type).removeprefix("torch.")
        rows = blocks(collection, config.name)
        writer.blocks(config.name, rows, config.embedding_dim, 0, dtype, "chunked")


def read(reader: Any, collection: EmbeddingBagCollection) -> None:
    """Replace every row of a collection by the checkpoint's."""
    pruning = pruned_rows(collection)
    collection.drop_gradients()
    load_pruners(pruning, reader.arrays(reader.facts[FACT]["file"]))
    for table in reader.tables:
        for block in reader.blocks(table):
            check_rows(pruning, table, block, len(block["columns"]))
            load_rows(pruning, table, block)


def load_export(reader: Any, collection: EmbeddingBagCollection) -> None:
    """Fill a collection that serves: an export has neither utilities nor what pruners know for training."""
    pruning = pruned_rows(collection)
    files: dict[str, Any] = {name: table.file_layout() for name, table in reader.tables.items()}
    for name, file in files.items():
        if file.num_chunks != pruning.settings.chunks:
            raise CheckpointError(
                f"{reader.path}: rows of table {name!r} are in {file.num_chunks} chunks, those of its model "
                f"in {pruning.settings.chunks}; export again"
            )
    known: dict[str, Any] = {}
    for number, tables in enumerate(pruning.tables):
        columns = np.array([files[spec.name].cut for spec in tables.tables], np.int64)
        registers, numbers, _, sums = tables.state()
        numbers[5] = columns.shape[1] == tables.dim  # whether columns are still to be chosen
        parts = zip(PRUNER_PARTS, (registers, numbers, columns, sums), strict=True)
        known |= {f"{number}.{name}": one for name, one in parts}
    load_pruners(pruning, known)
    for name, file in files.items():
        for block in reader.blocks(name):
            load_rows(pruning, name, file.chunks(block))
