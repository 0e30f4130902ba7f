"""Parquet columns as NumPy arrays: ids, dense numbers and labels, each value checked.

Arrow's buffers are viewed, never walked sample by sample: a column of int64 ids without missing
values costs nothing here. A value that cannot be trained on raises with its file and row.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowhaul._id_kinds import INTEGER, TEXT, join_kinds
from rowhaul.data.keys import hash_strings, is_view, plain_text
from rowhaul.data.schema import TIME_UNITS, DenseColumn, LabelColumn, Schema, TimeColumn
from rowhaul.errors import DataError

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

LATEST_TIME = 1 << 36  # in the year 4147: what is later is of another unit
_EARLY_SECONDS = 86_400  # by which a time may be later than the clock, which may be of another time zone
_INT64 = pa.int64().id
_VIEWED: dict[int, type[Any]] = {
    _INT64: np.int64,
    pa.float32().id: np.float32,
    pa.float64().id: np.float64,
}


@dataclass(frozen=True)
class Ids:
    """The ids of one feature: sample ``i`` has ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` of ``None`` means exactly one id per sample.
    """

    values: Int64s
    offsets: Int64s | None


@dataclass(frozen=True)
class Origin:
    """The origin of some rows, for messages."""

    path: Path
    first_row: int

    def at(self, row: int) -> str:
        """Name the file and the row, counted from 0 in the file."""
        return f"{self.path}, row {self.first_row + row:,} (the first is row 0)"


KeyKinds = dict[str, tuple[str, Path]]
"""Of id columns that are not all null: what the ids are, and the first file that says so."""


def check_columns(
    found: pa.Schema,
    schema: Schema,
    with_label: bool,
    path: Path,
    known: KeyKinds,
    origins: Mapping[str, str],
) -> None:
    """Refuse a file that lacks a column or holds one of the wrong type.

    The kind of an id column must be the one ``known`` from the files before, or is added to it: the integer 7
    and the string "7" are different keys. ``origins`` says what the integers of a column were made from.
    """
    if with_label and not schema.tasks:
        raise DataError(
            "the schema names no label, which training and evaluation need; name it: --label, or `label:` in "
            "a schema file"
        )
    for name in schema.column_names(with_label):
        check_present(name, found.names, path)
    for dense in schema.dense:
        if not is_number(found.field(dense.name).type):
            raise _wrong_type(path, dense.name, found, "a dense column holds numbers or booleans")
    if with_label:
        _check_target_types(found, schema, path)
    if with_label and schema.time is not None:
        check_present(schema.time.name, found.names, path)
        if not is_time(found.field(schema.time.name).type):
            raise _wrong_type(path, schema.time.name, found, "a time is a timestamp, a date or a number")
    kinds = {name: id_kind(found.field(name).type) for name in schema.stored_features}
    for name, kind in kinds.items():
        if kind == "":
            hint = "an id column holds integers or strings, or lists of them"
            if pa.types.is_floating(found.field(name).type):
                hint += (
                    "; list a number under `dense` in a schema file, and cast ids to int64 with nulls where "
                    "they are missing"
                )
            raise _wrong_type(path, name, found, hint)
        if kind == "null":
            continue
        if kind == INTEGER:
            kind = origins.get(name, INTEGER)
        before, where = known.setdefault(name, (kind, path))
        joined = join_kinds(before, kind)
        if joined is None:
            raise DataError(
                f"id column {name!r} holds {before} ids in {where} but {kind} ids in {path}, which are "
                "different keys; write it with one type in all files (from CSV: prepare them with one `type` "
                "in the schema)"
            )
        known[name] = (joined, where)


def _check_target_types(found: pa.Schema, schema: Schema, path: Path) -> None:
    for label in schema.tasks:
        if not is_number(found.field(label.name).type):
            raise _wrong_type(path, label.name, found, "a label is a number or a boolean")
    if schema.weight and not is_number(found.field(schema.weight).type):
        raise _wrong_type(path, schema.weight, found, "a weight is a number")
    if schema.group and id_kind(found.field(schema.group).type) == "":
        raise _wrong_type(path, schema.group, found, "a group is an integer or a string")


def decode_ids(column: pa.Array, seed: int = 0) -> Ids:
    """Integers as they are (uint64 by its bits), strings hashed; a null is no id, a list several."""
    if column.type.id == _INT64:
        values = _viewed(column, np.int64)
        if not column.null_count:
            return Ids(values, None)
        valid = _valid(column)
        return Ids(values[valid], offsets_of(valid))
    if is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        elements = decode_ids(column.flatten(), seed)
        offsets = offsets_of(lengths)
        if elements.offsets is not None:
            offsets = elements.offsets[offsets]
        return Ids(elements.values, offsets)
    column = plain_text(column)
    if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
        column = column.dictionary_decode()  # its nulls are among the values, and not counted
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        return Ids(_keys(column.drop_null(), seed), offsets_of(valid))
    return Ids(_keys(column, seed), None)


def decode_dense(rows: pa.RecordBatch, wanted: Sequence[DenseColumn], origin: Origin) -> Float32s:
    """Transformed float32 numbers, samples x columns; a null is 0, NaN and infinity are refused."""
    dense = raw_dense(rows, wanted, origin)
    transform_dense(dense, wanted)
    return dense


def raw_dense(rows: pa.RecordBatch, wanted: Sequence[DenseColumn], origin: Origin) -> Float32s:
    """The same as they are stored; each column is contiguous."""
    dense = np.empty((len(wanted), rows.num_rows), np.float32)
    for position, what in enumerate(wanted):
        column = rows.column(what.name)
        numbers, finite = dense_numbers(column)
        if not finite.all():
            row = int(np.argmin(finite))
            raise DataError(
                f"{origin.at(row)}: dense column {what.name!r} is {column[row].as_py()}; a finite float32 is "
                "needed (null for a missing number)"
            )
        dense[position] = numbers
    return dense.T


def transform_dense(dense: Float32s, wanted: Sequence[DenseColumn]) -> None:
    """Apply the transforms of dense columns, in place."""
    for column, what in zip(dense.T, wanted, strict=True):
        if what.transform == "log1p":
            column[:] = np.log1p(np.maximum(column, np.float32(0)))


def dense_numbers(column: pa.Array) -> tuple[Float32s, Mask]:
    """The numbers of a dense column, nulls as 0, and which of them can be trained on."""
    with np.errstate(over="ignore"):  # too large for float32 becomes infinity
        numbers = plain_numbers(column).astype(np.float32, copy=False)
    return numbers, np.isfinite(numbers)


def decode_label(column: pa.Array, wanted: LabelColumn, origin: Origin) -> Float32s:
    """0.0 or 1.0 per sample, or the number itself; anything else, a null too, is refused."""
    labels, allowed = label_numbers(column, wanted)
    if not allowed.all():
        row = int(np.argmin(allowed))
        needed = "0 or 1 is needed; for a rating or a count, set `positive_from` in the schema's label"
        if wanted.positive_from is not None or wanted.kind == "number":
            needed = "a number is needed"
        raise DataError(f"{origin.at(row)}: label {wanted.name!r} is {column[row].as_py()}; {needed}")
    return labels


def label_numbers(column: pa.Array, wanted: LabelColumn) -> tuple[Float32s, Mask]:
    """0.0 or 1.0, or the number, for each row, and which rows really have a label."""
    numbers = plain_numbers(column)
    positive: npt.NDArray[Any]
    if wanted.kind == "number":
        with np.errstate(over="ignore"):  # too large for float32 becomes infinity
            positive = numbers.astype(np.float32)
        allowed = np.isfinite(positive)
    elif wanted.positive_from is None:
        allowed = (numbers == 0) | (numbers == 1)
        positive = numbers == 1
    else:
        allowed = ~np.isnan(numbers)
        positive = numbers >= wanted.positive_from
    if column.null_count:
        allowed = allowed & column.is_valid().to_numpy(zero_copy_only=False)
    return np.asarray(positive, np.float32), np.asarray(allowed, np.bool_)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column can say when something happened."""
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(numbers or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def latest_time() -> float:
    """Return the latest that an event can have happened, by this machine's clock."""
    return time.time() + _EARLY_SECONDS


def time_numbers(column: pa.Array, wanted: TimeColumn) -> tuple[npt.NDArray[Any], Mask]:
    """Seconds since 1970 of each row, and which rows really have a time."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        seconds = column.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
        times = plain_numbers(seconds)
    else:
        times = plain_numbers(column) // TIME_UNITS[wanted.unit]
    return times, (times >= 0) & (times < LATEST_TIME) & column.is_valid().to_numpy(zero_copy_only=False)


def decode_times(column: pa.Array, wanted: TimeColumn, origin: Origin) -> Int64s:
    """Whole seconds since 1970; a null, or what is no time after 1970, is refused."""
    times, allowed = time_numbers(column, wanted)
    if not allowed.all():
        row = int(np.argmin(allowed))
        raise DataError(
            f"{origin.at(row)}: time column {wanted.name!r} is {column[row].as_py()}; a timestamp, or a "
            f"number of {wanted.unit} since 1970, is needed (other units: `unit` in the schema)"
        )
    return times.astype(np.int64, copy=False)


def _keys(column: pa.Array, seed: int) -> Int64s:
    """The 64-bit keys of a column without nulls."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        if len(column.dictionary) > len(column):  # that of a whole row group
            return _keys(column.dictionary_decode(), seed)
        keys: Int64s = _keys(column.dictionary, seed)[column.indices.to_numpy(zero_copy_only=False)]
        return keys
    if pa.types.is_integer(kind):
        integers: Int64s = column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        return integers
    if pa.types.is_null(kind):
        return np.empty(0, np.int64)
    return hash_strings(column, seed)


def plain_numbers(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers of a column, nulls as 0."""
    if (dtype := _VIEWED.get(column.type.id)) is not None:
        values = _viewed(column, dtype)
        return np.where(_valid(column), values, dtype(0)) if column.null_count else values
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.float32)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_integer(column.type) or column.type in (pa.float32(), pa.float64()):
        return np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    numbers = np.zeros(len(column), column.type.to_pandas_dtype())
    numbers[valid] = column.drop_null().to_numpy(zero_copy_only=False)
    return numbers


def _viewed(column: pa.Array, dtype: type[Any]) -> npt.NDArray[Any]:
    """The values of a column as they lie in memory, whatever is where it is null."""
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(len(column), dtype)
    return np.frombuffer(buffer, dtype)[column.offset : column.offset + len(column)]


def _valid(column: pa.Array) -> Mask:
    """Where a column is not null, from its bits: Arrow's own functions take many times as long to begin."""
    end = column.offset + len(column)
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), count=end, bitorder="little")
    return bits[column.offset :].astype(np.bool_)


def offsets_of(lengths: npt.NDArray[Any]) -> Int64s:
    """Where each sample's ids begin and end, from how many it has."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def id_kind(kind: pa.DataType) -> str:
    """ "integer", "text", "null" (an all-null column) or "" for a type that holds no ids."""
    if is_list(kind):
        kind = kind.value_type
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind):
        return INTEGER
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(is_text(kind) for is_text in texts) or is_view(kind):
        return TEXT  # bytes hash like the string they spell
    return "null" if types.is_null(kind) else ""


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds several values a row."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of a type can be dense numbers or labels."""
    types = pa.types
    numbers = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    return any(is_one(kind) for is_one in numbers)


def check_present(name: str, found: Sequence[str], where: object) -> None:
    """Refuse a file, ``where``, without exactly one column of this name."""
    count = found.count(name)
    if count == 1:
        return
    if count > 1:
        raise DataError(f"{where}: has {count} columns called {name!r}; rename all but one")
    nearest = difflib.get_close_matches(name, found, n=1)
    meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    if any(name in one.split(",") for one in found):
        meant = " (names with a comma in them need a schema file)"
    shown = ", ".join(found)[:500] or "no columns"
    raise DataError(f"{where}: no column {name!r}{meant}; it has {shown}")


def _wrong_type(path: Path, name: str, found: pa.Schema, needed: str) -> DataError:
    return DataError(f"{path}: column {name!r} is of type {found.field(name).type}; {needed}")
