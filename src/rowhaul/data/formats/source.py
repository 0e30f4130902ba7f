"""What every raw format becomes: a source of chunks that can start again where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.folder.writer import Chunk
from rowhaul.data.schema import Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import TextLayout
from rowhaul.data.text.reader import BadLines, Place, Rows, read_text
from rowhaul.errors import DataError


class Source(Protocol):
    """Raw files that can be read as chunks of the columns of ``schema``."""

    @property
    def schema(self) -> Schema:
        """Of the chunks: label int8, dense float32, ids int64 or lists of int64."""

    @property
    def files(self) -> Sequence[Path]:
        """Every file that is read."""

    @property
    def string_features(self) -> Sequence[str]:
        """The id features whose keys are hashes."""

    @property
    def guessed_types(self) -> Mapping[str, str]:
        """Types of id features that the schema leaves open, by the first rows."""

    def chunks(self, position: dict[str, Any] | None, bad_lines: BadLines, seed: int = 0) -> Iterator[Chunk]:
        """The chunks behind ``position``; ``seed`` other than 0 hashes strings independently."""


@dataclass(frozen=True)
class Options:
    """What a user may choose about a format; None leaves the choice to it."""

    schema: Schema | None = None
    positive_from: float | None = None
    time_order: bool | None = None
    history: int | None = None
    history_of: str | None = None


@dataclass(frozen=True)
class Histories:
    """Which histories a format can have.

    Args:
        user: the column of whom they are.
        items: the columns they are made of, by the name of the history.
    """

    user: str
    items: Mapping[str, str]


@dataclass(frozen=True)
class TextInput:
    """One raw file, how it is laid out and where its first record begins."""

    file: TextFile
    layout: TextLayout
    start: Place


Derive = Callable[[dict[str, pa.Array]], tuple[dict[str, pa.Array], "BadRows | None"]]
"""Makes the columns of the schema from parsed ones, and may find rows that are bad after all."""


@dataclass(frozen=True)
class BadRows:
    """Rows that a format refuses, with the reason for each."""

    mask: npt.NDArray[np.bool_]
    reason: Callable[[int], str]


@dataclass(frozen=True)
class TextSource:
    """Delimited text files read one after the other.

    ``make_derive``, called with the seed, gives what makes other columns of the parsed ones, such as a
    join; ``time_column`` is kept as a last column for `TimeOrdered`, and not part of the schema.
    ``histories`` are those that can be made of the rows in the order of time.
    """

    inputs: tuple[TextInput, ...]
    schema: Schema
    make_derive: Callable[[int], Derive] | None = None
    time_column: str | None = None
    side_files: tuple[Path, ...] = ()
    guessed_types: Mapping[str, str] = field(default_factory=dict)
    histories: Histories | None = None

    @property
    def string_features(self) -> tuple[str, ...]:
        """See `Source`."""
        return tuple(column.name for column in self.schema.ids if column.type == "string")

    @property
    def files(self) -> tuple[Path, ...]:
        """The raw files, then those joined to them."""
        return (*dict.fromkeys(one.file.path for one in self.inputs), *self.side_files)

    def chunks(self, position: dict[str, Any] | None, bad_lines: BadLines, seed: int = 0) -> Iterator[Chunk]:
        """See `Source`. A chunk ends where its file does."""
        at = position or {"file": 0}
        derive = self.make_derive(seed) if self.make_derive else None
        sizes = [one.file.path.stat().st_size for one in self.inputs]
        for number in range(at["file"], len(self.inputs)):
            one = self.inputs[number]
            start = Place(at["offset"], at["line"]) if "offset" in at else one.start
            at = {}
            for rows in read_text(one.file, one.layout, start, bad_lines, seed):
                yield Chunk(
                    self._batch(one, rows, derive, bad_lines),
                    {"file": number, "offset": rows.end.offset, "line": rows.end.line, **bad_lines.to_dict()},
                    (sum(sizes[:number]) + rows.stored_bytes) / max(1, sum(sizes)),
                )

    def _batch(
        self, one: TextInput, rows: Rows, derive: Derive | None, bad_lines: BadLines
    ) -> pa.RecordBatch:
        columns, bad = derive(rows.columns) if derive else (rows.columns, None)
        names = self.schema.column_names() + ([self.time_column] if self.time_column else [])
        batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names)
        if self.time_column and columns[self.time_column].null_count:
            without_time = columns[self.time_column].is_null().to_numpy(zero_copy_only=False)
            bad = _either(
                bad, BadRows(without_time, lambda _: f"column {self.time_column}: the time is missing")
            )
        if bad is None or not bad.mask.any():
            return batch
        for row in np.flatnonzero(bad.mask):
            bad_lines.add(str(one.file), int(rows.lines[row]), bad.reason(int(row)))
        return batch.filter(pa.array(~bad.mask))


def _either(first: BadRows | None, second: BadRows) -> BadRows:
    """Rows that are bad for one reason or the other; the first is told."""
    if first is None:
        return second
    return BadRows(first.mask | second.mask, lambda row: (first if first.mask[row] else second).reason(row))


def written_schema(schema: Schema, types: Mapping[str, str]) -> Schema:
    """The schema of the chunks made from text or Parquet that ``schema`` describes.

    ``types`` are those of the ids as they were read. Several labels stay numbers, which may be missing.
    """
    if schema.group and schema.group not in schema.features:
        raise DataError(
            f"the group {schema.group!r} is not among `ids`: name it there, too, so that its column is kept, "
            "or train on Parquet files as they are"
        )
    label = replace(schema.label, positive_from=None) if schema.label else None
    ids = tuple(
        replace(column, type=types.get(column.name, column.type), separator=None) for column in schema.ids
    )
    return replace(schema, label=label, ids=ids, csv=None)
