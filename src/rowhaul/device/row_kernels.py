"""Triton kernels over rows: first values, copies, pooling, gradients of weights.

Records are in chunks of ``2**SHIFT``, whose addresses are in an array, so memory grows without copies. Values
and optimizer state have chunks of their own, which keeps rows aligned. A record ``-1 - k`` is row ``k`` of a
spare array: one that is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import mix


@triton.jit
def rows_at(chunks, base, records, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the first element of records; ``chunks`` are distances from ``base`` in elements."""
    # Chunks are aligned; said so, rows are loaded in words of 16 bytes.
    chunk = tl.multiple_of(tl.load(chunks + (records >> SHIFT)), 16)
    return base + (chunk + (records & ((1 << SHIFT) - 1)).to(tl.int64) * WIDTH)


@triton.jit
def copy_out(
    record, there, to, value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Copy values, then state, of records to where pointers say."""
    _copy(rows_at(value_chunks, values, record, SHIFT, DIM), to, there, DIM, COLUMNS)
    if STATE > 0:
        _copy(rows_at(state_chunks, states, record, SHIFT, STATE), to + DIM, there, STATE, STATE_COLUMNS)


@triton.jit
def copy_in(
    record, there, source, value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The way back: set records to what pointers say."""
    _copy(source, rows_at(value_chunks, values, record, SHIFT, DIM), there, DIM, COLUMNS)
    if STATE > 0:
        _copy(source + DIM, rows_at(state_chunks, states, record, SHIFT, STATE), there, STATE, STATE_COLUMNS)


@triton.jit
def _copy(source, to, there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy ``WIDTH`` elements of each row from where pointers say to where others do."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    value = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(to[:, None] + column[None, :], value, mask=mask)


@triton.jit
def _rows_or_spare(
    chunks, base, spare, records, SHIFT: tl.constexpr, DIM: tl.constexpr, HAS_SPARE: tl.constexpr
):
    if HAS_SPARE:
        stored = rows_at(chunks, base, tl.where(records >= 0, records, 0), SHIFT, DIM)
        rows = tl.where(records >= 0, stored, spare + (-1 - records).to(tl.int64) * DIM)
    else:
        rows = rows_at(chunks, base, records, SHIFT, DIM)
    return rows


@triton.jit
def write_initial(
    keys, tables, records, new, num_new, seeds, lows, steps, value_chunks, values, state_chunks, states,
    first_state,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make the records of the ids that are listed as new: the bits that `rowhaul.store.records` makes."""
    count = tl.load(num_new).to(tl.int32)
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        number = block + tl.arange(0, BLOCK)
        inside = number < count
        at = tl.load(new + number, mask=inside, other=0)
        key = tl.load(keys + at, mask=inside, other=0).to(tl.uint64)
        table = tl.load(tables + at, mask=inside, other=0)
        record = tl.load(records + at, mask=inside, other=0)
        row_seed = mix(key ^ tl.load(seeds + table, mask=inside, other=0).to(tl.uint64))
        column = tl.arange(0, COLUMNS)
        pair = (column // 2 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        draw = mix(row_seed[:, None] + pair[None, :])
        drawn = tl.where((column % 2 == 0)[None, :], draw >> 40, (draw >> 8) & 0xFFFFFF)
        low = tl.load(lows + table, mask=inside, other=0.0)
        step = tl.load(steps + table, mask=inside, other=0.0)
        value = low[:, None] + step[:, None] * drawn.to(tl.float64)
        row = rows_at(value_chunks, values, record, SHIFT, DIM)[:, None] + column[None, :]
        tl.store(row, value.to(values.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])
        if STATE > 0:
            column = tl.arange(0, STATE_COLUMNS)
            row = rows_at(state_chunks, states, record, SHIFT, STATE)[:, None] + column[None, :]
            begin = tl.zeros((BLOCK, STATE_COLUMNS), tl.float64) + tl.load(first_state)
            mask = inside[:, None] & (column < STATE)[None, :]
            tl.store(row, begin.to(states.dtype.element_ty), mask=mask)


@triton.jit
def pool(
    records, offsets, weights, chunks, values, spare, columns, is_mean, out, num_bags, num_samples, stride,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, ONE_EACH: tl.constexpr,
    WEIGHTED: tl.constexpr, HAS_SPARE: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Write the sum or mean of the rows of each bag to its sample's columns."""
    element: tl.constexpr = out.dtype.element_ty
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = bag < num_bags
    column = tl.arange(0, COLUMNS)
    in_row = (column < DIM)[None, :]
    if ONE_EACH:
        first = bag
        length = tl.where(inside, 1, 0)
    else:
        first = tl.load(offsets + bag, mask=inside, other=0)
        length = tl.load(offsets + bag + 1, mask=inside, other=0) - first
    total = tl.zeros((BAGS, COLUMNS), element)
    for k in range(0, tl.max(length, axis=0)):
        there = inside & (k < length)
        record = tl.load(records + first + k, mask=there, other=0)
        row = _rows_or_spare(chunks, values, spare, record, SHIFT, DIM, HAS_SPARE)
        one = tl.load(row[:, None] + column[None, :], mask=there[:, None] & in_row, other=0.0)
        if WEIGHTED:
            one = one * tl.load(weights + first + k, mask=there, other=0.0)[:, None]
        total += one
    feature = bag // num_samples
    if not ONE_EACH:
        mean = tl.load(is_mean + feature, mask=inside, other=0) != 0
        total = total / tl.where(mean & (length > 0), length, 1).to(element)[:, None]
    start = (bag % num_samples).to(tl.int64) * stride + tl.load(columns + feature, mask=inside, other=0)
    tl.store(out + start[:, None] + column[None, :], total, mask=inside[:, None] & in_row)


@triton.jit
def weight_gradients(
    records, bags, offsets, chunks, values, spare, columns, is_mean, gradients, out, count, num_samples,
    stride,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, ONE_EACH: tl.constexpr,
    HAS_SPARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each id's weight: its row times the gradient of its bag."""
    element: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    bag = at if ONE_EACH else tl.load(bags + at, mask=inside, other=0)
    feature = bag // num_samples
    record = tl.load(records + at, mask=inside, other=0)
    row = _rows_or_spare(chunks, values, spare, record, SHIFT, DIM, HAS_SPARE)
    one = tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)
    start = (bag % num_samples).to(tl.int64) * stride + tl.load(columns + feature, mask=inside, other=0)
    gradient = tl.load(gradients + start[:, None] + column[None, :], mask=mask, other=0.0)
    found = tl.sum(one * gradient, axis=1)
    if not ONE_EACH:
        length = tl.load(offsets + bag + 1, mask=inside, other=1) - tl.load(
            offsets + bag, mask=inside, other=0
        )
        mean = tl.load(is_mean + feature, mask=inside, other=0) != 0
        found = found / tl.where(mean, length, 1).to(element)
    tl.store(out + at, found, mask=inside)
