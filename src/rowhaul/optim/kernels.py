"""Compiled steps of the row optimizers, over records that hold values and state side by side.

``gradients[i]`` is the whole gradient of record ``records[i]`` in this step; records differ.
Arithmetic is in the records' own precision and in a fixed order: the same bits wherever the step
is taken. Scalars come as an array of that precision, ``settings``, so a kernel never widens.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, prefetch_to_write, record_address

_RECORDS_AHEAD = 8
_CACHE_LINE = 64


@register_jitable
def _record(addresses, shift, width, records, i, gradients):
    """The record to step now; asks for the one that comes a little later."""
    record_bytes = width * gradients.itemsize
    soon = record_address(addresses, shift, record_bytes, records[min(i + _RECORDS_AHEAD, len(records) - 1)])
    for offset in range(0, record_bytes, _CACHE_LINE):
        prefetch_to_write(soon + offset)
    address = record_address(addresses, shift, record_bytes, records[i])
    return memory_at(address, width, gradients.dtype)


@kernel
def sgd_step(addresses, shift, width, records, gradients, settings):
    """settings: rate, weight decay."""
    rate, decay = settings[0], settings[1]
    for i in range(len(records)):
        row = _record(addresses, shift, width, records, i, gradients)
        for k in range(gradients.shape[1]):
            row[k] -= rate * (gradients[i, k] + decay * row[k])


@kernel
def adagrad_step(addresses, shift, width, records, gradients, settings):
    """settings: rate, weight decay, eps. State: a sum of squares for each value."""
    rate, decay, eps = settings[0], settings[1], settings[2]
    dim = gradients.shape[1]
    for i in range(len(records)):
        row = _record(addresses, shift, width, records, i, gradients)
        for k in range(dim):
            gradient = gradients[i, k] + decay * row[k]
            squares = row[dim + k] + gradient * gradient
            row[dim + k] = squares
            row[k] -= rate * gradient / (np.sqrt(squares) + eps)


@kernel
def rowwise_adagrad_step(addresses, shift, width, records, gradients, settings):
    """settings: rate, weight decay, eps. State: one sum of mean squares for the row."""
    rate, decay, eps = settings[0], settings[1], settings[2]
    zero = gradients.dtype.type(0)
    dim = gradients.shape[1]
    for i in range(len(records)):
        row = _record(addresses, shift, width, records, i, gradients)
        # Four running sums, joined in a fixed order: faster than one chain and still deterministic.
        sums = (zero, zero, zero, zero)
        whole = dim - dim % 4
        for k in range(0, whole, 4):
            a = gradients[i, k] + decay * row[k]
            b = gradients[i, k + 1] + decay * row[k + 1]
            c = gradients[i, k + 2] + decay * row[k + 2]
            d = gradients[i, k + 3] + decay * row[k + 3]
            sums = (sums[0] + a * a, sums[1] + b * b, sums[2] + c * c, sums[3] + d * d)
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        for k in range(whole, dim):
            a = gradients[i, k] + decay * row[k]
            total += a * a
        row[dim] += total / gradients.dtype.type(dim)
        scale = rate / (np.sqrt(row[dim]) + eps)
        for k in range(dim):
            row[k] -= scale * (gradients[i, k] + decay * row[k])


@kernel
def adam_step(addresses, shift, width, records, gradients, settings):
    """settings: rate with both bias corrections, weight decay, eps, beta1, beta2. State: two moments."""
    rate, decay, eps, beta1, beta2 = settings[0], settings[1], settings[2], settings[3], settings[4]
    one = gradients.dtype.type(1)
    dim = gradients.shape[1]
    for i in range(len(records)):
        row = _record(addresses, shift, width, records, i, gradients)
        for k in range(dim):
            gradient = gradients[i, k] + decay * row[k]
            mean = beta1 * row[dim + k] + (one - beta1) * gradient
            square = beta2 * row[2 * dim + k] + (one - beta2) * gradient * gradient
            row[dim + k] = mean
            row[2 * dim + k] = square
            row[k] -= rate * mean / (np.sqrt(square) + eps)
