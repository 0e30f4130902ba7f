"""Compiled loops over packed rows: initial values, pooled reads, steps, sums of packed gradients.

A packed record is the values in few bits, filled up to whole words, then their scale where they have one,
then the optimizer's state in float32. ``like`` is a number whose type says how values are packed, see
`rowhaul._packed_vectors`. A step unpacks a row, steps it in float32 and rounds it again: the draws are a
function of the row's seed, a number that tells occasions apart, and the column.
"""

from __future__ import annotations

import numpy as np
from numba import float32, uint8, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import (
    data_address,
    keep_alive,
    memory_at,
    prefetch_to_read,
    prefetch_to_write,
    record_at,
    store8,
)
from rowhaul._packed_vectors import (
    MOST_INT8,
    add_eight,
    add_one,
    has_scale,
    larger_four,
    larger_one,
    largest_lane,
    pack_eight,
    pack_one,
    packed_size,
    unpack_eight,
    unpack_one,
)
from rowhaul._vectors import clear_row, four_times, load_four, load_one, store_one
from rowhaul.optim.step_kernels import (
    adagrad_row,
    adagrad_scalars,
    adam_row,
    adam_scalars,
    rowwise_adagrad_row,
    rowwise_adagrad_scalars,
    sgd_row,
    sgd_scalars,
)
from rowhaul.store.records import initial_values, mix

_RECORDS_AHEAD = 16
_IDS_AHEAD = 16
_SAMPLES_AHEAD = 8
_CACHE_LINE = 64
_COUNTER = 0x9E3779B97F4A7C15
_LEAST_SCALED = 1e-36  # rows below are stored as zeros: a share of them would be infinite


@register_jitable
def value_bytes(dim, like):
    """Bytes of a row's values with their scale: whole words."""
    return (dim * packed_size(like) + 3) // 4 * 4 + (4 if has_scale(like) else 0)


@register_jitable
def _scale_of(row, dim, like):
    if has_scale(like):
        return load_one(row + value_bytes(dim, like) - 4, float32(0))
    return float32(1)


@register_jitable
def occasion_seed(row_seed, occasion):
    """The seed of a row's draws on an occasion; those on different ones have nothing in common."""
    return mix(row_seed + (uint64(occasion) + uint64(1)) * uint64(_COUNTER))


@register_jitable
def unpack_row(target, row, dim, like):
    """Write the values of a packed row to an address."""
    scale, size, whole = _scale_of(row, dim, like), packed_size(like), dim - dim % 8
    for k in range(0, whole, 8):
        unpack_eight(target + 4 * k, row + k * size, scale, like)
    for k in range(whole, dim):
        unpack_one(target + 4 * k, row + k * size, scale, like)


@register_jitable
def add_packed(target, row, dim, factor, like):
    """Add the values of a packed row, times a factor, to those at an address."""
    scale, size, whole = _scale_of(row, dim, like), packed_size(like), dim - dim % 8
    for k in range(0, whole, 8):
        add_eight(target + 4 * k, row + k * size, scale, factor, like)
    for k in range(whole, dim):
        add_one(target + 4 * k, row + k * size, scale, factor, like)


@register_jitable
def _largest(values, dim):
    zero = float32(0)
    sizes, others, whole = four_times(zero), four_times(zero), dim - dim % 8
    for k in range(0, whole, 8):  # two chains take half the time of one
        sizes = larger_four(sizes, load_four(values + 4 * k, zero))
        others = larger_four(others, load_four(values + 4 * k + 16, zero))
    most = largest_lane(larger_four(sizes, others))
    for k in range(whole, dim):
        most = larger_one(most, load_one(values + 4 * k, zero))
    return most


@register_jitable
def pack_row(row, values, dim, seed, like):
    """Round the values at an address into a packed row, by the draws of a seed."""
    size, share = packed_size(like), float32(1)
    filled = value_bytes(dim, like)
    if has_scale(like):
        filled -= 4
        most = _largest(values, dim)
        if not most < float32(np.inf):  # the row is none, and says so
            store_one(row + filled, float32(np.nan))
            return
        store_one(row + filled, most * float32(1 / MOST_INT8))
        share = float32(MOST_INT8) / most if most > float32(_LEAST_SCALED) else float32(0)
    whole = dim - dim % 8
    for k in range(0, whole, 8):
        pack_eight(row + k * size, values + 4 * k, share, seed, k, like)
    for k in range(whole, dim):
        pack_one(row + k * size, values + 4 * k, share, seed, k, like)
    for at in range(dim * size, filled):  # so that equal rows have equal bytes
        store8(uint64(row + at), uint8(0))


@kernel
def write_packed_initial(
    addresses, shift, record_bytes, records, keys, starts, which, seeds, lows, steps, dim, state, like
):  # fmt: skip
    """Make packed records of rows that were never trained: see `rowhaul.store.records.write_initial`."""
    values, chunks, table = np.empty(dim + 1, np.float32), data_address(addresses), 0
    address, first = data_address(values), value_bytes(dim, like)
    for i in range(len(which)):
        while which[i] >= starts[table + 1]:
            table += 1
        row_seed = mix(uint64(keys[which[i]]) ^ seeds[table])
        initial_values(values, dim, row_seed, lows[table], steps[table])
        row = record_at(chunks, shift, record_bytes, records[i])
        pack_row(row, address, dim, occasion_seed(row_seed, 0), like)
        for at in range(first, record_bytes, 4):
            store_one(row + at, state)
    keep_alive(values)


@kernel
def unpack_records(addresses, shift, record_bytes, records, dim, out, like):
    """Write values and state of packed records into the rows of ``out``."""
    chunks, target = data_address(addresses), data_address(out)
    first = value_bytes(dim, like)
    for i in range(len(records)):
        row = record_at(chunks, shift, record_bytes, records[i])
        unpack_row(target, row, dim, like)
        for k in range(out.shape[1] - dim):
            store_one(target + 4 * (dim + k), load_one(row + first + 4 * k, float32(0)))
        target += 4 * out.shape[1]


@kernel
def pack_values(values, tables, keys, numbers, seeds, sender, out, like):
    """Round rows of values to packed ones, in the rows of ``out``.

    The draws are those of the row's table and key, of its step (``numbers``, one for all or one each) and of
    the sender: 0 for the rows themselves.
    """
    dim, source, target = values.shape[1], data_address(values), data_address(out)
    for i in range(len(keys)):
        seed = occasion_seed(mix(uint64(keys[i]) ^ seeds[tables[i]]), numbers[min(i, len(numbers) - 1)])
        if sender > 0:
            seed = mix(seed ^ mix(uint64(sender)))
        pack_row(target + i * out.shape[1], source + 4 * i * dim, dim, seed, like)


@kernel
def sum_packed(gradients, sums, like):
    """Sum packed gradients of each row, given by address, in the order of workers."""
    dim, one = sums.shape[1], float32(1)
    for s in range(len(sums)):
        target = data_address(sums) + 4 * s * dim
        clear_row(target, dim, float32(0))
        for worker in range(gradients.shape[1]):
            if gradients[s, worker] != 0:
                add_packed(target, gradients[s, worker], dim, one, like)


@register_jitable
def _step(
    step_row, scalars, gradients, addresses, shift, record_bytes, records, tables, keys, numbers, seeds, like
):  # fmt: skip
    """Step packed rows, which ``tables`` and ``keys`` name, and round them as of steps ``numbers``."""
    dim, last = gradients.shape[1], len(records) - 1
    chunks, gradient = data_address(addresses), data_address(gradients)
    scratch = np.empty(dim + 1, np.float32)
    values, first = data_address(scratch), value_bytes(dim, like)
    for i in range(len(records)):
        soon = record_at(chunks, shift, record_bytes, records[min(i + _RECORDS_AHEAD, last)])
        for at in range(0, record_bytes, _CACHE_LINE):
            prefetch_to_write(soon + at)
        prefetch_to_write(soon + record_bytes - 1)
        row = record_at(chunks, shift, record_bytes, records[i])
        unpack_row(values, row, dim, like)
        step_row(values, row + first, gradient + 4 * i * dim, dim, scalars)
        row_seed = mix(uint64(keys[i]) ^ seeds[tables[i]])
        pack_row(row, values, dim, occasion_seed(row_seed, numbers[min(i, len(numbers) - 1)]), like)
    keep_alive(scratch)


@kernel
def step_sgd(settings, gradients, *rows):
    """`_step` of this rule, as of the others; ``rows`` are its arguments from ``addresses`` on."""
    _step(sgd_row, sgd_scalars(settings, gradients.shape[1]), gradients, *rows)


@kernel
def step_adagrad(settings, gradients, *rows):
    """See `step_sgd`."""
    _step(adagrad_row, adagrad_scalars(settings, gradients.shape[1]), gradients, *rows)


@kernel
def step_rowwise_adagrad(settings, gradients, *rows):
    """See `step_sgd`."""
    _step(rowwise_adagrad_row, rowwise_adagrad_scalars(settings, gradients.shape[1]), gradients, *rows)


@kernel
def step_adam(settings, gradients, *rows):
    """See `step_sgd`."""
    _step(adam_row, adam_scalars(settings, gradients.shape[1]), gradients, *rows)


@kernel
def pool_packed(
    addresses, shift, record_bytes, locations, spare_address, inverse, offsets, columns, dim, is_mean,
    weights, out, out_address, like,
):  # fmt: skip
    """`rowhaul.store.pooling.pool_rows` of packed rows; the spare ones are float32."""
    num_samples, num_ids = out.shape[0], len(inverse)
    zero, one = float32(0), float32(1)
    chunks, packed_bytes = data_address(addresses), value_bytes(dim, like)
    sample_bytes, weighted = 4 * out.shape[1], len(weights) > 0
    for feature in range(len(columns)):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = out_address + sample * sample_bytes + 4 * columns[feature]
            for offset in range(0, 4 * dim, _CACHE_LINE):
                prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes + offset)
            if begin == end or weighted:
                clear_row(target, dim, zero)
            for i in range(begin, end):
                soon = locations[inverse[min(i + _IDS_AHEAD, num_ids - 1)]]
                if soon >= 0:
                    address = record_at(chunks, shift, record_bytes, soon)
                    for offset in range(0, packed_bytes, _CACHE_LINE):
                        prefetch_to_read(address + offset)
                    prefetch_to_read(address + packed_bytes - 1)
                location = locations[inverse[i]]
                factor = weights[i] if weighted else one
                is_first = i == begin and not weighted
                if location >= 0:
                    row = record_at(chunks, shift, record_bytes, location)
                    if is_first:
                        unpack_row(target, row, dim, like)
                    else:
                        add_packed(target, row, dim, factor, like)
                else:
                    spare = memory_at(spare_address + (-1 - location) * 4 * dim, dim, out.dtype)
                    for k in range(dim):
                        column = columns[feature] + k
                        out[sample, column] = (
                            spare[k] if is_first else out[sample, column] + factor * spare[k]
                        )
            if is_mean[feature] and end - begin > 1:
                for column in range(columns[feature], columns[feature] + dim):
                    out[sample, column] /= end - begin
