"""Compiled loops of `rowhaul.serve.request_forms`: dot products of a request's vectors, and small passes."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel

_BLOCK = 16  # samples at a time: neighbours in memory, so that one instruction serves several


@kernel
def candidate_dots(first, pooled, is_shared, out):
    """Fill ``out`` with the inputs of DLRM's top that differ between candidates.

    A sample's vectors are ``first[i]``, where there is one, and then those of ``pooled[i]``. ``out[i]`` gets
    the first vector, then the products of every two, row by row of the lower triangle; what only shared
    vectors make is left out. Shared vectors are read from the first sample.
    """
    num_samples, num_vectors = len(out), len(is_shared)
    num_first = 1 if first.shape[1] else 0
    dim = pooled.shape[1] // (num_vectors - num_first)
    vectors = np.zeros((num_vectors, dim, _BLOCK), out.dtype)
    sums = np.empty(_BLOCK, out.dtype)
    begin = dim if num_first and not is_shared[0] else 0
    for block in range(0, num_samples, _BLOCK):
        size = min(_BLOCK, num_samples - block)
        for vector in range(num_vectors):
            if is_shared[vector] and block:
                continue
            count = _BLOCK if is_shared[vector] else size
            for sample in range(count):
                row = 0 if is_shared[vector] else block + sample
                if vector < num_first:
                    for k in range(dim):
                        vectors[vector, k, sample] = first[row, k]
                else:
                    column = (vector - num_first) * dim
                    for k in range(dim):
                        vectors[vector, k, sample] = pooled[row, column + k]
        for sample in range(size):
            for k in range(begin):
                out[block + sample, k] = vectors[0, k, sample]
        place = begin
        for one in range(1, num_vectors):
            for other in range(one):
                if is_shared[one] and is_shared[other]:
                    continue
                _multiply(vectors[one], vectors[other], sums)
                for sample in range(size):
                    out[block + sample, place] = sums[sample]
                place += 1


@kernel
def _multiply(one, other, sums):
    """The dot products of a block of samples, in the order of the columns."""
    dim = len(one)
    sums[:] = 0
    for k in range(0, dim - 3, 4):
        for sample in range(_BLOCK):
            sums[sample] += (
                one[k, sample] * other[k, sample]
                + one[k + 1, sample] * other[k + 1, sample]
                + one[k + 2, sample] * other[k + 2, sample]
                + one[k + 3, sample] * other[k + 3, sample]
            )
    for k in range(dim // 4 * 4, dim):
        for sample in range(_BLOCK):
            sums[sample] += one[k, sample] * other[k, sample]


@kernel
def pick_columns(pooled, numbers, columns, out):
    """Copy some columns of two arrays that are thought side by side."""
    width = pooled.shape[1]
    for sample in range(len(out)):
        for place in range(len(columns)):
            column = columns[place]
            out[sample, place] = pooled[sample, column] if column < width else numbers[sample, column - width]


@kernel
def add_and_clip(values, bias):
    """Add a row to each row, and replace what is negative by 0."""
    zero = values.dtype.type(0)
    for sample in range(len(values)):
        for k in range(len(bias)):
            value = values[sample, k] + bias[k]
            values[sample, k] = value if not value <= zero else zero  # NaN stays
