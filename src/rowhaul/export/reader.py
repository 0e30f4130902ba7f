"""Reading an export, as whole rows or as they are stored."""

from __future__ import annotations

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

from rowhaul._id_kinds import ORIGINS_FACT
from rowhaul.checkpoint.layout import check_inside, read_manifest
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.files import FILE_KINDS
from rowhaul.export.manifest import FORMAT, MANIFEST_FILE, VERSION, Digest, ExportedTable
from rowhaul.store.row_parts import Arrays

_ENTRIES = {"table_format", "tables", "dense", "settings", "step", "samples", "key_kinds"}
# What libraries say of a file that is cut off, or no file of their kind.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, zipfile.BadZipFile),
    *(safetensors.SafetensorError, pa.ArrowException),
)


class ExportReader:
    """A folder that `rowhaul export` made.

    Every table is compared with its checksums as it is read; the last block is yielded only if all agree.

    Example:
        >>> reader = ExportReader("exported")
        >>> for keys, values in reader.rows("user_id"):
        ...     print(len(keys), values.shape)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        path, hint = self.path / MANIFEST_FILE, "give the --out of a `rowhaul export`"
        manifest = read_manifest(
            path, (FORMAT, VERSION), _ENTRIES, of="export", hint=hint, instead="export again"
        )
        self.facts: dict[str, Any] = {name: manifest[name] for name in _ENTRIES - {"tables"}}
        self.facts[ORIGINS_FACT] = manifest.get(ORIGINS_FACT)
        try:
            tables = [ExportedTable.from_dict(one) for one in manifest["tables"]]
            self._kind = FILE_KINDS[manifest["table_format"]]
            dense = [manifest["dense"]["file"]] if manifest["dense"] else []
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; export again") from None
        for name in (*(table.file for table in tables), *dense):
            check_inside(name, path, "export again")
        self.tables: dict[str, ExportedTable] = {table.name: table for table in tables}

    def rows(self, table: str) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield (keys, values) of whole rows, zeros where pruned, as every other key of a pruned table."""
        vectors = self._entry(table).file_layout().vectors
        for block in self.blocks(table):
            yield block["keys"], vectors(block)

    def blocks(self, table: str) -> Iterator[Arrays]:
        """Yield the arrays of a file, a block of rows at a time."""
        entry = self._entry(table)
        path, layout, before = self.path / entry.file, entry.file_layout(), None
        digest = Digest(layout)
        blocks = digest.over(self._kind.read(path, layout))
        while True:  # yield each block when the next is there, and so the last one after the checksum
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

    def dense(self) -> dict[str, Tensor]:
        """Return dense weights by name."""
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
