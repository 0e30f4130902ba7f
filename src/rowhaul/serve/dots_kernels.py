"""The compiled loops of `rowhaul.serve.shared_dots`: a DLRM from its vectors to logits.

Some dozens of samples at a time go through all layers, so that what is between layers stays in the cache.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._linear_layers import apply_layer, apply_layers
from rowhaul._memory import data_address, keep_alive
from rowhaul._vectors import copy_row, four_times, load_four, load_one, multiply_add, store_four

SPARE = 12  # numbers that may be written after a row of dot products
_BLOCK = 32  # samples at a time
_SIZE = 4  # bytes of a number


@register_jitable
def _four_dots(target, vector, turned, stride, dim):
    """Write the products of a vector with four others, which lie side by side from ``turned`` on."""
    zero = np.float32(0)
    sums = four_times(zero)
    for k in range(dim):
        value = four_times(load_one(vector + k * _SIZE, zero))
        sums = multiply_add(value, load_four(turned + k * stride, zero), sums)
    store_four(target, sums)


@register_jitable
def _sixteen_dots(target, vector, turned, stride, dim):
    """Write the products with sixteen: a value is loaded once for four sums, none of which waits."""
    zero = np.float32(0)
    first, second, third, fourth = four_times(zero), four_times(zero), four_times(zero), four_times(zero)
    for k in range(dim):
        value, at = four_times(load_one(vector + k * _SIZE, zero)), turned + k * stride
        first = multiply_add(value, load_four(at, zero), first)
        second = multiply_add(value, load_four(at + 16, zero), second)
        third = multiply_add(value, load_four(at + 32, zero), third)
        fourth = multiply_add(value, load_four(at + 48, zero), fourth)
    store_four(target, first)
    store_four(target + 16, second)
    store_four(target + 32, third)
    store_four(target + 48, fourth)


@register_jitable
def _turn(vectors, num_vectors, dim, turned, first):
    """Put vectors side by side, from column ``first`` on."""
    for one in range(num_vectors):
        for k in range(dim):
            turned[k, first + one] = load_one(vectors + (one * dim + k) * _SIZE, np.float32(0))


@register_jitable
def write_dots(vectors, num_vectors, num_shared, dim, passes, turned, target):
    """Write what the layers after the products read of one sample.

    First its first vector as it is, if it ``passes``; then for each vector the products with all shared ones,
    which are in ``turned`` already, and with the sample's vectors before it. Up to `SPARE` numbers after
    those are written, too.
    """
    _turn(vectors, num_vectors, dim, turned, num_shared)
    turned_at, stride = data_address(turned), turned.shape[1] * _SIZE
    if passes:
        copy_row(target, vectors, dim * _SIZE)
        target += dim * _SIZE
    for one in range(num_vectors):
        vector, count, at = vectors + one * dim * _SIZE, num_shared + one, 0
        while at < count:
            if count - at > 4:
                _sixteen_dots(target + at * _SIZE, vector, turned_at + at * _SIZE, stride, dim)
                at += 16
            else:
                _four_dots(target + at * _SIZE, vector, turned_at + at * _SIZE, stride, dim)
                at += 4
        target += count * _SIZE


@register_jitable
def _room_to_turn(num_vectors, dim):
    return np.zeros((dim, num_vectors // 16 * 16 + 16), np.float32)


@kernel
def score_dots(numbers, own, shared, dim, before, first, first_shared, after, width, out):
    """Fill ``out`` with a logit for each sample.

    Args:
        numbers: samples x numbers, or one row where all samples share them.
        own: samples x their vectors; room for that of the numbers comes first, where samples have their own.
        shared: the vectors that all samples share; likewise.
        dim: of a vector.
        before: layers from numbers to their vector; none where there are no numbers.
        first: the layer after the products, from what samples have for themselves ...
        first_shared: ... and from what they share, without ReLU.
        after: the layers that follow.
        width: numbers that a row of any layer takes, with `SPARE`.
    """
    stride, num_own, num_shared = width * _SIZE, own.shape[1] // dim, len(shared) // dim
    rooms = np.zeros((2, _BLOCK, width), np.float32)
    here, there = data_address(rooms), data_address(rooms) + _BLOCK * stride
    has_numbers = len(before) > 0
    has_own_numbers = has_numbers and len(numbers) == len(out)
    if has_numbers and not has_own_numbers:
        rooms[0, 0, : numbers.shape[1]] = numbers[0]
        vector = apply_layers(before, 1, stride, here, there)
        copy_row(data_address(shared), vector, dim * _SIZE)
    own_numbers, shared_numbers = has_own_numbers, has_numbers and not has_own_numbers
    turned = _room_to_turn(num_shared, dim)
    write_dots(data_address(shared), num_shared, 0, dim, shared_numbers, turned, here)
    apply_layer(first_shared, 1, stride, here, there)
    bias, first_layer = rooms[1, 0].copy(), first.copy()
    first_layer[1] = data_address(bias)
    turned = _room_to_turn(num_shared + num_own, dim)
    _turn(data_address(shared), num_shared, dim, turned, 0)
    for begin in range(0, len(out), _BLOCK):
        count, vectors = min(_BLOCK, len(out) - begin), data_address(own) + begin * own.shape[1] * _SIZE
        if own_numbers:
            for i in range(count):
                rooms[0, i, : numbers.shape[1]] = numbers[begin + i]
            vector = apply_layers(before, count, stride, here, there)
            for i in range(count):
                copy_row(vectors + i * own.shape[1] * _SIZE, vector + i * stride, dim * _SIZE)
        for i in range(count):
            sample = vectors + i * own.shape[1] * _SIZE
            write_dots(sample, num_own, num_shared, dim, own_numbers, turned, here + i * stride)
        apply_layer(first_layer, count, stride, here, there)
        logits = apply_layers(after, count, stride, there, here)
        for i in range(count):
            out[begin + i] = load_one(logits + i * stride, np.float32(0))
    keep_alive(rooms)
    keep_alive(bias)
