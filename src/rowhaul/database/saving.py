"""A database on disk, in the checkpoint format of training, so that the same tools read both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, ShardWriter
from rowhaul.database.rows import Rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.threads import Pieces
from rowhaul.errors import CheckpointError
from rowhaul.store.whole_rows import WholeRows

if TYPE_CHECKING:
    from rowhaul.database.snapshot import Snapshot

KIND = "EmbeddingDatabase"
Int64s = npt.NDArray[np.int64]


def facts_of(settings: DatabaseSettings, step: int) -> dict[str, Any]:
    """The facts in a checkpoint's manifest."""
    return {
        "model": KIND,
        "step": step,
        "row_steps": [step],
        "row_optimizer": settings.optimizer.name,
        "seed": settings.seed,
    }


def write_tables(
    writer: CheckpointWriter | ShardWriter, snapshot: Snapshot, settings: DatabaseSettings
) -> None:
    """Write all rows of a snapshot; deletions may continue after each table, even if writing failed."""
    for spec in settings.tables:
        with closing(snapshot.blocks(spec.name)) as blocks:
            writer.table(spec.name, blocks, spec.dim, settings.state_width(spec), settings.dtype)


def load_rows(
    path: str | Path,
    settings: DatabaseSettings,
    pieces: Pieces,
    owns: Callable[[Int64s], npt.NDArray[np.bool_]] | None = None,
) -> Rows:
    """Read the rows of a checkpoint, or only those with keys that a rank owns."""
    reader = _open_checkpoint(path, settings)
    rows = Rows(settings, pieces)
    rows.num_steps = _num_steps(reader)
    if owns is None:
        rows.reserve({name: table.num_rows for name, table in reader.tables.items()})
    for table in reader.tables:
        for keys, records in reader.rows(table):
            own = slice(None) if owns is None else owns(keys)
            rows.load(table, keys[own], records[own])
    return rows


def _open_checkpoint(path: str | Path, settings: DatabaseSettings) -> CheckpointReader:
    """Check that a checkpoint has the database's tables, and that all its files are intact."""
    reader = CheckpointReader(path)
    optimizer = settings.optimizer.name
    ours = {
        spec.name: f"dim {spec.dim}, {optimizer} ({settings.state_width(spec)} of state), {settings.dtype}"
        for spec in settings.tables
    }
    saved = reader.facts.get("row_optimizer", "no row_optimizer in its facts")
    theirs = {
        table.name: f"dim {table.dim}, {saved} ({table.state_width} of state), {table.dtype}"
        for table in reader.tables.values()
    }
    for name in (*ours, *theirs):
        found, needed = theirs.get(name, "absent"), ours.get(name, "absent")
        if found != needed:
            raise CheckpointError(
                f"{reader.path} has other tables: {name!r} is {found} there and {needed} here; "
                "create the database with the tables and the optimizer it was saved with"
            )
    for name in ours:
        _check_format(reader, name)
    reader.verify()
    if (seed := reader.facts.get("seed", settings.seed)) != settings.seed:
        warnings.warn(
            f"{reader.path} was saved with seed={seed}, and this database has seed={settings.seed}: rows "
            "created from now on begin with other values than they would have there",
            stacklevel=4,  # of who loads
        )
    return reader


def _check_format(reader: CheckpointReader, table: str) -> None:
    """Refuse parts of rows, and rows that are not those of one id: read by key, they would be wrong."""
    format = reader.format(table)
    if not isinstance(format, WholeRows) or not format.keyed_by_id:
        raise CheckpointError(
            f"{reader.path} was trained with pruning or within a budget: table {table!r} is in format "
            f"{format.name!r}, and an embedding database needs a whole row for each id; load a checkpoint "
            "that was trained without them"
        )


def _num_steps(reader: CheckpointReader) -> int:
    """The steps that rows have taken, which some optimizers need."""
    facts = reader.facts
    steps = facts.get("row_steps") or [facts.get("step")]  # checkpoints written by hand have ``step`` alone
    if not isinstance(steps, list) or not isinstance(steps[0], int):
        raise CheckpointError(
            f"{reader.path} does not say how many steps its rows have taken; write facts['step'] with it"
        )
    return steps[0]
