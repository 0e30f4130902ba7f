"""The columns of a delimited log: how they are described, and the memory they are parsed into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.text import field_kernels as values
from rowhaul.data.text.record_kernels import Columns, Layout
from rowhaul.errors import DataError

_NAMES = ("skip", "label", "number", "count", "integer", "plain", "hex", "string")
KINDS = {name: getattr(values, name.upper()) for name in _NAMES}


@dataclass(frozen=True)
class Field:
    """A column of a raw file. ``kind`` is one of `KINDS`; ``separator`` splits a field of several ids."""

    name: str
    kind: str
    separator: str = ""

    def __post_init__(self) -> None:
        if len(self.separator.encode()) > 1:
            raise DataError(
                f"column {self.name!r}: the separator must be one ASCII character, got {self.separator!r}"
            )


def fields(**kinds: str) -> tuple[Field, ...]:
    """Columns by name, in order, each of one value."""
    return tuple(Field(name, kind) for name, kind in kinds.items())


@dataclass(frozen=True)
class TextLayout:
    """The columns of a raw file in order, and how records are cut into them."""

    fields: tuple[Field, ...]
    delimiter: str = "\t"
    quoting: bool = False
    missing: str = ""  # besides blank
    positive_from: float | None = None


def kernel_layout(layout: TextLayout, seed: int) -> Layout:
    """The layout as the kernel takes it."""
    kinds = np.array([KINDS[one.kind] for one in layout.fields], np.uint8)
    separators = np.array([ord(one.separator) if one.separator else 0 for one in layout.fields], np.uint8)
    slots = np.zeros(len(kinds), np.int64)
    counts = [0, 0, 0]  # numbers, single ids, lists of ids
    for column, (kind, separator) in enumerate(zip(kinds, separators, strict=True)):
        if kind not in (values.SKIP, values.LABEL):
            group = 2 if separator else 1 if kind >= values.INTEGER else 0
            slots[column] = counts[group]
            counts[group] += 1
    return Layout(
        delimiter=_word(layout.delimiter),
        delimiter_size=np.uint64(len(layout.delimiter.encode())),
        quoting=layout.quoting,
        missing=_word(layout.missing),
        missing_size=np.uint64(len(layout.missing.encode())),
        positive_from=math.nan if layout.positive_from is None else float(layout.positive_from),
        seed=np.uint64(seed),
        kinds=kinds,
        slots=slots,
        separators=separators,
    )


def new_columns(layout: Layout, num_rows: int, list_capacity: int) -> Columns:
    """Columns not yet filled; padded, so that one row of many columns does not crowd one cache set."""
    kinds, separators = layout.kinds, layout.separators
    padded = num_rows + 72
    num_numbers = int(np.isin(kinds, (values.NUMBER, values.COUNT)).sum())
    is_id = kinds >= values.INTEGER
    num_single, num_lists = int((is_id & (separators == 0)).sum()), int((is_id & (separators != 0)).sum())
    list_offsets = np.empty((num_lists, padded + 1), np.int32)
    list_offsets[:, 0] = 0
    return Columns(
        labels=np.empty(padded, np.int8),
        numbers=np.empty((num_numbers, padded), np.float32),
        number_valid=np.empty((num_numbers, padded), np.bool_),
        ids=np.empty((num_single, padded), np.int64),
        id_valid=np.empty((num_single, padded), np.bool_),
        list_values=np.empty((num_lists, list_capacity), np.int64),
        list_offsets=list_offsets,
        lines=np.empty(padded, np.int64),
    )


def arrow_columns(layout: TextLayout, plan: Layout, columns: Columns, num_rows: int) -> dict[str, pa.Array]:
    """The filled part of the columns as Arrow arrays over the same memory."""
    arrays: dict[str, pa.Array] = {}
    rows = slice(num_rows)
    for one, kind, slot in zip(layout.fields, plan.kinds, plan.slots, strict=True):
        if kind == values.SKIP:
            continue
        if kind == values.LABEL:
            arrays[one.name] = pa.array(columns.labels[rows])
        elif kind in (values.NUMBER, values.COUNT):
            arrays[one.name] = nullable(columns.numbers[slot, rows], columns.number_valid[slot, rows])
        elif one.separator:
            offsets = columns.list_offsets[slot, : num_rows + 1]
            arrays[one.name] = pa.ListArray.from_arrays(offsets, columns.list_values[slot, : offsets[-1]])
        else:
            arrays[one.name] = nullable(columns.ids[slot, rows], columns.id_valid[slot, rows])
    return arrays


def nullable(numbers: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> pa.Array:
    """An Arrow array over ``numbers``, null where not ``valid``."""
    numbers = np.ascontiguousarray(numbers)
    bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [bitmap, pa.py_buffer(numbers)])


def _word(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(text.encode(), "little"))
