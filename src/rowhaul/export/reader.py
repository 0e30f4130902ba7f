"""Reading an export: whole rows or the chunks that there are, and a model that serves with them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import safetensors
import safetensors.torch
from torch import Tensor

from rowhaul.checkpoint.shard import Block
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.formats import FORMATS
from rowhaul.export.manifest import FORMAT, MANIFEST_FILE, VERSION, Digest, ExportedTable, Rows
from rowhaul.pruning.export import PRUNED_FORMATS
from rowhaul.pruning.plain_files import PrunedBlock, PrunedLayout

_ENTRIES = {"table_format", "tables", "dense", "settings", "step", "samples", "key_kinds"}
# What libraries say of a file that is cut off, or no file of their kind.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, zipfile.BadZipFile),
    *(safetensors.SafetensorError, pa.ArrowException),
)


class ExportReader:
    """A folder that `rowhaul export` made.

    Every table is compared with its checksum as it is read: the last block comes only if all of it agrees.

    Example:
        >>> reader = ExportReader("exported")
        >>> for keys, values in reader.rows("user_id"):
        ...     print(len(keys), values.shape)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = self._read_manifest()
        self.facts: dict[str, Any] = {name: manifest[name] for name in _ENTRIES - {"tables"}}
        try:
            tables = [ExportedTable.from_dict(one) for one in manifest["tables"]]
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path / MANIFEST_FILE} is damaged: {error}; export again") from None
        self.tables: dict[str, ExportedTable] = {table.name: table for table in tables}

    def rows(self, table: str) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Blocks of (keys, values), whole rows with zeros where pruned.

        A key that is in none of them reads as zeros where the table is pruned.
        """
        entry = self._entry(table)
        layout = entry.layout()
        if isinstance(layout, PrunedLayout):
            for block in self.chunks(table):
                yield block.keys, layout.whole_rows(block)
            return
        for keys, records in self.records(table):
            yield keys, records[:, : entry.dim]

    def records(self, table: str) -> Iterator[Block]:
        """Blocks of (keys, records) of a table that is not pruned: values, then state if it was exported."""
        entry = self._entry(table)
        layout = entry.layout()
        if isinstance(layout, PrunedLayout):
            raise ConfigError(f"{self.path}: the rows of table {table!r} are pruned; read them with chunks()")
        digest = Digest(layout)
        read = FORMATS[self.facts["table_format"]].read
        yield from self._checked(entry, digest, digest.over(read(self.path / entry.file, layout)))

    def chunks(self, table: str) -> Iterator[PrunedBlock]:
        """Blocks of a pruned table: keys, which chunks of each there are, and their values."""
        entry = self._entry(table)
        layout = entry.layout()
        if not isinstance(layout, PrunedLayout):
            raise ConfigError(f"{self.path}: the rows of table {table!r} are whole; read them with rows()")
        digest = Digest(layout)
        read = PRUNED_FORMATS[self.facts["table_format"]].read
        yield from self._checked(entry, digest, digest.over(read(self.path / entry.file, layout)))

    def dense(self) -> dict[str, Tensor]:
        """Dense weights by name; none where there were none."""
        if not self.facts["dense"]:
            return {}
        path = self.path / self.facts["dense"]["file"]
        try:
            loaded: dict[str, Tensor] = safetensors.torch.load_file(path)
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} cannot be read: {error}; export again") from None
        return loaded

    def _entry(self, table: str) -> ExportedTable:
        if table not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise ConfigError(f"{self.path} has no table {table!r}; its tables are {known}")
        return self.tables[table]

    def _checked(self, entry: ExportedTable, digest: Digest, blocks: Iterator[Rows]) -> Iterator[Rows]:
        """The same blocks, each when the next is there, so that the last comes after the checksum."""
        path, before = self.path / entry.file, None
        while True:
            try:
                block = next(blocks, None)
            except _UNREADABLE as error:
                raise CheckpointError(f"{path} cannot be read: {error}; export again") from None
            if block is None:
                break
            if before is not None:
                yield before
            before = block
        if (digest.value, digest.num_rows) != (entry.xxh3, entry.num_rows):
            raise CheckpointError(
                f"{path} is damaged: {digest.num_rows:,} rows whose checksums differ from the manifest's "
                f"({entry.num_rows:,} rows); export again"
            )
        if before is not None:
            yield before

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST_FILE
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{self.path} is no export: it has no {MANIFEST_FILE}; give the --to of a `rowhaul export`"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}; export again") from None
        if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (
            FORMAT,
            VERSION,
        ):
            given = manifest if not isinstance(manifest, dict) else manifest.get("version")
            raise CheckpointError(
                f"{path}: version {given!r}, but this Rowhaul reads {FORMAT!r} version {VERSION}; export "
                "again"
            )
        if not manifest.keys() >= _ENTRIES or manifest["table_format"] not in FORMATS:
            raise CheckpointError(f"{path} is damaged: entries are missing; export again")
        return manifest
