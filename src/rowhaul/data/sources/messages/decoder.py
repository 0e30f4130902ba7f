"""Messages, one a sample, and tables of samples to columns; what cannot be trained on is told apart.

Arrow parses many messages of JSON at once and without Python's lock. Where it stumbles over one of them, or
may have found a missing field, Python looks at every message by itself.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from rowhaul._id_kinds import HEX, INTEGER, TEXT, UNRECORDED
from rowhaul.data.block import Block, join
from rowhaul.data.columns import (
    LATEST_TIME,
    Origin,
    decode_dense,
    decode_ids,
    decode_label,
    decode_times,
    dense_numbers,
    id_kind,
    is_list,
    is_number,
    is_time,
    label_numbers,
    time_numbers,
)
from rowhaul.data.schema import TIME_UNITS, IdColumn, Schema
from rowhaul.data.sources.messages.showing import SHOWN, as_text, row_text, short
from rowhaul.data.sources.messages.table_rows import CheckedRows, batches_of, has_values, lengths_of
from rowhaul.data.sources.messages.texts import Texts, values_of
from rowhaul.data.sources.source import SetAside
from rowhaul.data.targets import Targets
from rowhaul.errors import DataError

_LARGEST = float(np.finfo(np.float32).max)
_ARROW = {INTEGER: pa.int64(), HEX: pa.int64(), TEXT: pa.string()}
_KINDS = {"integer": INTEGER, "hex": HEX, "string": TEXT}  # by type in a schema; hex ids are sent as numbers
_NOWHERE = Origin(Path("message"), 0)  # every value is checked before it is decoded
_ID_NEEDED = "a 64-bit integer, a string, a list of those or null is needed"

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A message that nothing can be read from."""

    why: str


Message = bytes | Texts | Unreadable  # bytes are JSON
Where = Callable[[int], str]  # names a message, by number


@dataclass(frozen=True)
class Decoded:
    """The samples of some messages.

    ``places`` are the numbers of the messages they are from; what was set aside has the number of samples
    before it.
    """

    block: Block
    places: Sequence[int]
    set_aside: Sequence[tuple[int, SetAside]]

    @property
    def num_messages(self) -> int:
        """Count the messages."""
        return len(self.places) + len(self.set_aside)


def join_decoded(parts: Sequence[Decoded]) -> Decoded:
    """The samples of several runs of messages, one after the other."""
    if len(parts) == 1:
        return parts[0]
    places: list[int] = []
    set_aside: list[tuple[int, SetAside]] = []
    first = 0
    for one in parts:
        set_aside += [(len(places) + before, what) for before, what in one.set_aside]
        places += [first + place for place in one.places]
        first += one.num_messages
    blocks = [one.block for one in parts]
    return Decoded(join([one for one in blocks if len(one)] or blocks[:1]), places, set_aside)


class MessageDecoder:
    """Turns messages into samples.

    The ids of a feature are all integers or all strings: as the schema says, or as the first one is.
    ``kinds`` are those known before; it grows.
    """

    def __init__(self, schema: Schema, kinds: dict[str, str]) -> None:
        if schema.labels or schema.weight or (schema.label and schema.label.kind != "binary"):
            raise DataError(
                "a stream of messages has one label, 0 or 1, and no weights; several labels, numbers and "
                "weights need files: a folder in which they appear (--follow) will do"
            )
        if schema.label is None:
            raise DataError("the schema names no label, which training needs; add `label:` to it")
        for column in schema.stored_ids:
            if kinds.get(column.name) == UNRECORDED:
                del kinds[column.name]
            if column.type != "auto":
                kinds.setdefault(column.name, _KINDS[column.type])
        self._schema, self._kinds, self._label = schema.without_group(), kinds, schema.label
        self._ids = {column.name: column for column in schema.stored_ids}
        self._columns = self._schema.column_names() + ([schema.time.name] if schema.time else [])
        self._in_lists: dict[str, bool] = {}  # by feature, as in the messages before

    def decode(self, messages: Sequence[Message], where: Where) -> Decoded:
        """Decode messages."""
        rows = self._parsed_together(messages)
        if rows is not None:
            return Decoded(self._block(rows), range(len(messages)), ())
        good: list[Fields] = []
        places: list[int] = []
        bad: list[tuple[int, SetAside]] = []
        for number, message in enumerate(messages):
            try:
                good.append(self._checked(message))
                places.append(number)
            except ValueError as error:
                shown = as_text(message) if isinstance(message, bytes) else str(message)
                why = str(error).encode(errors="backslashreplace").decode()  # names may be no text
                bad.append((len(good), SetAside(where(number), why, shown[:SHOWN])))
        return Decoded(self._block(self._as_rows(good)), places, bad)

    def decode_table(self, table: pa.Table, where: Where) -> Decoded:
        """Decode samples that are columns already; ``where`` names a row, by number.

        Each row gives the sample that it would give alone.
        """
        names = table.column_names
        missing = [name for name in self._columns if name not in names]
        why = _missing(missing, names) if missing else ""
        if several := [name for name in self._columns if names.count(name) > 1]:
            why = f"{names.count(several[0])} fields are called {several[0]!r}"
        if why or not len(table):
            aside = [(0, SetAside(where(row), why, row_text(table, row))) for row in range(len(table))]
            return Decoded(self._block(self._as_rows([])), (), aside)
        parts, first = [], 0
        for rows in batches_of(table.select(self._columns)):
            parts.append(self._decode_rows(rows, table.slice(first, len(rows)), first, where))
            first += len(rows)
        return join_decoded(parts)

    def _decode_rows(self, rows: pa.RecordBatch, whole: pa.Table, first: int, where: Where) -> Decoded:
        """Decode the columns that are needed; ``whole`` has all, for messages."""
        checked, label, time = CheckedRows(rows), self._label, self._schema.time
        checked.check(
            label.name, "label", self._label_needed, is_number, lambda one: label_numbers(one, label)
        )
        for dense in self._schema.dense:
            checked.check(dense.name, "dense field", "a number or null is needed", is_number, dense_numbers)
        if time is not None:
            needed = f"a timestamp, or a number of {time.unit} since 1970, is needed"
            checked.check(time.name, "time field", needed, is_time, lambda one: time_numbers(one, time))
        kinds = {name: self._check_ids(checked, name) for name in self._schema.stored_features}
        for name, kind in kinds.items():
            if name not in self._kinds and (has_values(checked.columns[name]) & checked.usable).any():
                self._kinds[name] = kind
        before = np.cumsum(checked.usable)
        set_aside = [
            (int(before[row]), SetAside(where(first + row), why, row_text(whole, row)))
            for row, why in sorted(checked.why.items())
        ]
        places = np.flatnonzero(checked.usable).tolist() if set_aside else range(len(rows))
        return Decoded(self._block(checked.usable_rows()), places, set_aside)

    def _check_ids(self, checked: CheckedRows, name: str) -> str:
        """Note in which rows the ids of a feature cannot be trained on; returns what the others are."""
        column = checked.known(name, id_kind)
        if column is None:
            checked.leave_out(name, f"; {_ID_NEEDED}")
            return "null"
        kind = id_kind(column.type)
        if is_list(column.type) and (elements := column.flatten()).null_count:
            absent = elements.is_null().to_numpy(zero_copy_only=False)
            good = np.ones(len(column), np.bool_)
            good[np.repeat(np.arange(len(column)), lengths_of(column))[absent]] = False
            checked.note(good, f"id field {name!r} is", name, f"; {_ID_NEEDED}")
        known = self._kinds.get(name, kind)
        if kind != "null" and known != kind and (known, kind) != (HEX, INTEGER):
            checked.leave_out(name, f", but {_other_kind(known)}")
        return kind

    def _has_usable_numbers(self, rows: pa.RecordBatch) -> bool:
        """Whether label, numbers and time of all samples can be trained on."""
        if (time := self._schema.time) is not None and not time_numbers(rows.column(time.name), time)[
            1
        ].all():
            return False
        usable = label_numbers(rows.column(self._label.name), self._label)[1].all()
        return bool(usable) and all(
            dense_numbers(rows.column(one.name))[1].all() for one in self._schema.dense
        )

    def _parsed_together(self, messages: Sequence[Message]) -> pa.RecordBatch | None:
        """Parse messages like those before them; None: they are not all, or one needs a closer look."""
        if not self._in_lists or not messages or not all(isinstance(one, bytes) for one in messages):
            return None
        text = b"\n".join(cast(Sequence[bytes], messages))
        if text.count(b"\n") != len(messages) - 1 or b"\n\n" in text or not _is_utf8(text):
            return None
        wanted = pj.ParseOptions(explicit_schema=self._arrow_schema(), unexpected_field_behavior="ignore")
        options = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
        try:
            table = pj.read_json(io.BytesIO(text), options, wanted).combine_chunks()
        except pa.ArrowException:
            return None
        if len(table) != len(messages) or not len(table):
            return None
        rows: pa.RecordBatch = table.to_batches()[0]
        for name in self._columns:
            column = rows.column(name)
            # Arrow reads a field that is missing as null: every message must name it, not an object in it.
            named = text.count(json.dumps(name).encode() + b":") == text.count(b"{") == len(messages)
            if column.null_count and not named:
                return None
            if self._in_lists.get(name) and column.flatten().null_count:
                return None
        return rows if self._has_usable_numbers(rows) else None

    def _arrow_schema(self) -> pa.Schema:
        fields = [(name, pa.float64()) for name in self._columns if name not in self._in_lists]
        for name, in_lists in self._in_lists.items():
            kind = _ARROW[self._kinds[name]]
            fields.append((name, pa.list_(kind) if in_lists else kind))
        return pa.schema(fields)

    def _as_rows(self, messages: Sequence[Fields]) -> pa.RecordBatch:
        """Checked messages as columns."""
        arrays = []
        for name in self._columns:
            values = [one[name] for one in messages]
            if name not in self._schema.stored_features:
                arrays.append(pa.array([None if one is None else float(one) for one in values], pa.float64()))
                continue
            in_lists = any(isinstance(one, list) for one in values)
            kind = _ARROW[self._kinds.get(name, INTEGER)]
            if in_lists:
                values = [one if isinstance(one, list) or one is None else [one] for one in values]
            arrays.append(pa.array(values, pa.list_(kind) if in_lists else kind))
            if name in self._kinds and messages:
                self._in_lists[name] = in_lists
        if len(self._in_lists) < len(self._schema.stored_ids):
            self._in_lists.clear()  # not all are known yet
        return pa.record_batch(arrays, self._columns)

    def _block(self, rows: pa.RecordBatch) -> Block:
        time = self._schema.time
        return Block(
            ids=tuple(decode_ids(rows.column(name)) for name in self._schema.stored_features),
            dense=decode_dense(rows, self._schema.dense, _NOWHERE),
            targets=Targets(decode_label(rows.column(self._label.name), self._label, _NOWHERE)),
            times=decode_times(rows.column(time.name), time, _NOWHERE) if time is not None else None,
        )

    def _checked(self, message: Message) -> Fields:
        """Parse one message and check every value; raises a ValueError that says what is wrong."""
        if isinstance(message, Unreadable):
            raise ValueError(message.why)
        if isinstance(message, bytes):
            try:
                fields = json.loads(message)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"not JSON ({error})") from None
        else:
            fields = values_of(message, self._columns, self._ids, self._kinds)
        if not isinstance(fields, Mapping):
            raise ValueError(f"not a JSON object with a field for each column, but {type(fields).__name__}")
        missing = [name for name in self._columns if name not in fields]
        if missing:
            raise ValueError(_missing(missing, list(fields)))
        self._check_label(fields[self._label.name])
        for dense in self._schema.dense:
            value = fields[dense.name]
            if value is not None and not (_is_number(value) and abs(value) <= _LARGEST):
                raise ValueError(f"dense field {dense.name!r} is {short(value)}; a number or null is needed")
        if (time := self._schema.time) is not None:
            value = fields[time.name]
            if not (_is_number(value) and 0 <= value // TIME_UNITS[time.unit] < LATEST_TIME):
                needed = f"a number of {time.unit} since 1970 is needed"
                raise ValueError(f"time field {time.name!r} is {short(value)}; {needed}")
        kinds = {name: self._id_kind(column, fields[name]) for name, column in self._ids.items()}
        for name, kind in kinds.items():  # all are good
            if kind is not None:
                self._kinds.setdefault(name, kind)
        return fields

    def _check_label(self, value: Any) -> None:
        if not _is_number(value) or (self._label.positive_from is None and value not in (0, 1)):
            raise ValueError(f"label {self._label.name!r} is {short(value)}; {self._label_needed}")

    @property
    def _label_needed(self) -> str:
        return "0 or 1 is needed" if self._label.positive_from is None else "a number is needed"

    def _id_kind(self, column: IdColumn, given: Any) -> str | None:
        """Check the ids of a feature; returns what they are, None where there are none."""
        kind = self._kinds.get(column.name)
        for one in given if isinstance(given, list) else () if given is None else (given,):
            if isinstance(one, str):
                if not _is_text(one):
                    raise ValueError(
                        f"id field {column.name!r} is {short(given)}, which has half of a surrogate pair"
                    )
                found = TEXT
            elif isinstance(one, int) and not isinstance(one, bool) and -(1 << 63) <= one < 1 << 63:
                found = INTEGER
            else:
                raise ValueError(f"id field {column.name!r} is {short(given)}; {_ID_NEEDED}")
            kind = kind or found
            if found != kind and not (found == INTEGER and kind == HEX):
                raise ValueError(f"id field {column.name!r} is {short(given)}, but {_other_kind(kind)}")
        return kind


def _missing(missing: Sequence[str], has: Sequence[str]) -> str:
    names = ", ".join(map(str, has))[:200] or "no field"
    return f"no field {', '.join(map(repr, missing))} (null for a missing value); it has {names}"


def _other_kind(kind: str) -> str:
    return f"so far it has {kind} ids, which are different keys; send all as one type"


def _is_utf8(text: bytes) -> bool:
    """Whether bytes are UTF-8, which Arrow does not look at."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_text(value: str) -> bool:
    """Whether UTF-8 can write a string, from which its key is made; JSON can escape what is none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max  # a larger one is no float at all
    return isinstance(value, float) and math.isfinite(value)
