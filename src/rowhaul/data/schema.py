"""What the columns of a log mean: labels, dense numbers, id features, and what is known of whole samples.

A schema is a small YAML file that a person can write::

    label: click                          # 0/1; or {name: rating, positive_from: 4}
    dense:
      - age
      - {name: price, transform: log1p}   # log(1 + max(x, 0)), for counts and amounts
    ids:
      - user                              # a string or an int64, one or a list of them per sample
      - {name: zip, type: string}         # in CSV: also if all look like numbers
      - {name: item, table: items}        # features that name one table share its rows
      - {name: last_item, table: items}
      - {name: history, table: items, max_length: 50}    # ids in order, of which the last 50 are read
      - {name: others, table: items, negatives_of: item, count: 4}   # not in the files: drawn by the reader
    time: at                              # when it happened, for a time to live: {name: at, unit: ms}
    weight: importance                    # optional: how much a sample counts in the loss
    group: user                           # optional: whose samples are ranked together in evaluation
    csv:                                  # only for CSV input
      delimiter: ","
      header: true
      encoding: utf-8

Several things to predict are ``labels`` instead of ``label``; a missing value counts for nothing::

    labels:
      - click
      - {name: conversion, after: click}  # known only where click is 1
      - {name: seconds, kind: number}     # squared error instead of cross entropy

`prepare` and `generate` write one beside the Parquet files; `train` looks for it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rowhaul._files import write_text
from rowhaul._yaml import load_yaml
from rowhaul.errors import DataError

SCHEMA_FILE = "schema.yaml"
TRANSFORMS = ("none", "log1p")
TIME_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # in a second
ID_TYPES = ("auto", "string", "integer", "hex")
DRAWS = ("even", "frequent")
LABEL_KINDS = ("binary", "number")


@dataclass(frozen=True)
class LabelColumn:
    """A column to predict: 0 or 1, or a number that counts as 1 from ``positive_from`` upwards.

    ``kind`` is ``number`` for one to predict as it is. Of several labels, one that is ``after`` another is
    known only where that one is 1: a conversion only after a click.
    """

    name: str
    positive_from: float | None = None
    kind: str = "binary"
    after: str = ""

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, LABEL_KINDS, self.name)
        if self.kind == "number" and self.positive_from is not None:
            raise DataError(f"label {self.name!r}: positive_from makes 0 or 1 of a number; leave out `kind`")


@dataclass(frozen=True)
class DenseColumn:
    """A number per sample; a missing one reads as 0 after the transform."""

    name: str
    transform: str = "none"

    def __post_init__(self) -> None:
        _check_choice("transform", self.transform, TRANSFORMS, self.name)


@dataclass(frozen=True)
class IdColumn:
    """An id feature. ``type`` and ``separator`` say how to read it from text.

    In text, ``string`` ids become 64-bit xxhash keys, ``integer`` and ``hex`` ids are their own
    value, and ``auto`` takes a column for integers if it looks like that; ``separator`` splits a field that
    holds several ids. In Parquet the column's own type decides; in data that `prepare` wrote, where all ids
    are keys, ``type`` says what they were. ``table`` defaults to the column's name.

    ``max_length`` makes the column a history: a list in order, oldest first, of which the last ``max_length``
    ids are read. A column with ``negatives_of`` is in no file: for every id of that feature the reader draws
    ``count`` ids which the sample does not have, see `rowhaul.data.negatives`. ``draw`` says how likely each
    is: ``even``, as any other, or ``frequent``, as often as the batch has it.
    """

    name: str
    table: str = ""
    type: str = "auto"
    separator: str | None = None
    max_length: int | None = None
    negatives_of: str = ""
    count: int = 1
    draw: str = "even"

    def __post_init__(self) -> None:
        _check_choice("type", self.type, ID_TYPES, self.name)
        _check_choice("draw", self.draw, DRAWS, self.name)
        for entry, given in (("max_length", self.max_length), ("count", self.count)):
            if given is not None and given < 1:
                raise DataError(f"column {self.name!r}: {entry} must be at least 1, got {given}")
        for entry, is_set in (("count", self.count != 1), ("draw", self.draw != "even")):
            if is_set and not self.negatives_of:
                raise DataError(
                    f"column {self.name!r}: {entry} is for negatives; say `negatives_of` which feature"
                )
        if not self.table:
            object.__setattr__(self, "table", self.name)


@dataclass(frozen=True)
class TimeColumn:
    """When each sample happened: a timestamp or a date, or a number of ``unit`` since 1970."""

    name: str
    unit: str = "s"

    def __post_init__(self) -> None:
        _check_choice("unit", self.unit, tuple(TIME_UNITS), self.name)


@dataclass(frozen=True)
class CsvLayout:
    """How to cut a text file into columns; without a header, ``columns`` names them in order."""

    delimiter: str = ","
    header: bool = True
    columns: tuple[str, ...] = ()
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        _check_encoding(self.encoding)
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.header and not self.columns:
            raise DataError("csv: header is false, so columns must name every column in order")


@dataclass(frozen=True)
class Schema:
    """The label, dense and id columns of a data set.

    Args:
        label: the one column to predict, if there is one.
        dense: numbers.
        ids: features that have rows.
        csv: how to cut text into columns.
        labels: several columns to predict, instead of ``label``.
        weight: the column that says how much a sample counts in the loss; empty: all the same.
        group: the column whose equal values are ranked together in evaluation; it may be an id feature, too.
    """

    label: LabelColumn | None
    dense: tuple[DenseColumn, ...]
    ids: tuple[IdColumn, ...]
    csv: CsvLayout | None = None
    time: TimeColumn | None = None  # read where samples are trained on
    labels: tuple[LabelColumn, ...] = ()
    weight: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        self._check_labels()
        names = self.column_names() + ([self.time.name] if self.time else [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"schema: column {twice[0]!r} is named more than once; name each column once")
        if not self.ids:
            raise DataError("schema: no id column; list at least one under `ids`")
        tables = {column.name: column.table for column in self.stored_ids}
        for column in self.negatives:
            if tables.get(column.negatives_of) != column.table:
                raise DataError(
                    f"schema: column {column.name!r} draws negatives of {column.negatives_of!r} for table "
                    f"{column.table!r}; name an id column that is in the files and reads the same table"
                )

    def as_parquet(self) -> Schema:
        """The same without what only concerns text: equal for data that is read the same way."""
        ids = tuple(replace(column, type="auto", separator=None) for column in self.ids)
        return replace(self, ids=ids, csv=None)

    def column_names(self, with_label: bool = True) -> list[str]:
        """Names of all columns in files: labels and what goes with them, dense numbers, ids."""
        targets = [column.name for column in self.tasks]
        targets += [name for name in (self.weight, self.group) if name and name not in self.stored_features]
        return [
            *(targets if with_label else []),
            *(column.name for column in self.dense),
            *self.stored_features,
        ]

    @property
    def tasks(self) -> tuple[LabelColumn, ...]:
        """All columns to predict, however many."""
        return (self.label,) if self.label else self.labels

    def without_group(self) -> Schema:
        """The same for training, which has no use for groups."""
        return replace(self, group="")

    def _check_labels(self) -> None:
        if self.label and self.labels:
            raise DataError(
                "schema: both `label` and `labels` are given; list all columns to predict in `labels`"
            )
        names = [column.name for column in self.labels]
        for place, column in enumerate(self.tasks):
            if column.after and column.after not in names[:place]:
                raise DataError(
                    f"schema: label {column.name!r} is after {column.after!r}, which must be one of the "
                    f"labels before it ({', '.join(names[:place]) or 'there is none'})"
                )
            if column.after and self.labels[names.index(column.after)].kind != "binary":
                raise DataError(
                    f"schema: label {column.name!r} is after {column.after!r}, which is not 0 or 1"
                )
        if self.weight in self.features and self.weight:
            raise DataError(
                f"schema: the weight {self.weight!r} is an id column; it must be a column of its own"
            )

    @property
    def stored_ids(self) -> tuple[IdColumn, ...]:
        """The id columns that are in files: all but negatives."""
        return tuple(column for column in self.ids if not column.negatives_of)

    @property
    def stored_features(self) -> tuple[str, ...]:
        """Names of the id features that are in files."""
        return tuple(column.name for column in self.stored_ids)

    @property
    def negatives(self) -> tuple[IdColumn, ...]:
        """The id columns that the reader draws."""
        return tuple(column for column in self.ids if column.negatives_of)

    @property
    def histories(self) -> tuple[str, ...]:
        """Names of the features that are histories."""
        return tuple(column.name for column in self.ids if column.max_length is not None)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in order."""
        return tuple(column.name for column in self.ids)

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The features that read each table, tables in order of first mention."""
        by_table: dict[str, tuple[str, ...]] = {}
        for column in self.ids:
            by_table[column.table] = (*by_table.get(column.table, ()), column.name)
        return by_table

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], source: str = "schema") -> Schema:
        """Build from plain dictionaries, as read from YAML; ``source`` names it in errors."""
        if not isinstance(given, Mapping):
            raise DataError(f"{source}: expected `label`, `dense` and `ids`, got {type(given).__name__}")
        _check_keys(given, cls, source)
        for part in ("weight", "group"):
            if not isinstance(given.get(part) or "", str):
                raise DataError(f"{source}: `{part}` must be the name of a column, got {given[part]!r}")
        for part in ("dense", "ids", "labels"):
            if isinstance(given.get(part), str) or not isinstance(given.get(part) or [], Sequence):
                raise DataError(f"{source}: `{part}` must be a list of columns, got {given[part]!r}")
        return cls(
            label=_column(LabelColumn, given["label"], source) if given.get("label") else None,
            dense=tuple(_column(DenseColumn, one, source) for one in given.get("dense") or ()),
            ids=tuple(_column(IdColumn, one, source) for one in given.get("ids") or ()),
            csv=_column(CsvLayout, given["csv"], source) if given.get("csv") else None,
            time=_column(TimeColumn, given["time"], source) if given.get("time") else None,
            labels=tuple(_column(LabelColumn, one, source) for one in given.get("labels") or ()),
            weight=given.get("weight") or "",
            group=given.get("group") or "",
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain form that `from_dict` reads, defaults left out."""
        plain: dict[str, Any] = {"label": _plain(self.label) if self.label else None}
        if self.labels:
            plain = {"labels": [_plain(column) for column in self.labels]}
        plain |= {name: getattr(self, name) for name in ("weight", "group") if getattr(self, name)}
        plain["dense"] = [_plain(column) for column in self.dense]
        plain["ids"] = [_plain(column) for column in self.ids]
        if self.csv:
            plain["csv"] = _plain(self.csv)
        if self.time:
            plain["time"] = _plain(self.time)
        return plain

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """Read a schema file."""
        try:
            given = load_yaml(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{path}: no such schema file") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a YAML file: {error}") from None
        try:
            return cls.from_dict(given, str(path))
        except DataError as error:
            if str(path) in str(error):
                raise
            raise DataError(f"{path}: {str(error).removeprefix('schema: ')}") from None

    def write(self, path: str | Path) -> None:
        """Write the schema file that `read` reads."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        write_text(path, text)


Column = TypeVar("Column", LabelColumn, DenseColumn, IdColumn, CsvLayout, TimeColumn)


def _column(kind: type[Column], given: Any, source: str) -> Column:
    if isinstance(given, str) and kind is not CsvLayout:
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise DataError(f"{source}: expected a column name or a mapping, got {given!r}")
    _check_keys(given, kind, source)
    if kind is not CsvLayout and not isinstance(given.get("name"), str):
        raise DataError(f"{source}: a column needs a `name`, got {dict(given)!r}")
    for field in fields(kind):
        _check_type(field.name, given.get(field.name, field.default), source)
    return kind(**given)


_TYPES: dict[str, tuple[type[Any], ...]] = {
    **dict.fromkeys(
        ("name", "table", "type", "transform", "delimiter", "encoding", "unit", "kind", "after"), (str,)
    ),
    "separator": (str, type(None)),
    "negatives_of": (str,),
    "draw": (str,),
    "max_length": (int, type(None)),
    "count": (int,),
    "header": (bool,),
    "columns": (list, tuple),
    "positive_from": (int, float, type(None)),
}


def _check_type(entry: str, given: Any, source: str) -> None:
    is_wrong = not isinstance(given, _TYPES[entry])
    if is_wrong or (isinstance(given, float) and not math.isfinite(given)):
        needed = " or ".join(kind.__name__ for kind in _TYPES[entry] if kind is not type(None))
        raise DataError(f"{source}: `{entry}` must be {needed}, got {given!r}")
    if isinstance(given, list | tuple) and not all(isinstance(name, str) for name in given):
        raise DataError(f"{source}: `columns` must be a list of names, got {given!r}")


def _check_encoding(name: str) -> None:
    try:
        "".encode(name)  # refuses codecs that are not for text, too
    except LookupError as error:
        raise DataError(
            f"csv: encoding {name!r} is not known ({error}); use utf-8, latin-1, cp1252, utf-16 or another "
            "that Python has"
        ) from None


def _check_keys(given: Mapping[str, Any], kind: type[Any], source: str) -> None:
    known = [field.name for field in fields(kind)]
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise DataError(f"{source}: unknown entry {unknown[0]!r}; known are {', '.join(known)}")


def _check_choice(what: str, given: str, known: Sequence[str], column: str) -> None:
    if given not in known:
        raise DataError(f"column {column!r}: unknown {what} {given!r}; known are {', '.join(known)}")


def _plain(column: Any) -> Any:
    plain = {}
    for field in fields(column):
        value = getattr(column, field.name)
        if value != field.default and not (field.name == "table" and value == column.name):
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain["name"] if list(plain) == ["name"] else plain
