"""The compiled loops of `rowhaul.serve.shared_dots`: a DLRM from its vectors to logits.

Some dozens of samples at a time go through all layers, so that what is between layers stays in the cache.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._dots import SPARE, padded, place_vectors, write_dots
from rowhaul._kernels import kernel
from rowhaul._linear_layers import apply_layer, apply_layers
from rowhaul._memory import data_address, keep_alive
from rowhaul._vectors import copy_row, load_one

_BLOCK = 32  # samples at a time
_SIZE = 4  # bytes of a number


@register_jitable
def _pass_first(vectors, count, target):
    """Copy the first numbers of vectors as they are; returns where they end."""
    copy_row(target, vectors, count * _SIZE)
    return target + count * _SIZE


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
        width: numbers that a row of any layer takes.
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
    rows = np.zeros((num_shared + num_own + SPARE, padded(dim, 4)), np.float32)
    room = np.empty((2, len(rows)), np.float32)
    place_vectors(rows, data_address(shared), num_shared, dim)
    passed = _pass_first(data_address(shared), shared_numbers * dim, here)
    write_dots(rows, 0, num_shared, room, passed)
    apply_layer(first_shared, 1, stride, here, there)
    bias, first_layer = rooms[1, 0].copy(), first.copy()
    first_layer[1] = data_address(bias)
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
            place_vectors(rows[num_shared:], sample, num_own, dim)
            passed = _pass_first(sample, own_numbers * dim, here + i * stride)
            write_dots(rows, num_shared, len(rows) - SPARE, room, passed)
        apply_layer(first_layer, count, stride, here, there)
        logits = apply_layers(after, count, stride, there, here)
        for i in range(count):
            out[begin + i] = load_one(logits + i * stride, np.float32(0))
    keep_alive(rooms)
    keep_alive(bias)
