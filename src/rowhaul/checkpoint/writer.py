"""Writing a checkpoint: visible only when whole, whether one process writes it or many."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rowhaul._files import sync
from rowhaul.checkpoint.layout import FORMAT, MANIFEST_FILE, VERSION, TableEntry, unfinished_folder
from rowhaul.checkpoint.shard import Shard, ShardWriter
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import implied_format


class CheckpointWriter(ShardWriter):
    """Builds a checkpoint beside its final place and renames it there when it is whole.

    Example:
        >>> with CheckpointWriter("run/checkpoints/step-000000010") as writer:
        ...     writer.tensors("model", dict(model.named_parameters()))
        ...     writer.table("items", collection.rows("items"), dim=16, state_width=1, dtype="float32")
        ...     writer.facts["step"] = 10
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
        finally:
            shutil.rmtree(unfinished_folder(self.path), ignore_errors=True)


def prepare(path: Path) -> Path:
    """The folder to write a checkpoint's files into, emptied of what an interrupted save left."""
    if (path / MANIFEST_FILE).exists():
        raise CheckpointError(f"{path} is a complete checkpoint already; choose another folder")
    folder = unfinished_folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(path: Path, facts: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Make a checkpoint of everything that was written into its unfinished folder, and synced."""
    folder = unfinished_folder(path)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "facts": facts,
        "groups": [group for shard in shards for group in shard.groups],
        "tables": [_entry(table, facts) for table in _merged_tables(shards)],
        "files": {name: entry for shard in shards for name, entry in shard.files.items()},
    }
    manifest_path = folder / MANIFEST_FILE
    manifest_path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    sync(manifest_path)
    sync(folder)
    if path.exists():
        shutil.rmtree(path)  # a folder without a manifest, or `prepare` would have complained
    folder.rename(path)
    sync(path.parent)


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
