"""Weighted sums of experts' outputs, and their gradients, inside kernels.

Sums are made in one order for every sample, so its results do not depend on the others of its batch.
"""

from __future__ import annotations

from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._vectors import (
    add_row,
    clear_row,
    four_times,
    joined,
    load_four,
    load_one,
    multiply_add,
    size_of,
)


@register_jitable
def _dot(first, second, num_values, zero):
    """The dot product of two rows, by address."""
    size, a, b, c, d = size_of(zero), four_times(zero), four_times(zero), four_times(zero), four_times(zero)
    whole = num_values - num_values % 16
    for k in range(0, whole, 16):
        at = k * size
        a = multiply_add(load_four(first + at, zero), load_four(second + at, zero), a)
        at += 4 * size
        b = multiply_add(load_four(first + at, zero), load_four(second + at, zero), b)
        at += 4 * size
        c = multiply_add(load_four(first + at, zero), load_four(second + at, zero), c)
        at += 4 * size
        d = multiply_add(load_four(first + at, zero), load_four(second + at, zero), d)
    total = joined((a + b) + (c + d))
    for k in range(whole, num_values):
        total += load_one(first + k * size, zero) * load_one(second + k * size, zero)
    return total


@kernel
def mix(begin, end, members, ends, weights, dim, experts, sums):
    """Write the sums of samples from ``begin`` to ``end``; experts and sums are addresses."""
    zero = weights.dtype.type(0)
    stride = dim * weights.itemsize
    for sample in range(begin, end):
        at = sample * stride
        for number in range(len(sums)):
            clear_row(sums[number] + at, dim, zero)
            for place in range(ends[number], ends[number + 1]):
                add_row(sums[number] + at, experts[members[place]] + at, dim, weights[sample, place])


@kernel
def unmix(of_weights, begin, end, members, ends, weights, dim, experts, sums, of_experts):
    """Write the gradients of experts and weights, from those of `mix`'s sums."""
    zero = weights.dtype.type(0)
    stride = dim * weights.itemsize
    for sample in range(begin, end):
        at = sample * stride
        for expert in range(len(of_experts)):
            clear_row(of_experts[expert] + at, dim, zero)
        for number in range(len(sums)):
            for place in range(ends[number], ends[number + 1]):
                expert = members[place]
                add_row(of_experts[expert] + at, sums[number] + at, dim, weights[sample, place])
                of_weights[sample, place] = _dot(experts[expert] + at, sums[number] + at, dim, zero)
