"""Pruned rows to and from a checkpoint: only what exists, and what the pruner knows beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.errors import CheckpointError
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.pruning.pool import PruneSettings
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.pruning.pool.state import (
    check_rows,
    load_pruners,
    load_rows,
    pruner_arrays,
    row_arrays,
    stored_columns,
)
from rowhaul.pruning.row_files import FACT as FACT

_FILE = "pruning"


def write(writer: CheckpointWriter, collection: EmbeddingBagCollection, pruning: PrunedRows) -> None:
    """Write all tables of a pruned collection."""
    name = writer.arrays(_FILE, pruner_arrays(pruning))
    writer.facts[FACT] = fact(pruning.settings, name)
    for config in collection.embedding_bag_configs():
        writer.pruned_table(
            config.name,
            row_arrays(pruning, config.name),
            stored_columns(pruning, config.name),
            config.embedding_dim,
            str(config.data_type).removeprefix("torch."),
        )


def fact(settings: PruneSettings, file: str) -> dict[str, Any]:
    """What a manifest says of pruning; ``file`` has what pruners know."""
    return {"chunks": settings.chunks, "file": file, "settings": asdict(settings)}


def check(reader: CheckpointReader, pruning: PrunedRows | None) -> None:
    """Refuse a checkpoint that was pruned otherwise, with the reason."""
    there: dict[str, Any] | None = reader.facts.get(FACT)
    if (there is None) != (pruning is None):
        was, now = ("was", "is not") if there is not None else ("was not", "is")
        raise CheckpointError(
            f"{reader.path} {was} pruned, and this model {now}; use the configuration it was trained with"
        )
    if there is not None and pruning is not None and there["chunks"] != pruning.settings.chunks:
        raise CheckpointError(
            f"{reader.path} was pruned with {there['chunks']} chunks a row, here prune.chunks is "
            f"{pruning.settings.chunks}: chunks of one size cannot become those of another; set it to "
            f"{there['chunks']}"
        )


def read(reader: CheckpointReader, collection: EmbeddingBagCollection, pruning: PrunedRows) -> None:
    """Replace every row of a collection by the checkpoint's."""
    load_pruners(pruning, reader.arrays(reader.facts[FACT]["file"]))
    for config in collection.embedding_bag_configs():
        for arrays in reader.pruned_rows(config.name):
            check_rows(pruning, config.name, arrays, len(arrays["columns"]))
            load_rows(pruning, config.name, arrays)
