"""Writing a checkpoint: visible only when whole, whether one process writes it or many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from rowhaul._manifest import write_manifest
from rowhaul.checkpoint.layout import (
    FORMAT,
    MANIFEST_FILE,
    VERSION,
    TableEntry,
    unfinished_folder,
)
from rowhaul.checkpoint.location import Place, as_place, storage_of
from rowhaul.checkpoint.shard import Shard, ShardWriter
from rowhaul.errors import CheckpointError, StorageError
from rowhaul.store.row_format import implied_format


class CheckpointWriter(ShardWriter):
    """Builds a checkpoint, in a folder or at a URL, that counts only when it is whole.

    Example:
        >>> with CheckpointWriter("run/checkpoints/step-000000010") as writer:
        ...     writer.tensors("model", dict(model.named_parameters()))
        ...     writer.table("items", collection.rows("items"), dim=16, state_width=1, dtype="float32")
        ...     writer.facts["step"] = 10
    """

    def __init__(self, path: str | Place) -> None:
        self.path = as_place(path)
        self.facts: dict[str, Any] = {}
        super().__init__(unfinished_folder(self.path))

    def __enter__(self) -> CheckpointWriter:
        prepare(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                publish(self.path, self.facts, [self.written])
        except BaseException:
            discard(self.path)
            raise
        if kind is not None:
            discard(self.path)


def prepare(path: str | Place) -> Place:
    """The folder to write a checkpoint's files into, emptied of what an interrupted save left."""
    path = as_place(path)
    storage = storage_of(path)
    with _writing(path):
        if storage.is_file(path / MANIFEST_FILE):
            raise CheckpointError(f"{path} is a complete checkpoint already; choose another folder")
        if (found := storage.stranger(path)) is not None:
            raise CheckpointError(
                f"{path} holds {found!r}, which is not of a checkpoint; choose a new folder"
            )
        storage.begin(path)
    return unfinished_folder(path)


def publish(path: str | Place, facts: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Make a checkpoint of everything that was written into its unfinished folder, and synced."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "facts": facts,
        "groups": [group for shard in shards for group in shard.groups],
        "tables": [_entry(table, facts) for table in _merged_tables(shards)],
        "files": {name: entry for shard in shards for name, entry in shard.files.items()},
    }
    path = as_place(path)
    storage, content = storage_of(path), write_manifest(manifest)
    with _writing(path):
        storage.retry(lambda: storage.complete(path, MANIFEST_FILE, content))


def discard(path: str | Place) -> None:
    """Remove what was written of a checkpoint that will not be complete; never fails."""
    path = as_place(path)
    storage_of(path).discard(path, MANIFEST_FILE)


def remove(path: Place) -> None:
    """Remove a complete checkpoint."""
    storage_of(path).remove(path, MANIFEST_FILE)


def set_aside(path: Place) -> None:
    """Make a damaged checkpoint count no longer as complete; the next save removes it."""
    storage_of(path).set_aside(path, MANIFEST_FILE)


@contextmanager
def _writing(path: Place) -> Iterator[None]:
    """Say which checkpoint cannot be written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def _merged_tables(shards: Sequence[Shard]) -> list[TableEntry]:
    """Tables whose rows are in several shards, each once."""
    merged: dict[str, TableEntry] = {}
    for table in (table for shard in shards for table in shard.tables):
        before = merged.get(table.name)
        if before is not None:
            table = replace(
                table, num_rows=before.num_rows + table.num_rows, files=(*before.files, *table.files)
            )
        merged[table.name] = table
    return list(merged.values())


def _entry(table: TableEntry, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a table; its format is named only where the facts do not imply it."""
    entry = asdict(table)
    if table.format == implied_format(facts):
        del entry["format"]
    return entry
