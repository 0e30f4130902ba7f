"""What a request says: shared features and candidates become ids and numbers, each value checked.

Values are read as `predict` reads a Parquet file: a null is no id, a list several, of which a history has its
newest, strings are hashed, missing numbers are 0. Other columns than the schema's are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul._id_kinds import HEX, INTEGER, TEXT, UNRECORDED
from rowhaul.data.columns import Ids, decode_ids, dense_numbers, id_kind, is_number
from rowhaul.data.keys import hash_string
from rowhaul.data.negatives import newest_ids
from rowhaul.data.schema import Schema
from rowhaul.errors import DataError
from rowhaul.serve.request_kernels import fill_numbers, join_ids
from rowhaul.serve.request_values import REFUSED, as_array, first_wrong, kind_of
from rowhaul.serve.rows import IdBags

Shared = Mapping[str, Any]
Candidates = Any
"""A mapping for each candidate; or a column for each feature: a mapping of them, or a table of Arrow."""

# What is needed, by the kind of ids that a model was trained on. A hexadecimal id is also its own number.
_NEEDED = {
    INTEGER: "an integer",
    UNRECORDED: "an integer",
    TEXT: "a string",
    HEX: "a hexadecimal string or an integer",
}
_ANY = (INTEGER, TEXT)
_TAKEN: dict[str | None, tuple[str, ...]] = {
    INTEGER: (INTEGER,),
    UNRECORDED: (INTEGER,),
    TEXT: (TEXT,),
    HEX: (TEXT, INTEGER),
}
# Types whose values can be used where they lie, and what `request_kernels` needs to know of them.
_IDS = {pa.int64().id: 0}
_FLOATS = {pa.float32().id: 4, pa.float64().id: 8}
_ABSENT = object()
_LARGEST = 1e38  # of numbers that are certainly finite as float32
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")


class RequestError(DataError):
    """A request that cannot be scored: carries the ``field`` that is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Samples:
    """What to score."""

    bags: IdBags
    numbers: npt.NDArray[np.float32]  # samples x dense columns; one row where all samples share them

    def __len__(self) -> int:
        return self.bags.num_samples


class RequestReader:
    """Reads requests of one schema; ``key_kinds`` says what ids its model was trained on."""

    def __init__(self, schema: Schema, key_kinds: Mapping[str, str]) -> None:
        self._schema, self._kinds = schema, key_kinds
        self._limits = {one.name: one.max_length for one in schema.ids if one.max_length is not None}
        self._are_logs = np.array([column.transform == "log1p" for column in schema.dense], np.bool_)

    def read(self, shared: Shared, candidates: Candidates) -> Samples:
        """Return the samples of a request."""
        columns, wanted = _Columns(shared, candidates), self._schema
        singles = _Singles(len(wanted.features) + len(wanted.dense))
        parts = [self._ids(columns, singles, name) for name in wanted.features]
        return Samples(_joined(parts, len(columns)), self._numbers(columns, singles))

    def _ids(self, columns: _Columns, singles: _Singles, name: str) -> _Part:
        trained = self._kinds.get(name)
        value = columns.shared.get(name, _ABSENT)
        if value is not _ABSENT and name not in columns.own:
            if value is None:
                return singles.none()
            if (key := _plain_key(value, trained)) is not None:
                return singles.key(key)
        column = columns.array(name)
        if (plain := _plain(column, _IDS)) is not None and INTEGER in _TAKEN.get(trained, _ANY):
            return plain
        kind = id_kind(column.type)
        if kind == "":
            needed = _NEEDED.get(trained or "", "an integer or a string")
            raise columns.error(
                name,
                _first_valid(column),
                f"an id is {needed}, a list of those, or null; got {_shown(column)}",
            )
        if kind != "null" and trained is not None and kind not in _TAKEN[trained]:
            raise columns.error(
                name,
                _first_valid(column),
                f"the model was trained on {trained} ids; give {_NEEDED[trained]}, got {_shown(column)}",
            )
        if trained == HEX and kind == TEXT:
            column = _unhexed(columns, name, column)
        ids = decode_ids(column)
        return _decoded(newest_ids(ids, self._limits[name]) if name in self._limits else ids)

    def _numbers(self, columns: _Columns, singles: _Singles) -> npt.NDArray[np.float32]:
        names = [one.name for one in self._schema.dense]
        are_shared = all(name in columns.shared for name in names)
        numbers = np.empty((1 if are_shared else len(columns), len(names)), np.float32)
        parts = [self._number(columns, singles, name) for name in names]
        if numbers.size:
            wrong = fill_numbers(_table(parts), self._are_logs, numbers)
            if wrong >= 0:
                _checked_numbers(columns, names[wrong], columns.array(names[wrong], is_number=True))
        return numbers

    def _number(self, columns: _Columns, singles: _Singles, name: str) -> _Part:
        value = columns.shared.get(name, _ABSENT)
        is_plain = value is None or (type(value) is float and abs(value) < _LARGEST)
        if is_plain and name not in columns.own:
            return singles.number(value or 0.0)
        column = columns.array(name, is_number=True)
        if (plain := _plain(column, _FLOATS)) is not None:
            return plain
        return _values(_checked_numbers(columns, name, column), 4)


class _Part(NamedTuple):
    """A column where it lies in memory."""

    fields: tuple[int, int, int, int, int]  # see `rowhaul.serve.request_kernels`
    num_values: int
    owner: Any  # of the memory


class _Singles:
    """Shared values, side by side: an array for each would take longer than all else that is done with it."""

    def __init__(self, count: int) -> None:
        self._keys = np.zeros(count + 1, np.int64)  # the last one is a zero, and no bit of it says valid
        self._numbers, self._next = self._keys.view(np.float64), 0
        self._address = self._keys.ctypes.data
        self._zero = self._address + 8 * count

    def none(self) -> _Part:
        return _Part((self._zero, self._zero, 0, 0, 1), 1, self._keys)

    def key(self, key: int) -> _Part:
        self._keys[self._next] = key
        return self._part(0)

    def number(self, value: float) -> _Part:
        self._numbers[self._next] = value
        return self._part(8)

    def _part(self, kind: int) -> _Part:
        self._next += 1
        return _Part((self._address + 8 * (self._next - 1), 0, 0, kind, 1), 1, self._keys)


def _plain(column: pa.Array, kinds: Mapping[int, int]) -> _Part | None:
    """Return a column whose values need not be decoded; None: its type is not one of those."""
    if column.type.id not in kinds:
        return None
    bits, values = column.buffers()
    if values is None:
        return None
    first, count = column.offset, len(column)
    size = 4 if kinds[column.type.id] == 4 else 8
    bits_at = bits.address if column.null_count else 0
    return _Part((values.address + size * first, bits_at, first, kinds[column.type.id], count), count, column)


def _values(values: npt.NDArray[Any], kind: int = 0) -> _Part:
    """Return a column of values, none of them null."""
    return _Part((values.ctypes.data, 0, 0, kind, len(values)), len(values), values)


def _decoded(ids: Ids) -> _Part:
    values, offsets = np.ascontiguousarray(ids.values), ids.offsets
    if offsets is None:
        return _values(values)
    fields = (values.ctypes.data, 0, 0, offsets.ctypes.data, len(offsets) - 1)
    return _Part(fields, len(values), (values, offsets))


def _table(parts: Sequence[_Part]) -> npt.NDArray[np.int64]:
    return np.array([one.fields for one in parts], np.int64)


def _joined(parts: Sequence[_Part], num_samples: int) -> IdBags:
    """Put the ids of all features together."""
    num_bags = sum(one.fields[-1] for one in parts)
    ids = np.empty(sum(one.num_values for one in parts), np.int64)
    offsets, first_bags = np.empty(num_bags + 1, np.int64), np.empty(len(parts) + 1, np.int64)
    num_ids = join_ids(_table(parts), ids, offsets, first_bags)
    return IdBags(ids[:num_ids], offsets, first_bags, num_samples)


def _checked_numbers(columns: _Columns, name: str, column: pa.Array) -> npt.NDArray[np.float32]:
    """Return the numbers of a column, or say which of them is none."""
    if not is_number(column.type):
        raise columns.error(name, _first_valid(column), f"a number is needed, got {_shown(column)}")
    found, finite = dense_numbers(column)
    if not finite.all():
        place = int(np.argmin(finite))
        given = column[place].as_py()
        raise columns.error(name, place, f"{given} is no finite float32; give null for a missing number")
    return np.ascontiguousarray(found)


class _Columns:
    """The columns of a request, wherever they are."""

    def __init__(self, shared: Shared, candidates: Candidates) -> None:
        if not isinstance(shared, Mapping):
            raise RequestError(
                "shared", f"a mapping of feature names to values is needed, got {kind_of(shared)}"
            )
        self.shared: Shared = shared
        self._by_column: dict[str, Any] = {}
        self._twice: Collection[str] = ()  # names that several columns of a table have
        self._rows: Sequence[Mapping[str, Any]] | None = None
        if isinstance(candidates, pa.Table | pa.RecordBatch):
            self._by_column = dict(zip(candidates.schema.names, candidates.columns, strict=True))
            if len(self._by_column) < candidates.num_columns:
                names = candidates.schema.names
                self._twice = {name for name in names if names.count(name) > 1}
            self._count = int(candidates.num_rows)
        elif isinstance(candidates, Mapping):
            self._by_column = dict(candidates)
            self._count = self._checked_lengths()
        elif isinstance(candidates, Sequence) and not isinstance(candidates, str | bytes):
            self._rows, self._count = candidates, len(candidates)
            for place, one in enumerate(candidates):
                if not isinstance(one, Mapping):
                    raise RequestError(
                        f"candidates[{place}]",
                        f"a mapping of feature names to values is needed, got {kind_of(one)}",
                    )
        else:
            raise RequestError(
                "candidates",
                "a list with a mapping for each candidate, or a mapping with a list for each feature, is "
                f"needed; got {kind_of(candidates)}",
            )
        # Names in any candidate, which must not be shared, too.
        self.own: Collection[str] = set().union(*self._rows) if shared and self._rows else self._by_column

    def __len__(self) -> int:
        return self._count

    def array(self, name: str, is_number: bool = False) -> pa.Array:
        """Return a column: one value where it is shared."""
        if name in self.shared:
            if name in self.own:
                raise RequestError(name, "it is given both in shared and in candidates; give it once")
            return self._converted(name, [self.shared[name]], is_number)
        if self._rows is None:
            if name not in self._by_column:
                raise RequestError(name, "it is missing; give it in shared, or for every candidate")
            if name in self._twice:
                raise RequestError(f"candidates.{name}", "several columns have this name; give one of them")
            return self._converted(name, self._by_column[name], is_number)
        try:
            return self._converted(name, [one[name] for one in self._rows], is_number)
        except KeyError:
            place = next(place for place, one in enumerate(self._rows) if name not in one)
            reason = "it is missing; give it in shared, or for every candidate (null: no value)"
            raise self.error(name, place, reason) from None

    def error(self, name: str, place: int, reason: str) -> RequestError:
        """Return an error that names a value."""
        if name in self.shared:
            return RequestError(f"shared.{name}", reason)
        where = f"candidates[{place}].{name}" if self._rows is not None else f"candidates.{name}[{place}]"
        return RequestError(where, reason)

    def _checked_lengths(self) -> int:
        lengths = {name: len(one) for name, one in self._by_column.items() if hasattr(one, "__len__")}
        for name, one in self._by_column.items():
            if name not in lengths or isinstance(one, str | bytes | Mapping):
                raise RequestError(
                    f"candidates.{name}",
                    f"a list with a value for each candidate is needed, got {kind_of(one)}",
                )
        if len(set(lengths.values())) > 1:
            (first, count), *others = lengths.items()
            name, other = next(one for one in others if one[1] != count)
            raise RequestError(
                f"candidates.{name}", f"it has {other:,} values, and {first} has {count:,}; all need as many"
            )
        return next(iter(lengths.values()), 0)

    def _converted(self, name: str, values: Any, is_number: bool) -> pa.Array:
        if isinstance(values, pa.ChunkedArray):
            return values.combine_chunks()
        if isinstance(values, pa.Array):
            return values
        try:
            return as_array(values)
        except REFUSED:
            place, reason = first_wrong(values, is_number)
            raise self.error(name, place, reason) from None


def _plain_key(value: Any, trained: str | None) -> int | None:
    """Return the key of an id that is plainly right; None: Arrow has to look at it."""
    if type(value) is int and INTEGER in _TAKEN.get(trained, _ANY) and -(2**63) <= value < 2**63:
        return value
    if type(value) is str and value.isascii() and trained in (TEXT, None):
        return int(hash_string(value))
    return None


def _unhexed(columns: _Columns, name: str, column: pa.Array) -> pa.Array:
    """Read hexadecimal text as 64-bit numbers, by their bits."""

    def number(given: str | bytes, place: int) -> int:
        text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
        if not _HEX.fullmatch(text):
            raise columns.error(name, place, f"{text!r} is no hexadecimal number of up to 16 digits")
        value = int(text, 16)
        return value - (1 << 64) if value >> 63 else value

    def numbers(given: Any, place: int) -> Any:
        if isinstance(given, list):
            return [number(one, place) for one in given if one is not None]
        return None if given is None else number(given, place)

    read = [numbers(given, place) for place, given in enumerate(column.to_pylist())]
    is_list = any(isinstance(one, list) for one in read)
    return pa.array(read, pa.list_(pa.int64()) if is_list else pa.int64())


def _first_valid(column: pa.Array) -> int:
    """The place of the value that `_shown` shows."""
    return next((place for place, one in enumerate(column) if one.is_valid), 0)


def _shown(column: pa.Array) -> str:
    if pa.types.is_nested(column.type):  # one value may be as long as the request
        return str(column.type)
    value = next((one.as_py() for one in column if one.is_valid), None)
    return repr(value) if len(repr(value)) < 60 else str(column.type)
