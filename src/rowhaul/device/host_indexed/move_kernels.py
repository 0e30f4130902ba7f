"""Triton kernels of moves: records and gradients to and from the messages of a phase."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.row_kernels import rows_at


@triton.jit
def gather(
    records, has_state, offsets, value_chunks, values, state_chunks, states, out, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the values of records, and the state of those that have it sent, to their offsets in ``out``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = tl.load(records + at, mask=inside, other=0)
    target = out + tl.load(offsets + at, mask=inside, other=0)
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    row = rows_at(value_chunks, values, record, SHIFT, DIM)
    tl.store(target[:, None] + column[None, :], tl.load(row[:, None] + column[None, :], mask=mask), mask=mask)
    if STATE > 0:
        whole = tl.load(has_state + at, mask=inside, other=0) != 0
        column = tl.arange(0, STATE_COLUMNS)
        mask = whole[:, None] & (column < STATE)[None, :]
        row = rows_at(state_chunks, states, record, SHIFT, STATE)
        state = tl.load(row[:, None] + column[None, :], mask=mask)
        tl.store(target[:, None] + DIM + column[None, :], state, mask=mask)


@triton.jit
def scatter(
    records, has_state, offsets, value_chunks, values, state_chunks, states, given, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the values of records, and the state of those that have it sent; records differ."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = tl.load(records + at, mask=inside, other=0)
    source = given + tl.load(offsets + at, mask=inside, other=0)
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    row = rows_at(value_chunks, values, record, SHIFT, DIM)
    tl.store(row[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=mask), mask=mask)
    if STATE > 0:
        whole = tl.load(has_state + at, mask=inside, other=0) != 0
        column = tl.arange(0, STATE_COLUMNS)
        mask = whole[:, None] & (column < STATE)[None, :]
        row = rows_at(state_chunks, states, record, SHIFT, STATE)
        state = tl.load(source[:, None] + DIM + column[None, :], mask=mask)
        tl.store(row[:, None] + column[None, :], state, mask=mask)
