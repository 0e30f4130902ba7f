"""What a checkpoint holds, in numbers: tables, tensors, the layout of a cluster; and what is damaged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rowhaul.checkpoint.layout import LAYOUT, SCHEDULE, TableEntry
from rowhaul.checkpoint.progress import Progress
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError, DamagedCheckpointError


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
    format: str  # of the rows
    details: dict[str, Any]  # of the format
    note: str  # on how its rows are kept; empty: whole

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON, the format's details among the rest."""
        given = asdict(self)
        return {**given, **given.pop("details")}


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
    """Describe a checkpoint by its manifest and the headers of its files of rows."""
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
                table.format,
                reader.format(table.name).contents(facts, _shapes(reader, table)),
                reader.format(table.name).note(facts),
            )
            for table in reader.tables.values()
        ),
        tensors={group: sizes[f"tensors-{group}.safetensors"] for group in reader.groups},
        layout={name: size for name, size in sizes.items() if name.startswith((LAYOUT, SCHEDULE))},
        saved_by=cluster.get("settings") if isinstance(cluster, dict) else None,
        bytes=sum(sizes.values()),
        files=len(sizes),
    )


def _shapes(reader: CheckpointReader, table: TableEntry) -> list[dict[str, Any]] | None:
    """Return the shapes of the arrays of a table's files; None: one is damaged (--verify says how)."""
    found = []
    for name in table.files:
        try:
            with reader.open(name, verify=False) as file:
                found.append({part: list(entry.shape) for part, entry in file.parts.items()})
        except DamagedCheckpointError:
            return None
    return found


def damaged_files(reader: CheckpointReader, progress: Progress = lambda done, total: None) -> dict[str, str]:
    """What is wrong with each file that does not agree with the manifest; progress is in bytes."""
    sizes = reader.file_bytes
    done, total = 0, sum(sizes.values())
    damaged: dict[str, str] = {}
    for name, size in sizes.items():
        try:
            reader.check(name)
        except CheckpointError as error:
            damaged[name] = str(error)
        done += size
        progress(done, total)
    return damaged
