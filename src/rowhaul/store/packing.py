"""`RowPacking`: rows whose values are stored and sent in fewer bits than they are computed in.

A record holds the values in few bits, filled up to whole words of 4 bytes, then one float32 scale where the
type needs it (int8), then the optimizer's state in float32. Values are rounded at random, up or down such
that the mean is right, but not by chance: what is drawn depends on the seed, the table, the key, the step
that the gradients are of, and the column. So every process that takes the same step gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.store import packing_kernels as kernels

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[np.uint8]  # records x bytes

PLAIN = "float32"
# What values are in files, and in kernels: there the type of a number says which of them is meant.
_IN_FILES = {"bfloat16": np.uint16, "float16": np.float16, "int8": np.int8}
_IN_KERNELS = {"bfloat16": np.uint16(0), "float16": np.int16(0), "int8": np.int8(0)}
# Gradients need the range of float32 more than another two digits.
_GRADIENTS = {"bfloat16": "bfloat16", "float16": "bfloat16", "int8": "int8"}
ROW_DTYPES = (PLAIN, *_IN_FILES)

_STEPS = {
    "sgd": kernels.step_sgd,
    "adagrad": kernels.step_adagrad,
    "rowwise_adagrad": kernels.step_rowwise_adagrad,
    "adam": kernels.step_adam,
}


class RowNames(NamedTuple):
    """Which rows are stepped: what rounding depends on, beside the step's number."""

    tables: Int64s  # position of each row's table in its group
    keys: Int64s
    numbers: Int64s | None = None  # the step of each row's gradients, counted from 1, where they differ

    def some(self, chosen: npt.NDArray[Any] | slice) -> RowNames:
        """Select rows."""
        numbers = None if self.numbers is None else self.numbers[chosen]
        return RowNames(self.tables[chosen], self.keys[chosen], numbers)


class Parts(NamedTuple):
    """The parts of packed records, as files have them."""

    values: npt.NDArray[Any]  # rows x dim; bfloat16 as the upper halves of float32
    scales: Floats | None  # rows
    state: Floats  # rows x its width


def check_row_dtype(row_dtype: str, precision: str = "float32") -> None:
    """Refuse an unknown type, and one that does not go with the precision of training."""
    if row_dtype not in ROW_DTYPES:
        raise ConfigError(f"row_dtype must be one of {', '.join(ROW_DTYPES)}, got {row_dtype!r}")
    if row_dtype != PLAIN and precision != "float32":
        raise ConfigError(
            f"row_dtype is {row_dtype}, and precision {precision}: rows in few bits are computed in float32, "
            "and more would be rounded off again; use precision float32, or row_dtype float32"
        )


@dataclass(frozen=True)
class RowPacking:
    """How rows of one size are packed."""

    row_dtype: str
    dim: int
    state_width: int

    def __post_init__(self) -> None:
        check_row_dtype(self.row_dtype)
        if self.row_dtype == "int8" and self.dim == 1:
            raise ConfigError(
                "row_dtype is int8, but a row has a single value, and its scale alone would take more room; "
                "use float32, bfloat16 or float16, or a larger embedding_dim"
            )

    @property
    def value_bytes(self) -> int:
        """Bytes of values and scale."""
        packed = self.dim * self._file_type.itemsize
        return packed + -packed % 4 + 4 * self.has_scale

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.value_bytes + 4 * self.state_width

    @property
    def has_scale(self) -> bool:
        """Whether a row has a scale."""
        return self.row_dtype == "int8"

    @property
    def like(self) -> Any:
        """A number whose type tells kernels how values are packed."""
        return _IN_KERNELS[self.row_dtype]

    @property
    def gradients_like(self) -> Any:
        """The same for gradients that are sent, which take as many bytes as values."""
        return _IN_KERNELS[_GRADIENTS[self.row_dtype]]

    @property
    def _file_type(self) -> np.dtype[Any]:
        return np.dtype(_IN_FILES[self.row_dtype])

    def read(self, memory: RecordMemory, records: Int64s) -> Floats:
        """Values and state of records, in float32."""
        out = np.empty((len(records), self.dim + self.state_width), np.float32)
        kernels.unpack_records(
            memory.addresses, memory.shift, self.record_bytes, records, self.dim, out, self.like
        )
        return out

    def readable(self, stored: Stored) -> Floats:
        """The same for records that were copied."""
        stored = np.ascontiguousarray(stored)
        return self.read(OneChunk(stored), np.arange(len(stored)))

    def pack(self, contents: Floats, rows: RowNames, number: int, seeds: npt.NDArray[np.uint64]) -> Stored:
        """Round records of values and state; ``seeds`` are the tables'."""
        out = np.zeros((len(contents), self.record_bytes), np.uint8)
        contents = np.asarray(contents, np.float32)
        self._pack(contents[:, : self.dim], rows, number, seeds, 0, out, self.like)
        out[:, self.value_bytes :] = np.ascontiguousarray(contents[:, self.dim :]).view(np.uint8)
        return out

    def pack_gradients(
        self, gradients: Floats, rows: RowNames, number: int, seeds: npt.NDArray[np.uint64], rank: int
    ) -> Stored:
        """Round gradients that a rank sends."""
        out = np.zeros((len(gradients), self.value_bytes), np.uint8)
        self._pack(gradients, rows, number, seeds, rank + 1, out, self.gradients_like)
        return out

    def _pack(
        self, values: Floats, rows: RowNames, number: int, seeds: Any, sender: int, out: Stored, like: Any
    ) -> None:
        numbers = np.array([number]) if rows.numbers is None else rows.numbers
        values = np.ascontiguousarray(values, np.float32)
        kernels.pack_values(values, rows.tables, rows.keys, numbers, seeds, sender, out, like)

    def sum_gradients(self, addresses: Int64s, sums: Floats) -> None:
        """Sum packed gradients of each row, rows x workers, in the order of workers; 0: none."""
        kernels.sum_packed(addresses, sums, self.gradients_like)

    def unpack_gradients(self, packed: Stored) -> Floats:
        """Gradients in float32."""
        sums = np.empty((len(packed), self.dim), np.float32)
        packed = np.ascontiguousarray(packed)
        addresses = packed.ctypes.data + np.arange(len(packed)) * packed.shape[1]
        self.sum_gradients(addresses.reshape(-1, 1), sums)
        return sums

    def step(
        self,
        rule: RowOptimizerRule,
        memory: RecordMemory,
        records: Int64s,
        gradients: Floats,
        lr: float,
        number: int,
        rows: RowNames,
        seeds: npt.NDArray[np.uint64],
    ) -> None:
        """Take a step on records, all different, and round them."""
        if rule.name not in _STEPS:
            raise ConfigError(f"rows of {self.row_dtype} cannot be stepped by {rule.name}; use float32 rows")
        numbers = np.array([number]) if rows.numbers is None else rows.numbers
        _STEPS[rule.name](
            np.array(rule.settings(lr, number), np.float32), np.ascontiguousarray(gradients),
            memory.addresses, memory.shift, self.record_bytes, records, rows.tables, rows.keys, numbers,
            seeds, self.like,
        )  # fmt: skip

    def split(self, stored: Stored) -> Parts:
        """Divide records into what files have of them."""
        packed = np.ascontiguousarray(stored[:, : self.dim * self._file_type.itemsize])
        scales = None
        if self.has_scale:
            scale = np.ascontiguousarray(stored[:, self.value_bytes - 4 : self.value_bytes])
            scales = scale.view(np.float32).reshape(-1)
        state = np.ascontiguousarray(stored[:, self.value_bytes :]).view(np.float32)
        return Parts(packed.view(self._file_type), scales, state.reshape(len(stored), self.state_width))

    def join(self, parts: Parts) -> Stored:
        """Invert `split`."""
        stored = np.zeros((len(parts.values), self.record_bytes), np.uint8)
        packed = np.ascontiguousarray(parts.values, self._file_type).view(np.uint8)
        stored[:, : packed.shape[1]] = packed
        if parts.scales is not None:
            scale = np.ascontiguousarray(parts.scales, np.float32).reshape(-1, 1).view(np.uint8)
            stored[:, self.value_bytes - 4 : self.value_bytes] = scale
        stored[:, self.value_bytes :] = np.ascontiguousarray(parts.state, np.float32).view(np.uint8)
        return stored


class OneChunk:
    """The rows of an array in the form that kernels find records by."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self.addresses = np.array([rows.ctypes.data])
        self.shift = 62  # every record number is in the first chunk
        self.width = rows.shape[1]
        self._rows = rows

    def read(self, records: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copy some rows."""
        return self._rows[records]

    def write(self, records: npt.NDArray[np.int64], contents: npt.NDArray[Any]) -> None:
        """Set some rows."""
        self._rows[records] = contents


def packing_of(row_dtype: str, dim: int, state_width: int, dtype: npt.DTypeLike) -> RowPacking | None:
    """Return how rows are packed; None where they are stored as they are computed."""
    check_row_dtype(row_dtype, str(np.dtype(dtype)))
    return None if row_dtype == PLAIN else RowPacking(row_dtype, dim, state_width)
