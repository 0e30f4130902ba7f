"""Reading a checkpoint: nothing is believed before its checksum agrees."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from rowhaul.checkpoint.layout import FORMAT, MANIFEST_FILE, VERSION, TableEntry, checksum, read_manifest
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import RowFormat, implied_format, row_format
from rowhaul.store.row_parts import Arrays

_ENTRIES = {"facts", "groups", "tables", "files"}


class CheckpointReader:
    """A complete checkpoint: its facts, its tables, its tensors.

    Example:
        >>> reader = CheckpointReader("run/checkpoints/step-000000010")
        >>> reader.facts["step"], [table.num_rows for table in reader.tables.values()]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = read_manifest(
            self.path / MANIFEST_FILE,
            (FORMAT, VERSION),
            _ENTRIES,
            of="complete checkpoint",
            hint="name a step-… folder that a finished save left",
            instead="use another checkpoint",
        )
        self.facts: dict[str, Any] = manifest["facts"]
        self.groups: list[str] = manifest["groups"]
        implied = implied_format(self.facts)
        tables = [TableEntry.from_dict(entry, implied) for entry in manifest["tables"]]
        self.tables: dict[str, TableEntry] = {table.name: table for table in tables}
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        self._believed: set[str] = set()  # files whose checksum agreed

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of every file but the manifest, by name."""
        return {name: int(entry["bytes"]) for name, entry in self._files.items()}

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors stored under a group's name."""
        if group not in self.groups:
            raise CheckpointError(f"{self.path}: no tensors called {group!r}; there are {self.groups}")
        loaded: dict[str, Tensor] = safetensors.torch.load_file(self.verified(f"tensors-{group}.safetensors"))
        return loaded

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a file that `ShardWriter.arrays` wrote."""
        loaded: dict[str, npt.NDArray[Any]] = safetensors.numpy.load_file(self.verified(name))
        return loaded

    def rows(
        self, table: str, among: Container[str] | None = None
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield a table's rows as (keys, records), values before state; all, or those of some files.

        A format that keeps state by parts of rows gives values alone.
        """
        rows, dim = self.format(table), self.tables[table].dim
        for block in self.blocks(table, among):
            yield block["keys"], rows.decode(block, dim)

    def blocks(self, table: str, among: Container[str] | None = None) -> Iterator[Arrays]:
        """Yield a table's rows as its format has them, file by file."""
        for name in self.tables[table].files:
            if among is None or name in among:
                yield self.arrays(name)

    def format(self, table: str) -> RowFormat:
        """Return the format of a table's rows."""
        return row_format(self.tables[table].format)

    def keys(self, table: str) -> Iterator[npt.NDArray[np.int64]]:
        """The keys of a table's rows, block by block."""
        for name in self.tables[table].files:
            with safetensors.safe_open(self.verified(name), framework="numpy") as file:
                yield file.get_tensor("keys")

    def verify(self) -> None:
        """Check every file against the manifest."""
        self._believed.clear()
        for name in self._files:
            self.verified(name)

    def verified(self, name: str) -> Path:
        """Where a file is, once its checksum agrees with the manifest; that is looked at only once."""
        if name not in self._files:
            raise CheckpointError(
                f"{self.path} has no file {name!r}: its manifest is damaged; use another one"
            )
        path, expected = self.path / name, self._files[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is damaged; use another one")
        if name in self._believed:
            return path
        if path.stat().st_size != expected["bytes"] or checksum(path) != expected["xxh3"]:
            raise CheckpointError(
                f"{path} is damaged: {path.stat().st_size:,} bytes whose checksum differs from the "
                f"manifest's ({expected['bytes']:,} bytes); use another checkpoint"
            )
        self._believed.add(name)
        return path
