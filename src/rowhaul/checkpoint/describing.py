"""What a checkpoint holds, in numbers: tables, tensors, the layout of a cluster; and what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import safetensors

from rowhaul.checkpoint.layout import TableEntry
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError
from rowhaul.pruning.row_files import FACT

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

_LAYOUT, _SCHEDULE = "layout-", "schedule."  # what only the cluster that saved can use


@dataclass(frozen=True)
class TableContents:
    """One table: its rows, and what they take on disk."""

    name: str
    rows: int
    dim: int
    state_width: int  # elements of optimizer state in a row
    dtype: str
    bytes: int
    files: int
    chunks: int | None = None  # that a row is cut into; None: rows are whole
    chunks_there: int | None = None  # of all rows together; None: not known, a file is damaged
    columns: int | None = None  # of a row that are stored, where there is any


@dataclass(frozen=True)
class Contents:
    """A checkpoint at a glance; facts that were not saved are None."""

    path: str
    step: int | None
    samples: int | None
    model: str | None
    row_optimizer: str | None
    tables: tuple[TableContents, ...]
    tensors: dict[str, int]  # bytes by group
    layout: dict[str, int]  # bytes by file of the sidecar; empty where one process saved
    saved_by: dict[str, Any] | None  # workers, stores, ... of the cluster
    bytes: int
    files: int


def describe(reader: CheckpointReader) -> Contents:
    """Read off the manifest; of files only the headers of pruned rows are looked at."""
    sizes, facts = reader.file_bytes, reader.facts
    cluster = facts.get("cluster")
    return Contents(
        path=str(reader.path),
        step=facts.get("step"),
        samples=facts.get("samples"),
        model=facts.get("model"),
        row_optimizer=facts.get("row_optimizer"),
        tables=tuple(
            TableContents(
                table.name,
                table.num_rows,
                table.dim,
                table.state_width,
                table.dtype,
                sum(sizes[name] for name in table.files),
                len(table.files),
                *_chunks(reader, table),
            )
            for table in reader.tables.values()
        ),
        tensors={group: sizes[f"tensors-{group}.safetensors"] for group in reader.groups},
        layout={name: size for name, size in sizes.items() if name.startswith((_LAYOUT, _SCHEDULE))},
        saved_by=cluster.get("settings") if isinstance(cluster, dict) else None,
        bytes=sum(sizes.values()),
        files=len(sizes),
    )


def _chunks(reader: CheckpointReader, table: TableEntry) -> tuple[int | None, int | None, int | None]:
    """Chunks of a row, chunks that there are, and columns that are stored; nothing where rows are whole."""
    if reader.facts.get(FACT) is None:
        return None, None, None
    there, columns = 0, None
    for name in table.files:
        try:
            with safetensors.safe_open(reader.path / name, framework="numpy") as file:
                there += int(file.get_slice("chunks").get_shape()[0])
                columns = int(file.get_slice("columns").get_shape()[0])
        except (OSError, safetensors.SafetensorError):  # --verify says what is wrong with it
            return int(reader.facts[FACT]["chunks"]), None, columns
    return int(reader.facts[FACT]["chunks"]), there, columns


def damaged_files(reader: CheckpointReader, progress: Progress = lambda done, total: None) -> dict[str, str]:
    """What is wrong with each file that does not agree with the manifest; progress is in bytes."""
    sizes = reader.file_bytes
    done, total = 0, sum(sizes.values())
    damaged: dict[str, str] = {}
    for name, size in sizes.items():
        try:
            reader.verified(name)
        except CheckpointError as error:
            damaged[name] = str(error)
        done += size
        progress(done, total)
    return damaged
