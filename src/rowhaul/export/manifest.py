"""What an export says of itself: the names of its files, its tables, and the checksums of what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from rowhaul.store.row_format import implied_format, row_format
from rowhaul.store.row_parts import Arrays, ExportFile

MANIFEST_FILE, README_FILE, TABLES_FOLDER = "export.json", "README.md", "tables"
DENSE_FILE = "dense.safetensors"
FORMAT, VERSION = "rowhaul-export", 2
_DETAILS = "pruned"  # entry of a table that has its format's details


@dataclass(frozen=True)
class ExportedTable:
    """A table, and the file that it is in now."""

    name: str
    file: str
    num_rows: int
    dim: int
    state_width: int  # numbers of optimizer state a whole row; 0 where it was not asked for
    dtype: str
    ids: tuple[str, ...]  # what its keys stand for, see `rowhaul._id_kinds`; empty: not known
    bytes: int
    xxh3: str  # of the keys, the values and so on: a checksum of each over all rows
    format: str = "whole"  # of the rows
    details: dict[str, Any] | None = None  # of the format

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> ExportedTable:
        """Read a table of the manifest."""
        rest = {name: value for name, value in given.items() if name != _DETAILS}
        read = {"ids": tuple(given["ids"]), "details": given.get(_DETAILS)}
        return cls(**{"format": implied_format(given), **rest, **read})

    def to_dict(self) -> dict[str, Any]:
        """Return what the manifest has; it names the format only where the details do not imply it."""
        given = asdict(self)
        given[_DETAILS] = given.pop("details")
        if self.format == implied_format(given):
            del given["format"]
        return given

    def file_layout(self) -> ExportFile:
        """Return what is in the file."""
        return row_format(self.format).exported_file(self)


class Digest:
    """Checksums of keys, values and so on as they pass, whatever blocks they come in."""

    def __init__(self, layout: ExportFile) -> None:
        constants = layout.constants()
        self._parts = {name: xxhash.xxh3_64() for name in layout.parts() if name not in constants}
        self.num_rows = 0

    @property
    def value(self) -> str:
        """All checksums."""
        return " ".join(part.hexdigest() for part in self._parts.values())

    def over(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Yield the same blocks, noted."""
        for block in blocks:
            for name, digest in self._parts.items():
                digest.update(np.ascontiguousarray(block[name]).data)
            self.num_rows += len(block["keys"])
            yield block
