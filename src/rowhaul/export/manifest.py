"""What an export says of itself: the names of its files, its tables, and the checksums of what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import xxhash

from rowhaul.checkpoint.plain_files import Parts, RowLayout
from rowhaul.pruning.plain_files import PrunedLayout

MANIFEST_FILE, README_FILE, TABLES_FOLDER = "export.json", "README.md", "tables"
DENSE_FILE = "dense.safetensors"
FORMAT, VERSION = "rowhaul-export", 2

_OF_THE_FILE = ("starts", "columns")  # arrays that are no rows


@dataclass(frozen=True)
class PrunedPart:
    """How the rows of a pruned table are cut, and how much of them there is."""

    starts: tuple[int, ...]  # where chunks begin among the stored columns, and where the last one ends
    columns: tuple[int, ...]  # of a row that are stored
    state_widths: tuple[int, ...]  # numbers of state of each chunk in the file
    num_values: int
    num_state: int
    rows_left_out: int  # that hold nothing, and read as zeros like keys that are not there

    @property
    def num_chunks(self) -> int:
        """Chunks that a row is cut into."""
        return len(self.starts) - 1


@dataclass(frozen=True)
class ExportedTable:
    """A table, and the file that it is in now."""

    name: str
    file: str
    num_rows: int
    dim: int
    state_width: int  # numbers of optimizer state a whole row; 0 where it was not asked for
    dtype: str
    ids: tuple[str, ...]  # what its keys stand for: "integer", "text" or both; empty: not known
    bytes: int
    xxh3: str  # of the keys, the values and so on: a checksum of each over all rows
    pruned: PrunedPart | None = None  # None: rows are whole

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> ExportedTable:
        """From the manifest."""
        part: dict[str, Any] | None = given.get("pruned")
        if part is not None:
            part = {name: tuple(one) if isinstance(one, list) else one for name, one in part.items()}
        pruned = None if part is None else PrunedPart(**part)
        return cls(**{**given, "ids": tuple(given["ids"]), "pruned": pruned})

    def layout(self) -> RowLayout | PrunedLayout:
        """What is in the file."""
        if self.pruned is None:
            return RowLayout(self.num_rows, self.dim, self.state_width, self.dtype)
        part = self.pruned
        return PrunedLayout(
            self.num_rows,
            self.dim,
            self.dtype,
            part.starts,
            part.columns,
            part.state_widths,
            part.num_values,
            part.num_state,
        )


Rows = TypeVar("Rows", bound=tuple[Any, ...])  # a block of rows, keys first
_Block = TypeVar("_Block", contravariant=True)


class _Splits(Protocol[_Block]):
    def parts(self) -> Parts:
        """Names of the arrays."""

    def split(self, block: _Block) -> dict[str, npt.NDArray[Any]]:
        """A block as arrays."""


class Digest:
    """Checksums of keys, values and so on as they pass, whatever blocks they come in."""

    def __init__(self, layout: _Splits[Any]) -> None:
        self._layout = layout
        self._parts = {name: xxhash.xxh3_64() for name in layout.parts() if name not in _OF_THE_FILE}
        self.num_rows = 0

    @property
    def value(self) -> str:
        """All checksums."""
        return " ".join(part.hexdigest() for part in self._parts.values())

    def over(self, blocks: Iterable[Rows]) -> Iterator[Rows]:
        """The same blocks, noted."""
        for block in blocks:
            for name, array in self._layout.split(block).items():
                self._parts[name].update(array.data)
            self.num_rows += len(block[0])
            yield block
