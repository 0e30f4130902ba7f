"""Triton kernels that copy whole records to and from rows that lie together."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.row_kernels import copy_in, copy_out


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
    to = out + at.to(tl.int64) * (DIM + STATE)
    copy_out(
        record, inside, to, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE, STATE_COLUMNS,
        SHIFT,
    )  # fmt: skip


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
    source = contents + at.to(tl.int64) * (DIM + STATE)
    copy_in(
        record, inside, source, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE,
        STATE_COLUMNS, SHIFT,
    )  # fmt: skip
