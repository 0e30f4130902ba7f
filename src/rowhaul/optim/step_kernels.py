"""Compiled steps of the row optimizers, over records that hold values and state side by side.

Record ``records[i]`` has ``dim`` values. Its whole gradient in this step are the numbers of ``gradients``
from ``firsts[i]`` on, or row ``i`` of them if ``firsts`` is empty. Records differ. Arithmetic is in the
records' own precision and in a fixed order: the same bits wherever the step is taken. Scalars come as an
array of that precision, ``settings``, so a kernel never widens. Formulas are written once, for four values
and for one.

The step of one row is a function of its own (`sgd_row` and its like): values, state and gradient are given by
address, so that rows which are stored in another form can be stepped by the same code.
"""

from __future__ import annotations

from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, prefetch_to_write, record_at
from rowhaul._vectors import four_times, joined, load_four, load_one, root, size_of, store_lanes, store_one

_RECORDS_AHEAD = 16
_CACHE_LINE = 64


@register_jitable
def _ask_for(address, num_bytes):
    for offset in range(0, num_bytes, _CACHE_LINE):
        prefetch_to_write(address + offset)
    prefetch_to_write(address + num_bytes - 1)


@register_jitable
def _steps(step_row, addresses, shift, width, records, gradients, firsts, dim, scalars):
    """Call ``step_row`` for each record."""
    chunks, start, last = data_address(addresses), data_address(gradients), len(records) - 1
    size = size_of(scalars[0])
    record_bytes = width * size
    for i in range(len(records)):
        _ask_for(record_at(chunks, shift, record_bytes, records[min(i + _RECORDS_AHEAD, last)]), record_bytes)
        row = record_at(chunks, shift, record_bytes, records[i])
        gradient = start + (firsts[i] if len(firsts) > 0 else i * dim) * size
        step_row(row, row + dim * size, gradient, dim, scalars)


@register_jitable
def _sgd(values, gradient, rate, decay):
    return values - rate * (gradient + decay * values)


@register_jitable
def sgd_scalars(settings, dim):
    """Rate and weight decay."""
    return settings[0], settings[1]


@register_jitable
def sgd_row(row, state, gradient, dim, scalars):
    """Step a row; there is no state."""
    rate, decay = scalars
    rates, decays, size = four_times(rate), four_times(decay), size_of(rate)
    whole = (dim - dim % 4) * size
    for at in range(0, whole, 4 * size):
        store_lanes(row + at, _sgd(load_four(row + at, rate), load_four(gradient + at, rate), rates, decays))
    for at in range(whole, dim * size, size):
        store_one(row + at, _sgd(load_one(row + at, rate), load_one(gradient + at, rate), rate, decay))


@kernel
def sgd_step(addresses, shift, width, records, gradients, firsts, dim, settings):
    """settings: rate, weight decay."""
    scalars = sgd_scalars(settings, dim)
    _steps(sgd_row, addresses, shift, width, records, gradients, firsts, dim, scalars)


@register_jitable
def _adagrad(values, squares, gradient, rate, decay, eps):
    gradient = gradient + decay * values
    squares = squares + gradient * gradient
    return values - rate * gradient / (root(squares) + eps), squares


@register_jitable
def adagrad_scalars(settings, dim):
    """Rate, weight decay and eps."""
    return settings[0], settings[1], settings[2]


@register_jitable
def adagrad_row(row, state, gradient, dim, scalars):
    """Step a row, whose state is a sum of squares for each value."""
    rate, decay, eps = scalars
    rates, decays, all_eps, size = four_times(rate), four_times(decay), four_times(eps), size_of(rate)
    whole = (dim - dim % 4) * size
    for at in range(0, whole, 4 * size):
        fours, four_squares = _adagrad(
            load_four(row + at, rate), load_four(state + at, rate), load_four(gradient + at, rate),
            rates, decays, all_eps,
        )  # fmt: skip
        store_lanes(row + at, fours)
        store_lanes(state + at, four_squares)
    for at in range(whole, dim * size, size):
        value, squares = _adagrad(
            load_one(row + at, rate), load_one(state + at, rate), load_one(gradient + at, rate),
            rate, decay, eps,
        )  # fmt: skip
        store_one(row + at, value)
        store_one(state + at, squares)


@kernel
def adagrad_step(addresses, shift, width, records, gradients, firsts, dim, settings):
    """settings: rate, weight decay, eps. State: a sum of squares for each value."""
    scalars = adagrad_scalars(settings, dim)
    _steps(adagrad_row, addresses, shift, width, records, gradients, firsts, dim, scalars)


@register_jitable
def rowwise_adagrad_scalars(settings, dim):
    """Rate, weight decay, eps, zero and the number of values."""
    return settings[0], settings[1], settings[2], settings.dtype.type(0), settings.dtype.type(dim)


@register_jitable
def rowwise_adagrad_row(row, state, gradient, dim, scalars):
    """Step a row, whose state is one sum of mean squares."""
    rate, decay, eps, zero, num_values = scalars
    decays, size = four_times(decay), size_of(rate)
    whole = (dim - dim % 4) * size
    # Four running sums, joined in a fixed order: faster than one chain and still deterministic.
    sums = four_times(zero)
    for at in range(0, whole, 4 * size):
        fours = load_four(gradient + at, rate) + decays * load_four(row + at, rate)
        sums = sums + fours * fours
    total = joined(sums)
    for at in range(whole, dim * size, size):
        one = load_one(gradient + at, rate) + decay * load_one(row + at, rate)
        total += one * one
    mean_squares = load_one(state, rate) + total / num_values
    store_one(state, mean_squares)
    scale = rate / (root(mean_squares) + eps)
    scales = four_times(scale)
    for at in range(0, whole, 4 * size):
        store_lanes(row + at, _sgd(load_four(row + at, rate), load_four(gradient + at, rate), scales, decays))
    for at in range(whole, dim * size, size):
        store_one(row + at, _sgd(load_one(row + at, rate), load_one(gradient + at, rate), scale, decay))


@kernel
def rowwise_adagrad_step(addresses, shift, width, records, gradients, firsts, dim, settings):
    """settings: rate, weight decay, eps. State: one sum of mean squares for the row."""
    scalars = rowwise_adagrad_scalars(settings, dim)
    _steps(rowwise_adagrad_row, addresses, shift, width, records, gradients, firsts, dim, scalars)


@register_jitable
def _adam(values, mean, square, gradient, rate, decay, eps, beta1, beta2, one):
    gradient = gradient + decay * values
    mean = beta1 * mean + (one - beta1) * gradient
    square = beta2 * square + (one - beta2) * gradient * gradient
    return values - rate * mean / (root(square) + eps), mean, square


@register_jitable
def adam_scalars(settings, dim):
    """Rate with both bias corrections, weight decay, eps, beta1, beta2 and one."""
    return settings[0], settings[1], settings[2], settings[3], settings[4], settings.dtype.type(1)


@register_jitable
def adam_row(row, state, gradient, dim, scalars):
    """Step a row, whose state are two moments for each value."""
    rate, decay, eps, beta1, beta2, one = scalars
    rates, decays, all_eps, ones = four_times(rate), four_times(decay), four_times(eps), four_times(one)
    betas1, betas2, size = four_times(beta1), four_times(beta2), size_of(rate)
    whole, means, squares = (dim - dim % 4) * size, state, state + dim * size
    for at in range(0, whole, 4 * size):
        fours, four_means, four_squares = _adam(
            load_four(row + at, rate), load_four(means + at, rate), load_four(squares + at, rate),
            load_four(gradient + at, rate), rates, decays, all_eps, betas1, betas2, ones,
        )  # fmt: skip
        store_lanes(row + at, fours)
        store_lanes(means + at, four_means)
        store_lanes(squares + at, four_squares)
    for at in range(whole, dim * size, size):
        value, mean, square = _adam(
            load_one(row + at, rate), load_one(means + at, rate), load_one(squares + at, rate),
            load_one(gradient + at, rate), rate, decay, eps, beta1, beta2, one,
        )  # fmt: skip
        store_one(row + at, value)
        store_one(means + at, mean)
        store_one(squares + at, square)


@kernel
def adam_step(addresses, shift, width, records, gradients, firsts, dim, settings):
    """settings: rate with both bias corrections, weight decay, eps, beta1, beta2. State: two moments."""
    scalars = adam_scalars(settings, dim)
    _steps(adam_row, addresses, shift, width, records, gradients, firsts, dim, scalars)
