"""A database on disk: the checkpoint format of training, so that the same tools read both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.database.settings import DatabaseSettings
from rowhaul.errors import CheckpointError

if TYPE_CHECKING:
    from rowhaul.database.snapshot import Snapshot

KIND = "EmbeddingDatabase"
Block = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]
Load = Callable[[str, npt.NDArray[np.int64], npt.NDArray[Any]], None]


class Tables(Protocol):
    """Where tables are written: a whole checkpoint, or one rank's part of it."""

    def table(self, name: str, blocks: Iterable[Block], dim: int, state_width: int, dtype: str) -> None:
        """Store a table's rows, given as blocks of (keys, records), values before state."""


def facts_of(settings: DatabaseSettings, step: int) -> dict[str, Any]:
    """What a checkpoint says beside its rows."""
    return {
        "model": KIND,
        "step": step,
        "row_steps": [step],
        "row_optimizer": settings.optimizer.name,
        "seed": settings.seed,
    }


def save_snapshot(snapshot: Snapshot, settings: DatabaseSettings, path: str | Path) -> None:
    """Stream a snapshot's rows into a checkpoint that is there whole or not at all."""
    with CheckpointWriter(path) as writer:
        writer.facts = facts_of(settings, snapshot.step)
        write_tables(writer, snapshot, settings)


def write_tables(writer: Tables, snapshot: Snapshot, settings: DatabaseSettings) -> None:
    """Write all rows of a snapshot; deletions go on after each table, even if it could not be written."""
    for spec in settings.tables:
        with closing(snapshot.blocks(spec.name)) as blocks:
            writer.table(spec.name, blocks, spec.dim, settings.state_width(spec), settings.dtype)


def open_checkpoint(path: str | Path, settings: DatabaseSettings) -> CheckpointReader:
    """A checkpoint whose every file is whole, and whose tables are the database's."""
    reader = CheckpointReader(path)
    optimizer = settings.optimizer.name
    ours = {
        spec.name: f"dim {spec.dim}, {optimizer} ({settings.state_width(spec)} of state), {settings.dtype}"
        for spec in settings.tables
    }
    saved = reader.facts.get("row_optimizer")
    theirs = {
        table.name: f"dim {table.dim}, {saved} ({table.state_width} of state), {table.dtype}"
        for table in reader.tables.values()
    }
    for name in (*ours, *theirs):
        found, needed = theirs.get(name, "absent"), ours.get(name, "absent")
        if found != needed:
            raise CheckpointError(
                f"{reader.path} is of other tables: {name!r} is {found} there and {needed} here; "
                "make the database with the tables and the optimizer it was saved with"
            )
    reader.verify()
    return reader


def step_of(reader: CheckpointReader) -> int:
    """Optimizer steps before a checkpoint."""
    return int(reader.facts["row_steps"][0])


def load_rows(reader: CheckpointReader, load: Load) -> None:
    """Hand every row of a checkpoint over, block by block."""
    for table in reader.tables:
        for keys, contents in reader.rows(table):
            load(table, keys, contents)
