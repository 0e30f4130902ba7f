"""Compiled loops that put the columns of a request together, straight from where they lie in memory.

A column is a row of `FIELDS` numbers. What it points at must stay alive until a loop has ended.
"""

from __future__ import annotations

import math

import numpy as np
from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import load8, load64, memory_at

FIELDS = 5
"""Of a column: the address of its values; that of its validity bits, as in Arrow, or 0 where nothing is null;
the first one of those bits; of ids, the address of offsets, or 0 where each bag has one id, and of numbers,
their bytes; and how many bags or numbers there are."""


@register_jitable
def _is_null(bits_at, bit):
    return bits_at != 0 and (load8(uint64(bits_at + bit // 8)) >> (bit % 8)) & 1 == 0


@kernel
def join_ids(columns, ids, offsets, first_bags):
    """Fill ids, offsets and first bags as in `IdBags`; returns the number of ids."""
    bag, at = 0, 0
    for column in range(len(columns)):
        values_at, bits_at, first_bit, offsets_at, count = (
            columns[column, 0],
            columns[column, 1],
            columns[column, 2],
            columns[column, 3],
            columns[column, 4],
        )
        first_bags[column] = bag
        for i in range(count):
            begin, end = i, i + 1
            if offsets_at:
                begin = int64(load64(uint64(offsets_at + 8 * i)))
                end = int64(load64(uint64(offsets_at + 8 * i + 8)))
            elif _is_null(bits_at, first_bit + i):
                end = begin
            offsets[bag] = at
            for k in range(begin, end):
                ids[at] = int64(load64(uint64(values_at + 8 * k)))
                at += 1
            bag += 1
    first_bags[len(columns)] = bag
    offsets[bag] = at
    return at


@register_jitable
def _number(value, is_log):
    value = np.float32(value)
    return np.float32(math.log1p(max(value, np.float32(0)))) if is_log else value


@kernel
def fill_numbers(columns, are_logs, out):
    """Fill samples x numbers; returns the first column with a number that is not finite, or -1."""
    for column in range(len(columns)):
        values_at, bits_at, first_bit, count = (
            columns[column, 0],
            columns[column, 1],
            columns[column, 2],
            columns[column, 4],
        )
        singles = memory_at(values_at, count, np.float32)
        doubles = memory_at(values_at, count, np.float64)
        is_single = columns[column, 3] == 4
        for i in range(count):
            value = np.float32(0)
            if not _is_null(bits_at, first_bit + i):
                value = singles[i] if is_single else np.float32(doubles[i])
                if not math.isfinite(value):
                    return column
            out[i, column] = _number(value, are_logs[column])
        for i in range(count, len(out)):
            out[i, column] = out[0, column]
    return -1
