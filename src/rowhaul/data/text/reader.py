"""Delimited logs as typed Arrow columns, streamed: `record_kernels` driven block by block.

Memory is one buffer for the longest record plus a block, and one run of rows; it does not grow with the
file. Every bad record is reported with its file and line.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.prefetch import prefetch
from rowhaul.data.text import field_kernels as values
from rowhaul.data.text import record_kernels as records
from rowhaul.data.text.blocks import BLOCK_BYTES, TextFile, read_blocks
from rowhaul.data.text.encodings import Utf8Blocks
from rowhaul.data.text.layout import TextLayout, arrow_columns, kernel_layout, new_columns
from rowhaul.errors import BadLineError, DataError

ROWS_AT_ONCE = 65_536
LONGEST_RECORD_BYTES = 8 << 20
_BLOCKS_AHEAD = 4
_EXAMPLES_KEPT = 5

_REASONS = {
    values.NOT_NUMBER: "{text} is not a finite number",
    values.NUMBER_TOO_LARGE: "{text} is too large for a float32",
    values.NOT_INTEGER: "{text} is not an integer",
    values.INTEGER_TOO_LARGE: "{text} does not fit in 64 bits",
    values.NOT_HEX: "{text} is not hexadecimal",
    values.HEX_TOO_LONG: "{text} has more than 16 hexadecimal digits",
    values.NOT_LABEL: "{text} is not 0 or 1",
    values.LABEL_MISSING: "the label is missing",
    values.NOT_UTF8: "{text} is not valid {encoding}; name its encoding in the schema (csv: encoding: ...)",
}


class NotPlainError(DataError):
    """A column taken for integers holds something else: carries ``column``."""

    def __init__(self, where: str, column: str, text: str) -> None:
        super().__init__(
            f"{where}: column {column}: {text} is not a plain integer, as the ids in the first rows are; say "
            "what they all are: add `type: string` to the column in the schema (then 7 is text, too), or "
            "`type: integer` (then 007 is 7, and a line with text is bad)"
        )
        self.column = column


class Place(NamedTuple):
    """Where a record begins: its offset in the decompressed file and its line, counted from 1."""

    offset: int
    line: int


@dataclass(frozen=True)
class Rows:
    """Some parsed rows: a column per field that is not skipped."""

    columns: dict[str, pa.Array]
    lines: npt.NDArray[np.int64]
    end: Place
    stored_bytes: int  # of the file, used so far

    def __len__(self) -> int:
        return len(self.lines)


@dataclass
class BadLines:
    """Raises for the first bad line, or counts them and keeps some as examples."""

    skip: bool
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, source: str, line: int, reason: str) -> None:
        """Raise, or count."""
        error = BadLineError(source, line, reason)
        if not self.skip:
            raise error
        self.count += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(str(error))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a position."""
        return {"bad_lines": self.count, "bad_line_examples": list(self.examples)}

    @classmethod
    def at(cls, position: dict[str, Any] | None, skip: bool) -> BadLines:
        """Restore the counts saved in a position."""
        known = position or {}
        return cls(skip, known.get("bad_lines", 0), list(known.get("bad_line_examples", [])))


def read_text(
    file: TextFile, layout: TextLayout, start: Place, bad_lines: BadLines, seed: int = 0
) -> Generator[Rows, None, None]:
    """The rows of a file from ``start`` on, at most `ROWS_AT_ONCE` at a time; the last run may be empty.

    ``seed`` other than 0 gives string ids an independent hash, for the check for collisions.
    """
    parser = _Parser(file, layout, start, bad_lines, seed)
    is_utf8 = Utf8Blocks()
    for block, stored_bytes in prefetch(read_blocks(file, start.offset), _BLOCKS_AHEAD):
        if not is_utf8(block):
            parser.check_strings()
        parser.append(block)
        while parser.parse(final=False):
            yield parser.take(stored_bytes)
    if not is_utf8(b"", final=True):
        parser.check_strings()
    file_bytes = file.path.stat().st_size
    while parser.parse(final=True):
        yield parser.take(file_bytes)
    yield parser.take(file_bytes)


class _Parser:
    """The buffer, the columns being filled and the cursor between calls of the kernel."""

    def __init__(
        self, file: TextFile, layout: TextLayout, start: Place, bad_lines: BadLines, seed: int
    ) -> None:
        self._file, self._layout, self._bad_lines = file, layout, bad_lines
        self._kernel_layout = kernel_layout(layout, seed)
        self._spans = np.empty((len(layout.fields), 3), np.uint64)
        self._buffer = np.empty(LONGEST_RECORD_BYTES + BLOCK_BYTES + 8, np.uint8)
        self._size = 0
        self._buffer_offset = start.offset
        self._cursor = np.zeros(records.CURSOR_SIZE, np.int64)
        self._cursor[records.LINE] = start.line
        self._columns = new_columns(self._kernel_layout, ROWS_AT_ONCE, ROWS_AT_ONCE)

    def check_strings(self) -> None:
        """From now on, check that string ids are UTF-8."""
        kinds = self._kernel_layout.kinds
        kinds[kinds == values.STRING] = values.CHECKED

    def append(self, block: bytes) -> None:
        """Move the unfinished record to the front and append ``block``."""
        used = int(self._cursor[records.AT])
        left = self._size - used
        self._buffer[:left] = self._buffer[used : self._size]
        self._buffer[left : left + len(block)] = np.frombuffer(block, np.uint8)
        self._size = left + len(block)
        self._buffer_offset += used
        self._cursor[records.AT] = 0

    def parse(self, final: bool) -> bool:
        """Parse until the columns are full (True) or the buffer is used up (False)."""
        while True:
            status = self._run(final)
            if status == records.COLUMNS_FULL:
                return True
            if status == records.NEEDS_BYTES:
                if self._size - int(self._cursor[records.AT]) <= LONGEST_RECORD_BYTES:
                    return False
                self._pass_endless_record()
            elif status == records.LISTS_FULL:
                self._grow_lists()
            elif status == records.BAD_RECORD:
                self._report()

    def take(self, stored_bytes: int) -> Rows:
        """Return the rows parsed so far and start new columns."""
        num_rows, columns = int(self._cursor[records.ROWS]), self._columns
        place = Place(self._buffer_offset + int(self._cursor[records.AT]), int(self._cursor[records.LINE]))
        arrays = arrow_columns(self._layout, self._kernel_layout, columns, num_rows)
        rows = Rows(arrays, columns.lines[:num_rows], place, stored_bytes)
        self._columns = new_columns(self._kernel_layout, ROWS_AT_ONCE, columns.list_values.shape[1])
        self._cursor[records.ROWS] = 0
        return rows

    def _run(self, final: bool) -> int:
        into = (self._columns, ROWS_AT_ONCE, self._spans, self._cursor)
        return int(records.parse_records(self._buffer, self._size, final, self._kernel_layout, *into))

    def _grow_lists(self) -> None:
        old = self._columns.list_values
        grown = np.empty((old.shape[0], 2 * old.shape[1]), np.int64)
        grown[:, : old.shape[1]] = old
        self._columns = self._columns._replace(list_values=grown)

    def _pass_endless_record(self) -> None:
        """Report a record beyond the limit: an unclosed quote, or not a text file at all."""
        cursor = self._cursor
        line = int(cursor[records.LINE])
        if self._run(final=True) != records.BAD_RECORD or cursor[records.ERROR] != values.UNCLOSED_QUOTE:
            raise DataError(
                f"{self._file}, line {line:,}: no line break in {LONGEST_RECORD_BYTES >> 20} MiB; "
                "is this the right file and format?"
            )
        self._report()

    def _report(self) -> None:
        cursor = self._cursor
        error, column = int(cursor[records.ERROR]), int(cursor[records.ERROR_COLUMN])
        if error == values.FIELD_COUNT:
            reason = f"{len(self._layout.fields)} columns expected, {column} found"
        elif error == values.UNCLOSED_QUOTE:
            reason = 'a quote (") is opened and not closed'
        elif error == values.TEXT_AFTER_QUOTE:
            reason = 'text follows a closing quote ("); double a quote that is part of the text'
        else:
            bad = self._buffer[cursor[records.ERROR_START] : cursor[records.ERROR_END]]
            shown = bad.tobytes().decode(errors="replace")
            shown = repr(shown if len(shown) <= 40 else shown[:40] + "…")
            name, line = self._layout.fields[column].name, int(cursor[records.ERROR_LINE])
            if error == values.NOT_PLAIN:
                raise NotPlainError(f"{self._file}, line {line:,}", name, shown)
            why = _REASONS[error].format(text=shown, encoding=self._file.encoding)
            reason = f"column {name}: {why}"
        self._bad_lines.add(str(self._file), int(cursor[records.ERROR_LINE]), reason)
