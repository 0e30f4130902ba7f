"""The kernel that turns the bytes of a delimited log straight into typed columns.

One call parses whole records from a buffer until it is used up, the columns are full or a record is
bad. No string object is made: numbers are computed and string ids hashed in place. `reader` drives
it and puts its codes into words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul._memory import load8, load64, store8
from rowhaul.data.text.field_kernels import (
    FIELD_COUNT,
    INTEGER,
    LABEL,
    LABEL_MISSING,
    NOT_LABEL,
    SKIP,
    STRING,
    TEXT_AFTER_QUOTE,
    UNCLOSED_QUOTE,
    U,
    parse_key,
    parse_number,
)

# How a call ended.
NEEDS_BYTES, COLUMNS_FULL, LISTS_FULL, BAD_RECORD = range(4)

# The entries of a cursor. AT and LINE are the next record's offset in the buffer and its 1-based line,
# ROWS the rows parsed so far; the others describe a bad record, which AT and LINE have already passed.
AT, LINE, ROWS, ERROR, ERROR_LINE, ERROR_COLUMN, ERROR_START, ERROR_END = range(8)
CURSOR_SIZE = 8

_LF, _CR, _SPACE, _QUOTE = 10, 13, 32, 34
_ONES, _HIGH_BITS, _ALL_BITS = U(0x0101010101010101), U(0x8080808080808080), U(0xFFFFFFFFFFFFFFFF)
_INCOMPLETE = -1  # the record ends beyond the buffer


class Layout(NamedTuple):
    """How records are cut and what each column holds. A word is up to eight bytes, the first the lowest."""

    delimiter: np.uint64
    delimiter_size: np.uint64
    quoting: bool
    missing: np.uint64  # a field of exactly these bytes is missing, as a blank one is
    missing_size: np.uint64
    positive_from: float  # labels from here on are 1; NaN: labels are 0 or 1
    seed: np.uint64
    kinds: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int64]  # column -> row of the output array of its kind
    separators: npt.NDArray[np.uint8]  # 0: one id a field


class Columns(NamedTuple):
    """Where parsed values go; the last axis of each array is the row."""

    labels: npt.NDArray[np.int8]
    numbers: npt.NDArray[np.float32]  # slots x rows
    number_valid: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int64]
    id_valid: npt.NDArray[np.bool_]
    list_values: npt.NDArray[np.int64]  # slots x values
    list_offsets: npt.NDArray[np.int32]  # slots x (rows + 1)
    lines: npt.NDArray[np.int64]


@kernel
def parse_records(text, size, final, layout, columns, max_rows, spans, cursor):
    """Parse ``text[cursor[AT]:size]`` into rows from ``cursor[ROWS]`` on; returns how the call ended.

    ``text`` is longer than ``size`` by eight bytes or more and is changed where quotes were doubled.
    ``final`` says that no byte follows, so that the last record may lack its line break. ``spans``
    (uint64, columns x 3) is scratch.
    """
    # Unpacked once: taking an array out of a tuple counts a reference each time.
    delimiter, delimiter_size, quoting, missing_text, missing_size, positive_from, seed = layout[:7]
    kinds, slots, separators = layout[7:]
    labels, numbers, number_valid, ids, id_valid, list_values, list_offsets, lines = columns
    base = U(text.ctypes.data)
    end = base + U(size)
    num_columns = len(kinds)
    while True:
        at, line = base + U(cursor[AT]), cursor[LINE]
        if num_columns > 1:
            at, line = _pass_blank_lines(at, end, line)
        elif at < end and _pass_blank_line(at, end) == end:  # a record, unless it is the last line of all
            if not final:
                return NEEDS_BYTES
            at, line = end, line + 1
        cursor[AT], cursor[LINE] = at - base, line
        row = cursor[ROWS]
        if at >= end:
            return NEEDS_BYTES
        if row == max_rows:
            return COLUMNS_FULL
        num_fields, next_at, next_line = _split(
            at, end, line, final, delimiter, delimiter_size, quoting, spans
        )
        if num_fields == _INCOMPLETE:
            return NEEDS_BYTES
        for column in range(num_columns if list_values.shape[0] > 0 else 0):
            if separators[column] != 0 and num_fields == num_columns:
                most = np.int64(spans[column, 1] - spans[column, 0]) // 2 + 1
                if list_offsets[slots[column], row] + most > list_values.shape[1]:
                    return LISTS_FULL
        cursor[AT], cursor[LINE], cursor[ERROR_LINE] = next_at - base, next_line, line
        if num_fields != num_columns:
            cursor[ERROR] = FIELD_COUNT if num_fields > 0 else -num_fields
            cursor[ERROR_COLUMN] = num_fields
            return BAD_RECORD
        lines[row] = line
        for column in range(num_columns):
            kind, slot, separator = kinds[column], slots[column], separators[column]
            if kind == SKIP:
                continue
            start, stop = spans[column, 0], spans[column, 1]
            if spans[column, 2] != U(0):
                stop = _undouble_quotes(start, stop)
                spans[column, 1] = stop
            if kind < STRING:
                while start < stop and load8(start) == _SPACE:
                    start += U(1)
                while start < stop and load8(stop - U(1)) == _SPACE:
                    stop -= U(1)
            missing = start == stop or (
                stop - start == missing_size and _matches(start, missing_text, missing_size)
            )
            error = 0
            if separator != 0:
                count = list_offsets[slot, row]
                while error == 0 and not missing and start < stop:
                    piece_stop = _find(start, stop, separator)
                    if piece_stop > start:
                        error, list_values[slot, count] = parse_key(start, piece_stop, kind, seed)
                        count += 1
                    start = piece_stop + U(1)
                list_offsets[slot, row + 1] = count
            elif kind >= INTEGER:
                key = 0
                if not missing:
                    error, key = parse_key(start, stop, kind, seed)
                ids[slot, row] = key
                id_valid[slot, row] = not missing
            else:
                number = 0.0
                if not missing:
                    error, number = parse_number(start, stop, kind)
                if kind == LABEL:
                    error, labels[row] = _label(error, number, missing, positive_from)
                else:
                    numbers[slot, row] = number
                    number_valid[slot, row] = not missing
            if error != 0:
                cursor[ERROR], cursor[ERROR_COLUMN] = error, column
                cursor[ERROR_START], cursor[ERROR_END] = spans[column, 0] - base, spans[column, 1] - base
                return BAD_RECORD
        cursor[ROWS] = row + 1


@kernel
def _label(error, number, missing, positive_from):
    if missing:
        error = LABEL_MISSING
    elif not np.isnan(positive_from):
        number = 1.0 if number >= positive_from else 0.0
    elif error == 0 and number != 0.0 and number != 1.0:
        error = NOT_LABEL
    return error, np.int8(number) if error == 0 else np.int8(0)


@kernel
def _split(at, end, line, final, delimiter, delimiter_size, quoting, spans):
    """Cut the record at ``at`` into fields, spans of (start, end, whether quotes are doubled).

    Returns (number of fields, _INCOMPLETE or minus an error; where and on which line the next record
    begins, after an error the next line).
    """
    num_columns = len(spans)
    first_byte = np.uint8(delimiter & U(255))
    column = 0
    while True:
        doubled = False
        quoted = quoting and at < end and load8(at) == _QUOTE
        if quoted:
            opened, opened_line = at, line
            start = at + U(1)
            at, line, doubled = _find_closing_quote(start, end, line)
            if at >= end or (at + U(1) == end and not final):
                if not final:
                    return _INCOMPLETE, at, line
                if at >= end:
                    return -UNCLOSED_QUOTE, min(_find(opened, end, _LF) + U(1), end), opened_line + 1
            stop = at
            at += U(1)
        else:
            start = at
            at = _find_either(at, end, first_byte, _LF)
            while (
                delimiter_size > U(1)
                and at < end
                and load8(at) != _LF
                and not (at + delimiter_size <= end and _matches(at, delimiter, delimiter_size))
            ):
                at = _find_either(at + U(1), end, first_byte, _LF)
            stop = at
        if column < num_columns:
            spans[column, 0] = start
            spans[column, 1] = stop
            spans[column, 2] = U(doubled)
        column += 1
        if at + delimiter_size <= end and _matches(at, delimiter, delimiter_size):
            at += delimiter_size
            continue
        # What follows a closing quote may be the first bytes of a delimiter that the buffer cuts off.
        if not final and (at >= end or (quoted and at + delimiter_size > end)):
            return _INCOMPLETE, at, line
        if quoted and at < end and load8(at) == _CR:
            if at + U(1) == end and not final:
                return _INCOMPLETE, at, line
            at += U(1)
        elif not quoted and stop > start and load8(stop - U(1)) == _CR and column <= num_columns:
            spans[column - 1, 1] = stop - U(1)
        if at < end and load8(at) != _LF:
            at = _find(at, end, _LF)
            if at >= end and not final:
                return _INCOMPLETE, at, line
            return -TEXT_AFTER_QUOTE, min(at + U(1), end), line + 1
        return column, min(at + U(1), end), line + 1


@kernel
def _find_closing_quote(at, end, line):
    """(where the quoted text ends or ``end``, the line there, whether it holds doubled quotes)."""
    doubled = False
    while at < end:
        byte = load8(at)
        if byte == _QUOTE:
            if at + U(1) >= end or load8(at + U(1)) != _QUOTE:
                break
            doubled = True
            at += U(1)
        elif byte == _LF:
            line += 1
        at += U(1)
    return at, line, doubled


@kernel
def _undouble_quotes(start, stop):
    """Write the text without doubling to the same place; returns its new end."""
    to = start
    at = start
    while at < stop:
        byte = load8(at)
        store8(to, byte)
        at += U(2) if byte == _QUOTE else U(1)
        to += U(1)
    return to


@kernel
def _pass_blank_lines(at, end, line):
    while at < end:
        next_at = _pass_blank_line(at, end)
        if next_at == at:
            break
        at = next_at
        line += 1
    return at, line


@kernel
def _pass_blank_line(at, end):
    """Where the line after a blank one begins; ``at``, if the line is not blank."""
    if load8(at) == _LF:
        return at + U(1)
    if load8(at) == _CR and at + U(1) < end and load8(at + U(1)) == _LF:
        return at + U(2)
    return at


@kernel
def _matches(at, word, size):
    return load64(at) & (_ALL_BITS >> (U(64) - U(8) * size)) == word


@kernel
def _find(at, end, byte):
    while at < end and load8(at) != byte:
        at += U(1)
    return at


@kernel
def _find_either(at, end, first, second):
    """The address of the first byte that is one of two, or ``end``; eight bytes at a time."""
    first_everywhere, second_everywhere = U(first) * _ONES, U(second) * _ONES
    while at < end:
        word = load64(at)
        a, b = word ^ first_everywhere, word ^ second_everywhere
        # High bits mark the zero bytes of a and b; the lowest mark is always true.
        found = ((a - _ONES) & ~a | (b - _ONES) & ~b) & _HIGH_BITS
        if found != U(0):
            below = (((found & (~found + U(1))) >> U(7)) - U(1)) & _ONES
            return min(at + ((below * _ONES) >> U(56)), end)
        at += U(8)
    return end
