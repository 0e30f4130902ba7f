"""`ServedRows`: a checkpoint's table as a file that models are served from takes it.

What is in that file, byte by byte, is `rowhaul.serve.row_file`. A format says here what its records are:
bytes that are copied as they are, so that rows in few bits, in chunks or shared by ids stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.store.row_parts import Int64s


class RecordBlock(NamedTuple):
    """Some records of a table."""

    keys: Int64s
    lengths: Int64s  # bytes of each
    data: npt.NDArray[np.uint8]  # all of them, one after the other


class Cut(NamedTuple):
    """How rows are cut into chunks: chunk ``k`` is ``columns[starts[k]:starts[k + 1]]`` of a row."""

    starts: Int64s
    columns: Int64s

    @property
    def mask_bytes(self) -> int:
        """Bytes at the beginning of a record that say which chunks follow: whole words of 4."""
        return -(-(len(self.starts) - 1) // 32) * 4


class SlotPlaces(NamedTuple):
    """What finds the row of an id where ids share rows; tables of one row size share these arrays."""

    tables: tuple[str, ...]
    marks: npt.NDArray[np.uint16]  # by slot: a print of the id that has it, 0: none
    owners: npt.NDArray[Any]  # by slot: position of its id's table
    position: int  # of this table
    seed: int
    first_shared: int  # shared rows of the tables before this one
    num_shared: int
    all_shared: int  # of all tables together


@dataclass(frozen=True)
class ServedRows:
    """The rows of a table.

    Args:
        dim: values of a row.
        value_type: what they are stored in: float32, float64, bfloat16, float16 or int8.
        num_rows: how many there are.
        record_bytes: of a record; 0 where rows differ.
        key_blocks: yields the keys of all rows.
        record_blocks: yields all records, in any order.
        unknown_is_zero: whether an id without a row reads zeros, whatever else is asked for.
        cut: of rows in chunks.
        slots: of rows that ids share.
        deleted: keys that have no row any more, where these rows are a change.
    """

    dim: int
    value_type: str
    num_rows: int
    record_bytes: int
    key_blocks: Callable[[], Iterator[Int64s]]
    record_blocks: Callable[[], Iterator[RecordBlock]]
    unknown_is_zero: bool = False
    cut: Cut | None = None
    slots: SlotPlaces | None = None
    deleted: Int64s | None = None

    @property
    def num_deleted(self) -> int:
        """Count keys that have no row any more."""
        return 0 if self.deleted is None else len(self.deleted)


def equal_records(keys: Int64s, data: npt.NDArray[Any]) -> RecordBlock:
    """Return records of one size, a row of ``data`` each."""
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(len(keys), -1)
    return RecordBlock(keys, np.full(len(keys), flat.shape[1], np.int64), flat.reshape(-1))
