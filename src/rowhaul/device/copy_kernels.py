"""Triton kernels that copy whole records to and from rows that lie together, and note when rows are used."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.row_kernels import rows_at


@triton.jit(do_not_specialize=["count"])
def read_records(
    records, value_chunks, values, state_chunks, states, out, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write values, then state, of each record to its row of ``out``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = tl.load(records + at, mask=inside, other=0)
    begin = out + at.to(tl.int64) * (DIM + STATE)
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    row = rows_at(value_chunks, values, record, SHIFT, DIM)
    value = tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(begin[:, None] + column[None, :], value, mask=mask)
    if STATE > 0:
        column = tl.arange(0, STATE_COLUMNS)
        mask = inside[:, None] & (column < STATE)[None, :]
        row = rows_at(state_chunks, states, record, SHIFT, STATE)
        value = tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)
        tl.store(begin[:, None] + DIM + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def write_records(
    records, value_chunks, values, state_chunks, states, contents, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The way back: set each record to its row of ``contents``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = tl.load(records + at, mask=inside, other=0)
    begin = contents + at.to(tl.int64) * (DIM + STATE)
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    value = tl.load(begin[:, None] + column[None, :], mask=mask, other=0.0)
    row = rows_at(value_chunks, values, record, SHIFT, DIM)
    tl.store(row[:, None] + column[None, :], value, mask=mask)
    if STATE > 0:
        column = tl.arange(0, STATE_COLUMNS)
        mask = inside[:, None] & (column < STATE)[None, :]
        value = tl.load(begin[:, None] + DIM + column[None, :], mask=mask, other=0.0)
        row = rows_at(state_chunks, states, record, SHIFT, STATE)
        tl.store(row[:, None] + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["most"])
def list_rows(ids, num_ids, records, keys, tables, out, most, BLOCK: tl.constexpr):
    """Write how many ids are listed, then their records, keys and tables in three rows of ``most``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(num_ids)
    inside = at < count
    which = tl.load(ids + at, mask=inside, other=0)
    tl.store(out + at, tl.zeros((BLOCK,), tl.int64) + count, mask=at == 0)
    rows = out + 1 + at
    tl.store(rows, tl.load(records + which, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(rows + most, tl.load(keys + which, mask=inside, other=0), mask=inside)
    tl.store(rows + 2 * most, tl.load(tables + which, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["number"])
def mark_used(records, last_used, number, count, BLOCK: tl.constexpr):
    """Note the number of a batch for each record that it uses; -1 is none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    record = tl.load(records + at, mask=at < count, other=-1)
    tl.store(last_used + record, tl.zeros((BLOCK,), tl.int32) + number, mask=record >= 0)
