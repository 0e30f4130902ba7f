"""The compiled loop of `rowhaul.serve.shared_dots`: dot products of the vectors of many samples.

Vectors are turned on their side first, so that four products are summed at a time, each in a lane of its own.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address
from rowhaul._vectors import copy_row, four_times, load_four, load_one, multiply_add, size_of, store_four

SPARE = 3  # numbers that may be written after the last row


@register_jitable
def _four_dots(vector, turned, stride, dim, zero):
    """The products of a vector with four that lie side by side from ``turned`` on."""
    size, sums = size_of(zero), four_times(zero)
    for k in range(dim):
        value = four_times(load_one(vector + k * size, zero))
        sums = multiply_add(value, load_four(turned + k * stride, zero), sums)
    return sums


@register_jitable
def _sixteen_dots(target, vector, turned, stride, dim, zero):
    """Write the products with sixteen: a value is loaded once for four sums, none of which waits."""
    size = size_of(zero)
    four = 4 * size
    first, second, third, fourth = four_times(zero), four_times(zero), four_times(zero), four_times(zero)
    for k in range(dim):
        value, at = four_times(load_one(vector + k * size, zero)), turned + k * stride
        first = multiply_add(value, load_four(at, zero), first)
        second = multiply_add(value, load_four(at + four, zero), second)
        third = multiply_add(value, load_four(at + 2 * four, zero), third)
        fourth = multiply_add(value, load_four(at + 3 * four, zero), fourth)
    store_four(target, first)
    store_four(target + four, second)
    store_four(target + 2 * four, third)
    store_four(target + 3 * four, fourth)


@kernel
def fill_dots(own, shared, dim, num_passed, out):
    """Fill ``out`` with a row for each sample.

    A row has the first ``num_passed`` values of the sample's own vectors as they are; then for each of its
    vectors the products with all shared ones, and with the sample's vectors before it. Up to `SPARE` numbers
    after the last row are written, too.
    """
    zero = own.dtype.type(0)
    size = size_of(zero)
    num_own, num_shared = own.shape[1] // dim, len(shared) // dim
    width = (num_shared + num_own + 3) // 4 * 4
    turned = np.zeros(dim * width, own.dtype)
    for one in range(num_shared):
        for k in range(dim):
            turned[k * width + one] = shared[one * dim + k]
    turned_at, stride = data_address(turned), width * size
    target = data_address(out)
    for sample in range(len(own)):
        vectors = data_address(own) + sample * own.shape[1] * size
        for one in range(num_own):
            for k in range(dim):
                turned[k * width + num_shared + one] = load_one(vectors + (one * dim + k) * size, zero)
        copy_row(target, vectors, num_passed * size)
        target += num_passed * size
        for one in range(num_own):
            count, vector, at = num_shared + one, vectors + one * dim * size, 0
            while at + 16 <= count:
                _sixteen_dots(target + at * size, vector, turned_at + at * size, stride, dim, zero)
                at += 16
            while at < count:
                store_four(target + at * size, _four_dots(vector, turned_at + at * size, stride, dim, zero))
                at += 4
            target += count * size
