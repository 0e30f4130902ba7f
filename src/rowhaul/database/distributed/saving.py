"""A distributed database on disk: one checkpoint folder, to which every rank adds its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import ShardWriter
from rowhaul.checkpoint.layout import unfinished_folder
from rowhaul.checkpoint.shard import Shard
from rowhaul.checkpoint.writer import prepare, publish
from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.routing import owners_of
from rowhaul.database.pieces import Pieces
from rowhaul.database.rows import Rows
from rowhaul.database.saving import facts_of, load_rows, open_checkpoint, step_of, write_tables
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.snapshot import Snapshot
from rowhaul.errors import CheckpointError, RowhaulError


def save_together(calls: Calls, local: Snapshot, settings: DatabaseSettings, path: str | Path) -> None:
    """Every rank writes its rows; rank 0 makes the folder before, and the manifest when all are done."""
    path = Path(path)
    error: Exception | None = None
    if calls.rank == 0:
        try:
            prepare(path)
        except (RowhaulError, OSError) as failed:
            error = failed
    calls.agree("save", local.step, error)
    shard = Shard()
    try:
        shard = _write(calls, local, settings, path)
    except (RowhaulError, OSError) as failed:
        error = failed
    calls.agree("save", local.step, error)
    shards = _gather(calls, shard.to_json().encode(), local.step)
    if calls.rank == 0:
        try:
            publish(path, facts_of(settings, local.step), [Shard.from_json(text.decode()) for text in shards])
        except (RowhaulError, OSError) as failed:
            error = failed
    calls.agree("save", local.step, error)


def _write(calls: Calls, local: Snapshot, settings: DatabaseSettings, path: Path) -> Shard:
    folder = unfinished_folder(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {calls.rank} does not see {folder}, which rank 0 made: save to a folder that all share"
        )
    writer = ShardWriter(folder, f"r{calls.rank:04d}")
    write_tables(writer, local, settings)
    return writer.written


def _gather(calls: Calls, text: bytes, step: int) -> list[bytes]:
    """The texts of all ranks on rank 0, nothing elsewhere."""
    nothing = np.empty(0, np.uint8)
    own = np.frombuffer(text, np.uint8)
    lengths = np.zeros((calls.num_ranks, 1), np.int64)
    lengths[0] = len(own)
    heard = calls.tell("save", step, lengths)[:, 0]
    given = [own if rank == 0 else nothing for rank in range(calls.num_ranks)]
    return [data.tobytes() for data in calls.ring.exchange(given, heard.tolist())]


def load_owned(
    calls: Calls, settings: DatabaseSettings, pieces: Pieces, path: str | Path
) -> tuple[Rows, int]:
    """The rows of a checkpoint whose keys this rank owns, and its step; one rank's error is all ranks'."""
    rows = Rows(settings, pieces)

    def keep(table: str, keys: npt.NDArray[np.int64], records: npt.NDArray[Any]) -> None:
        own = owners_of(keys, calls.num_ranks) == calls.rank
        rows.load(table, keys[own], records[own])

    error: Exception | None = None
    step = 0
    try:
        reader = open_checkpoint(path, settings)
        load_rows(reader, keep)
        step = step_of(reader)
    except (RowhaulError, OSError, MemoryError) as failed:
        error = failed
    calls.agree("load", 0, error)
    return rows, step
