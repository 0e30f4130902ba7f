"""Triton kernels of dense layers: what PyTorch does in several passes over the activations, in one."""

from __future__ import annotations

import triton
import triton.language as tl

PAD = tl.constexpr(4)  # columns that rows of dot products are rounded up to: libraries multiply those faster


@triton.jit
def _vectors_at(
    first, others, sample, first_stride, other_stride, num_vectors,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Pointers to the vectors of a sample, and which of them are there; the first may be elsewhere."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = others + sample * other_stride + row * DIM + column
    if HAS_FIRST:
        at = tl.where(row == 0, first + sample * first_stride + column, at - DIM)
    return at, (row < num_vectors) & (column < DIM)


@triton.jit
def join_dots(
    first, others, out, first_stride, other_stride, width, num_vectors,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a sample's first vector and the dot products of every two: the lower triangle, row by row."""
    sample = tl.program_id(0).to(tl.int64)
    at, there = _vectors_at(
        first, others, sample, first_stride, other_stride, num_vectors, DIM, COLUMNS, ROWS, HAS_FIRST
    )
    vectors = tl.load(at, mask=there, other=0.0)
    products = tl.dot(vectors, tl.trans(vectors), input_precision=PRECISION, out_dtype=vectors.dtype)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    begin = out + sample * width
    if HAS_FIRST:
        here = tl.arange(0, COLUMNS)
        one = tl.load(first + sample * first_stride + here, mask=here < DIM, other=0.0)
        tl.store(begin + here, one, mask=here < DIM)
        begin += DIM
    tl.store(begin + row * (row - 1) // 2 + column, products, mask=(column < row) & (row < num_vectors))
    behind = num_vectors * (num_vectors - 1) // 2 + tl.arange(0, PAD)
    room = width - DIM if HAS_FIRST else width
    tl.store(begin + behind, tl.zeros((PAD,), vectors.dtype), mask=behind < room)


@triton.jit
def join_dots_backward(
    first, others, gradients, first_gradients, other_gradients, first_stride, other_stride, width,
    num_vectors,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The products are symmetric, so the mirrored gradient times the vectors is theirs."""
    sample = tl.program_id(0).to(tl.int64)
    at, there = _vectors_at(
        first, others, sample, first_stride, other_stride, num_vectors, DIM, COLUMNS, ROWS, HAS_FIRST
    )
    vectors = tl.load(at, mask=there, other=0.0)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    high, low = tl.maximum(row, column), tl.minimum(row, column)
    begin = gradients + sample * width
    pairs = begin + DIM if HAS_FIRST else begin
    mask = (row != column) & (high < num_vectors)
    mirrored = tl.load(pairs + high * (high - 1) // 2 + low, mask=mask, other=0.0)
    found = tl.dot(mirrored, vectors, input_precision=PRECISION, out_dtype=vectors.dtype)
    if HAS_FIRST:
        here = tl.arange(0, COLUMNS)[None, :]
        found += tl.load(begin + here + row * 0, mask=(row == 0) & (here < DIM), other=0.0)
    to, there = _vectors_at(
        first_gradients, other_gradients, sample, DIM, other_stride, num_vectors, DIM, COLUMNS, ROWS,
        HAS_FIRST,
    )  # fmt: skip
    tl.store(to, found, mask=there)


@triton.jit
def _in_two(x):
    """Part numbers of float32 into what TF32 holds, rounded, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def split(
    numbers, out, num_rows, width, out_width, row_stride, part_stride,
    HIGH_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a matrix in three parts: high, low, high, or low, high, high; zeros follow to ``out_width``.

    The products of parts in one order with those in the other, added up, are the product but for low by low.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < num_rows) & (column < width)
    high, low = _in_two(tl.load(numbers + row.to(tl.int64) * width + column, mask=there, other=0.0))
    to = out + row.to(tl.int64) * row_stride + column
    mask = (row < num_rows) & (column < out_width)
    if HIGH_FIRST:
        tl.store(to, high, mask=mask)
        tl.store(to + part_stride, low, mask=mask)
    else:
        tl.store(to, low, mask=mask)
        tl.store(to + part_stride, high, mask=mask)
    tl.store(to + 2 * part_stride, high, mask=mask)


@triton.jit
def relu_backward(
    outputs, gradients, found, partial, num_rows, width,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Pass gradients on where an output is positive; and sum them over some rows, in a fixed order.

    With ``SPLITS`` they are written in three parts: see `split`.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    summed = tl.zeros((ROWS, COLUMNS), gradients.dtype.element_ty)
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * width + column
        mask = (row < num_rows) & (column < width)
        output = tl.load(outputs + at, mask=mask, other=0.0)
        one = tl.where(output > 0, tl.load(gradients + at, mask=mask, other=0.0), 0.0)
        if SPLITS:
            high, low = _in_two(one)
            to = found + row.to(tl.int64) * (3 * width) + column
            tl.store(to, low, mask=mask)
            tl.store(to + width, high, mask=mask)
            tl.store(to + 2 * width, high, mask=mask)
        else:
            tl.store(found + at, one, mask=mask)
        summed += one
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(summed, axis=0), mask=column < width)
