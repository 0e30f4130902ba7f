"""The seam between rows and whatever keeps, sizes, saves, exports or compares them.

A format exchanges *blocks*: arrays by name of some rows of one table, as a file of a checkpoint holds them;
``keys`` is always one of them. To add a format, write a module with a `RowFormat` and name it in
`ROW_FORMATS`. Readers, writers, collections and layouts of tables are passed in: this package does not import
theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.store.row_parts import (
    Arrays,
    ExportFile,
    FoundRow,
    Int64s,
    Lines,
    Merging,
    RowEstimate,
    RowShape,
)
from rowhaul.store.served_rows import ServedRows

ROW_FORMATS = {
    "whole": "rowhaul.store.whole_rows:WholeRows",
    "chunked": "rowhaul.pruning.format:ChunkedRows",
    "slots": "rowhaul.budget.format:SlotRows",
    "slots-bfloat16": "rowhaul.budget.format:BFloat16Slots",
    "slots-float16": "rowhaul.budget.format:Float16Slots",
    "slots-int8": "rowhaul.budget.format:Int8Slots",
    "bfloat16": "rowhaul.store.packed_rows:BFloat16Rows",
    "float16": "rowhaul.store.packed_rows:Float16Rows",
    "int8": "rowhaul.store.packed_rows:Int8Rows",
}
# What implies a format in manifests that do not name it: facts of a checkpoint, entries of an exported table.
_IMPLIED_BY = {"pruning": "chunked", "pruned": "chunked"}


class RowFormat(ABC):
    """What a row is in memory, on the wire, in files; and how two models' rows compare."""

    name: ClassVar[str]
    constants: ClassVar[tuple[str, ...]] = ()  # arrays of a block that describe all its rows
    has_snapshots: ClassVar[bool] = False  # whether rows can be saved beside training without a copy of all
    keyed_by_id: ClassVar[bool] = True  # whether keys are ids; otherwise names of rows, see `row_names`
    state_by_row: ClassVar[bool] = True  # whether `decode` returns the optimizer's state
    reading: ClassVar[dict[str, str]]  # Python that reads an exported file, by kind of file
    row_dtype: ClassVar[str] = ""  # what values are held in, where rows can be converted from one to another
    replays: ClassVar[bool] = False  # whether the replay of a cluster's parts is exact where `why_inexact`
    cluster_rows: ClassVar[str] = "rowhaul.train.distributed.cluster_rows:ClusterRows"

    def wire_bytes(self, dim: int, state_width: int, dtype: str) -> tuple[int, int]:
        """Return the bytes of a record's values, and of its optimizer state, as they are sent."""
        itemsize = np.dtype(dtype).itemsize
        return dim * itemsize, state_width * itemsize

    # Blocks of rows.

    def join(self, blocks: Sequence[Arrays]) -> Arrays:
        """Concatenate blocks of one table."""
        return {
            name: one if name in self.constants else np.concatenate([block[name] for block in blocks])
            for name, one in blocks[0].items()
        }

    def select(self, block: Arrays, rows: npt.NDArray[np.bool_]) -> Arrays:
        """Return some rows of a block."""
        return {name: one if name in self.constants else one[rows] for name, one in block.items()}

    @abstractmethod
    def decode(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Return whole vectors, with their state where the format keeps it by row."""

    # Checkpoints.

    def row_names(self, reader: Any, table: str, ids: Int64s) -> Int64s:
        """Return the keys of the rows that ids of a checkpoint's table read."""
        return ids

    @abstractmethod
    def find(self, file: Any, place: int, dim: int) -> FoundRow:
        """Read one row of an open safetensors file."""

    def contents(
        self, facts: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Count what a table holds, from the shapes in its files' headers; None: a file is damaged."""
        return {}

    def note(self, facts: Mapping[str, Any]) -> str:
        """Return a few words on how a checkpoint's rows are kept; empty: whole."""
        return ""

    @abstractmethod
    def cells(self, tables: Sequence[Any]) -> dict[str, str]:
        """Return what to list of one table, or of all together (`TableContents`), by title."""

    def check_mergeable(self, sources: Sequence[Any]) -> None:  # noqa: B027  # does nothing by default
        """Refuse checkpoints whose rows do not go together."""

    def merging(self, sources: Sequence[Any], tables: Mapping[str, Any]) -> Merging:
        """Decide what merged rows (`TableMerge` by table) become."""
        return Merging()

    # Collections in memory.

    @abstractmethod
    def blocks(self, collection: Any, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table."""

    @abstractmethod
    def save(self, writer: Any, collection: Any) -> None:
        """Write all tables into a checkpoint."""

    @abstractmethod
    def load(self, reader: Any, collection: Any) -> None:
        """Replace every row by a checkpoint's."""

    def check_loadable(self, reader: Any, collection: Any) -> None:  # noqa: B027  # does nothing by default
        """Refuse a checkpoint whose rows a collection cannot take."""

    def serve(self, collection: Any) -> None:  # noqa: B027  # does nothing by default
        """Prepare an empty collection for rows that are only read."""

    @abstractmethod
    def load_export(self, reader: Any, collection: Any) -> None:
        """Fill a collection with the rows of an export."""

    # Exports, comparison and sizes.

    @abstractmethod
    def export_file(self, reader: Any, table: str, with_state: bool) -> ExportFile:
        """Lay out the export of a checkpoint's table."""

    @abstractmethod
    def exported_file(self, table: Any) -> ExportFile:
        """Return the layout that an export's manifest describes (`ExportedTable`)."""

    @property
    def exported_as(self) -> str:
        """The format of exported rows."""
        return self.name

    @abstractmethod
    def served_rows(self, reader: Any, table: str) -> ServedRows:
        """Return a checkpoint's table as a file to serve from takes it."""

    def export_note(self, tables: Sequence[Any]) -> str:
        """Explain exported tables to people; empty: nothing special."""
        return ""

    @abstractmethod
    def empty(self, layout: Any, table: str) -> Arrays:
        """Return a block without rows."""

    def why_inexact(self, layout: Any) -> str:
        """Say why a cluster and one process may train different models, where that is by design."""
        return ""

    @abstractmethod
    def align(self, layout: Any, table: str, found: Arrays, expected: Arrays) -> Iterator[Lines]:
        """Put the rows of two trainings side by side."""

    @abstractmethod
    def estimate(
        self, shape: RowShape, rows: Mapping[str, int], ids_per_batch: float, settings: Any
    ) -> RowEstimate:
        """Estimate what rows take: how many by table, ids of a global batch, and the format's settings."""


def load_named(name: str) -> Any:
    """Import ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def row_format(name: str) -> RowFormat:
    """Return the format of a name."""
    if name not in ROW_FORMATS:
        raise CheckpointError(
            f"rows are in format {name!r}, which this Rowhaul does not have; it has {', '.join(ROW_FORMATS)}"
        )
    made: RowFormat = load_named(ROW_FORMATS[name])()
    return made


def format_of(settings: object) -> RowFormat:
    """Return the format that settings or a layout name as their ``row_format``; whole rows by default."""
    return row_format(getattr(settings, "row_format", "whole"))


def convert_hint(path: object, found: str, needed: str) -> str:
    """Say how a checkpoint's rows can be had in another format; empty where they cannot."""
    both = row_format(found), row_format(needed)
    if not all(one.row_dtype for one in both):
        return ""
    return f", or convert it: rowhaul ckpt convert {path} --row-dtype {both[1].row_dtype} --out NEW"


def implied_format(entries: Mapping[str, Any]) -> str:
    """Return the format of rows of which a manifest has these entries, unless it names one."""
    return next((name for entry, name in _IMPLIED_BY.items() if entries.get(entry) is not None), "whole")
