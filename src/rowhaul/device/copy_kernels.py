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
