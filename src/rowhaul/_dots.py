"""Dot products of every two of a sample's vectors, and their gradients, inside kernels.

Matrices of some dozens of rows are too small for libraries: they take longer to call a product than to make
it, and make the whole square where a triangle is needed. Sums are made in one order for every sample, so its
results do not depend on the others of its batch.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, keep_alive
from rowhaul._vectors import (
    copy_row,
    four_times,
    joined_each,
    lane_sixteen_times,
    load_four,
    load_one,
    load_sixteen,
    multiply_add,
    sixteen_times,
    size_of,
    store_lanes,
)

SPARE = 4  # rows, and columns of products, that steps of four read and write after the last
_COLUMNS = 16  # of gradients at a time


@register_jitable
def padded(dim, lanes):
    """Round a dimension up to whole steps."""
    return (dim + lanes - 1) // lanes * lanes


@register_jitable
def place_vectors(rows, vectors, count, dim):
    """Copy vectors that lie one after the other, by address, to rows of an array, from ``rows`` on."""
    size = rows.itemsize
    stride, at = rows.shape[1] * size, data_address(rows)
    if stride == dim * size:
        copy_row(at, vectors, count * dim * size)
        return
    for number in range(count):
        copy_row(at + number * stride, vectors + number * dim * size, dim * size)


@register_jitable
def _two_by_four(target, other_target, row, four, stride, zero):
    """Write the products of two rows, one after the other, with four."""
    a0, a1, a2, a3 = four_times(zero), four_times(zero), four_times(zero), four_times(zero)
    b0, b1, b2, b3 = four_times(zero), four_times(zero), four_times(zero), four_times(zero)
    for at in range(0, stride, 4 * size_of(zero)):
        a, b = load_four(row + at, zero), load_four(row + stride + at, zero)
        values = load_four(four + at, zero)
        a0, b0 = multiply_add(a, values, a0), multiply_add(b, values, b0)
        values = load_four(four + stride + at, zero)
        a1, b1 = multiply_add(a, values, a1), multiply_add(b, values, b1)
        values = load_four(four + 2 * stride + at, zero)
        a2, b2 = multiply_add(a, values, a2), multiply_add(b, values, b2)
        values = load_four(four + 3 * stride + at, zero)
        a3, b3 = multiply_add(a, values, a3), multiply_add(b, values, b3)
    store_lanes(target, joined_each(a0, a1, a2, a3))
    store_lanes(other_target, joined_each(b0, b1, b2, b3))


@register_jitable
def write_dots(rows, first, end, room, target):
    """Write the products of each row from ``first`` to ``end`` with all before it, one after the other.

    Args:
        rows: with zeros up to whole steps of four columns, and `SPARE` rows after the last.
        first: row.
        end: the row after the last.
        room: two rows for as many products, and `SPARE`.
        target: an address.
    """
    zero = rows.dtype.type(0)
    size = size_of(zero)
    stride, at = rows.shape[1] * size, data_address(rows)
    products, other_products = data_address(room), data_address(room) + room.shape[1] * size
    for row in range(max(first, 1), end, 2):
        for four in range(0, row + 1, 4):
            _two_by_four(
                products + four * size, other_products + four * size, at + row * stride, at + four * stride,
                stride, zero,
            )  # fmt: skip
        copy_row(target, products, row * size)
        target += row * size
        if row + 1 < end:
            copy_row(target, other_products, (row + 1) * size)
            target += (row + 1) * size


@kernel
def join_dots(first, others, dim, out):
    """Fill a row of ``out`` for each sample: its first vector and the products of every two of its vectors.

    Args:
        first: samples x dim; without columns: there is none, and its columns in ``out`` are not there.
        others: the other vectors of each sample, side by side.
        dim: of a vector.
        out: samples x (columns of ``first`` and pairs).
    """
    size, num_first, num_others = others.itemsize, first.shape[1] // dim, others.shape[1] // dim
    num_vectors = num_first + num_others
    rows = np.zeros((num_vectors + SPARE, padded(dim, 4)), others.dtype)
    room = np.empty((2, num_vectors + SPARE), others.dtype)
    for sample in range(len(out)):
        target = data_address(out) + sample * out.shape[1] * size
        if num_first:
            source = data_address(first) + sample * dim * size
            copy_row(target, source, dim * size)
            place_vectors(rows, source, 1, dim)
            target += dim * size
        source = data_address(others) + sample * others.shape[1] * size
        place_vectors(rows[num_first:], source, num_others, dim)
        write_dots(rows, 0, num_vectors, room, target)


@register_jitable
def _mirror(gradients, square, num_vectors):
    """Spread the gradients of a sample's products, by address, over both halves of a square."""
    size = square.itemsize
    at, stride = data_address(square), square.shape[1] * size
    for row in range(1, num_vectors):
        copy_row(at + row * stride, gradients, row * size)
        for column in range(row):
            square[column, row] = load_one(gradients + column * size, square.dtype.type(0))
        gradients += row * size


@register_jitable
def _four_by_sixteen(target, factors, factor_stride, rows, stride, num_rows, zero):
    """Write four sums of rows, sixteen columns of each; the factors of a row lie side by side."""
    a, b, c, d = sixteen_times(zero), sixteen_times(zero), sixteen_times(zero), sixteen_times(zero)
    for row in range(num_rows):
        four, values = load_four(factors + row * factor_stride, zero), load_sixteen(rows + row * stride, zero)
        a = multiply_add(lane_sixteen_times(four, 0), values, a)
        b = multiply_add(lane_sixteen_times(four, 1), values, b)
        c = multiply_add(lane_sixteen_times(four, 2), values, c)
        d = multiply_add(lane_sixteen_times(four, 3), values, d)
    store_lanes(target, a)
    store_lanes(target + stride, b)
    store_lanes(target + 2 * stride, c)
    store_lanes(target + 3 * stride, d)


@kernel
def part_gradients(gradients, first, others, dim, first_gradients, other_gradients):
    """Fill in the gradients of the vectors that `join_dots` was given, from those of what it wrote."""
    zero, size = others.dtype.type(0), others.itemsize
    num_first, num_others = first.shape[1] // dim, others.shape[1] // dim
    num_vectors = num_first + num_others
    rows = np.zeros((num_vectors, padded(dim, _COLUMNS)), others.dtype)
    sums = np.empty((num_vectors + SPARE, rows.shape[1]), others.dtype)
    square = np.zeros((num_vectors, num_vectors + SPARE), others.dtype)  # the diagonal stays zero
    stride, factor_stride = rows.shape[1] * size, square.shape[1] * size
    rows_at, sums_at, factors_at = data_address(rows), data_address(sums), data_address(square)
    for sample in range(len(gradients)):
        if num_first:
            place_vectors(rows, data_address(first) + sample * dim * size, 1, dim)
        source = data_address(others) + sample * others.shape[1] * size
        place_vectors(rows[num_first:], source, num_others, dim)
        received = data_address(gradients) + sample * gradients.shape[1] * size
        _mirror(received + num_first * dim * size, square, num_vectors)
        for row in range(0, num_vectors, 4):
            for column in range(0, dim, _COLUMNS):
                _four_by_sixteen(
                    sums_at + row * stride + column * size, factors_at + row * size, factor_stride,
                    rows_at + column * size, stride, num_vectors, zero,
                )  # fmt: skip
        if num_first:
            for column in range(dim):
                first_gradients[sample, column] = sums[0, column] + load_one(received + column * size, zero)
        target = data_address(other_gradients) + sample * others.shape[1] * size
        for number in range(num_others):
            source = sums_at + (num_first + number) * stride
            copy_row(target + number * dim * size, source, dim * size)
    keep_alive(rows)
    keep_alive(sums)
    keep_alive(square)
