"""What a `RowFormat` is given and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule

Arrays = Mapping[str, npt.NDArray[Any]]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Parts = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]

BLOCK_ROWS = 1 << 16  # of exported files, written and read at a time


@dataclass(frozen=True)
class RowShape:
    """A row before a format applies: ``dim`` values and the optimizer's state."""

    dim: int
    optimizer: RowOptimizerRule
    dtype: str


@dataclass(frozen=True)
class FoundRow:
    """One row of a checkpoint, to look at."""

    values: npt.NDArray[Any]  # zeros where not stored
    state: npt.NDArray[Any]
    stored: npt.NDArray[np.bool_]  # by column
    details: dict[str, Any] = field(default_factory=dict)  # of this format, for programs
    notes: dict[str, str] = field(default_factory=dict)  # the same, for people


class Lines(NamedTuple):
    """Numbers of two models side by side, one line for each thing that is compared."""

    kind: str
    found: npt.NDArray[Any]
    expected: npt.NDArray[Any]
    name: Callable[[int], str]  # of a line
    lacking: tuple[Bools, Bools] | None = None  # by line: a row that found, or expected, lacks


class Merging:
    """What the rows of several checkpoints become in one; here: what they are."""

    num_dropped = 0  # parts of rows that there was no room for

    def take(self, table: str, source: int, block: Arrays) -> Arrays:
        """Return what stays of a block, none of whose rows a later checkpoint has."""
        return block

    def files(self) -> dict[str, Arrays]:
        """Return files to write beside the rows, by name."""
        return {}

    def left_out(self, num_rows: int) -> str:
        """Say what had no room, given how many rows had none; empty: everything had."""
        return ""


class ExportFile(ABC):
    """What an exported file holds: arrays of known shapes, written and read a block of rows at a time."""

    format: str  # of the rows in it
    num_rows: int
    dim: int
    dtype: str  # that rows are trained in
    state_width: int  # numbers of optimizer state of a row with all its values; 0: without state
    rows_left_out: int = 0  # that hold nothing

    @abstractmethod
    def parts(self) -> Parts:
        """Type and shape of each array."""

    @abstractmethod
    def blocks(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Turn blocks of a checkpoint into blocks of this file."""

    @abstractmethod
    def vectors(self, block: Arrays) -> npt.NDArray[Any]:
        """Return the values of whole rows."""

    def constants(self) -> Arrays:
        """Return the arrays that describe all rows."""
        return {}

    def ragged(self) -> tuple[str, ...]:
        """Return the arrays in which rows have different numbers of elements."""
        return ()

    def lengths(self, block: Arrays) -> dict[str, Int64s]:
        """Return how many elements each row has in ragged arrays, given the others."""
        return {}

    def columns(self, block: Arrays) -> Arrays:
        """Return a block as the columns of a Parquet file, in order."""
        return block

    def from_columns(self, columns: Arrays) -> Arrays:
        """Invert `columns`."""
        return columns

    def metadata(self) -> dict[str, Any]:
        """Return what a Parquet file says of all rows."""
        return {}

    def details(self) -> dict[str, Any] | None:
        """Return what the manifest keeps beside the sizes."""
        return None

    def cells(self) -> dict[str, str]:
        """Return what to list of the table, by title."""
        return {}


class RowEstimate(ABC):
    """Bytes that the rows of a run take; a *record* is what a store keeps and a message carries."""

    record_values: int  # bytes of values in a record
    record_bytes: int  # with the state
    records_per_row: int  # of a row with all its values
    num_records: int  # of all tables, at most

    @abstractmethod
    def tables(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of values, state and index by table."""

    @abstractmethod
    def stored(self, shards: int | None, groups: Sequence[Sequence[str]]) -> dict[str, int]:
        """Bytes on one of a cluster's ``shards`` stores; None: in the only process, tables in groups."""

    @abstractmethod
    def largest_table(self, shards: int) -> float:
        """Bytes of the largest table's part on a store, as saved."""

    @abstractmethod
    def cached(self, num_records: int) -> int:
        """Bytes of a cache with its index."""

    def worker(self, num_ids: float) -> dict[str, int]:
        """Bytes beside the cache of a worker that reads ``num_ids`` ids in an iteration."""
        return {}

    def host(self) -> dict[str, int]:
        """Bytes that the scheduler of a host needs beside its directory."""
        return {}

    def check_batch(self, num_rows: int) -> None:  # noqa: B027  # does nothing by default
        """Refuse settings without room for the rows of one batch."""

    def note(self) -> str:
        """Return a sentence for people; empty: nothing to say."""
        return ""
