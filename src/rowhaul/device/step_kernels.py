"""Triton kernels of the sparse step: gradients of a row are summed in a fixed order, then the row steps once.

Ids are sorted by record, stably, so the ids of a row are a *segment* in the order of the batch. A program
takes several short segments at once; long ones are cut into pieces from their beginning on, whose sums are
added in order. No float is added atomically: two runs give the same bits. Which place a long segment has in
its list may differ from run to run; nothing that is added depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.row_kernels import rows_at

# By `SUM` a row becomes the sum of its gradients.
SGD, ADAGRAD, ROWWISE, ADAM, SUM = (tl.constexpr(number) for number in range(5))


@triton.jit
def _root(x, SAME_BITS: tl.constexpr):
    """The square root, correctly rounded where bits count."""
    if SAME_BITS and x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _over(x, y, SAME_BITS: tl.constexpr):
    """The quotient, correctly rounded where bits count."""
    if SAME_BITS and x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def _lane(fours, number: tl.constexpr):
    """One of four columns."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == number, fours, 0.0), axis=1)


@triton.jit
def _sum_in_fours(squares, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Sum rows in the order of `rowhaul.optim.step_kernels`: four running sums, joined, then the rest.

    Numbers are picked out by sums whose other terms are 0, which rounds nothing.
    """
    total = tl.zeros((ROWS,), squares.dtype)
    if DIM >= 4:
        fours = tl.reshape(squares, (ROWS, COLUMNS // 4, 4))
        four = tl.arange(0, COLUMNS // 4)[None, :, None]
        sums = tl.zeros((ROWS, 4), squares.dtype)
        for number in range(DIM // 4):
            sums += tl.sum(tl.where(four == number, fours, 0.0), axis=1)
        total = (_lane(sums, 0) + _lane(sums, 1)) + (_lane(sums, 2) + _lane(sums, 3))
    column = tl.arange(0, COLUMNS)[None, :]
    for number in range(DIM - DIM % 4, DIM):
        total += tl.sum(tl.where(column == number, squares, 0.0), axis=1)
    return total


@triton.jit
def mark_heads(records, heads, count, BLOCK: tl.constexpr):
    """Write 1 where a segment of sorted records begins."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    here = tl.load(records + at, mask=inside, other=0)
    before = tl.load(records + at - 1, mask=inside & (at > 0), other=-1)
    tl.store(heads + at, ((here != before) | (at == 0)).to(tl.int32), mask=inside)


@triton.jit
def list_segments(numbers, starts, num_segments, count, BLOCK: tl.constexpr):
    """Write where segments begin, and where the last one ends; ``numbers`` counts them up to each id."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    number = tl.load(numbers + at, mask=inside, other=0)
    before = tl.load(numbers + at - 1, mask=inside & (at > 0), other=0)
    tl.store(starts + number - 1, at.to(tl.int32), mask=inside & (number != before))
    is_last = inside & (at == count - 1)
    end = (tl.zeros((BLOCK,), tl.int64) + count).to(tl.int32)  # a count of 1 is no tensor
    tl.store(starts + number, end, mask=is_last)
    tl.store(num_segments + tl.zeros((BLOCK,), tl.int32), number, mask=is_last)


@triton.jit
def list_pieces(
    starts, num_segments, long_segments, first_pieces, piece_segments, counters,
    LONG: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List segments of more than ``LONG`` ids, and their pieces."""
    total = tl.load(num_segments)
    if tl.program_id(0) * BLOCK < total:
        segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = segment < total
        first = tl.load(starts + segment, mask=inside, other=0)
        length = tl.load(starts + segment + 1, mask=inside, other=0) - first
        is_long = inside & (length > LONG)
        if tl.max(is_long.to(tl.int32), axis=0) > 0:
            number = tl.atomic_add(counters + tl.zeros((BLOCK,), tl.int32), 1, mask=is_long)
            num_pieces = tl.where(is_long, (length + PIECE - 1) // PIECE, 0)
            piece = tl.atomic_add(counters + 1 + tl.zeros((BLOCK,), tl.int32), num_pieces, mask=is_long)
            tl.store(long_segments + number, segment, mask=is_long)
            tl.store(first_pieces + segment, piece, mask=is_long)
            for k in range(0, tl.max(num_pieces, axis=0)):
                tl.store(piece_segments + piece + k, segment, mask=is_long & (k < num_pieces))


@triton.jit
def _gradients_of(
    sorted_ids, at, there, bags, offsets, weights, columns, is_mean, gradients, num_samples, stride,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ONE_EACH: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The gradients of the ids at some sorted places, a row each."""
    identity = tl.load(sorted_ids + at, mask=there, other=0).to(tl.int32)
    bag = identity if ONE_EACH else tl.load(bags + identity, mask=there, other=0)
    feature = bag // num_samples
    column = tl.arange(0, COLUMNS)
    start = (bag % num_samples).to(tl.int64) * stride + tl.load(columns + feature, mask=there, other=0)
    mask = there[:, None] & (column < DIM)[None, :]
    found = tl.load(gradients + start[:, None] + column[None, :], mask=mask, other=0.0)
    if WEIGHTED:
        found = found * tl.load(weights + identity, mask=there, other=0.0)[:, None]
    if not ONE_EACH:
        length = tl.load(offsets + bag + 1, mask=there, other=1) - tl.load(offsets + bag, mask=there, other=0)
        mean = tl.load(is_mean + feature, mask=there, other=0) != 0
        found = found / tl.where(mean, length, 1).to(found.dtype)[:, None]
    return found


@triton.jit
def _stepped(
    value, state_chunks, states, record, there, gradient, settings,
    RULE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr,
    SAME_BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The values of some records after a step by their gradients: see `rowhaul.optim.step_kernels`.

    With ``SAME_BITS``, and without fused operations, they are the bits of a CPU.
    """
    element: tl.constexpr = gradient.dtype
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < DIM)[None, :]
    rate, decay = tl.load(settings).to(element), tl.load(settings + 1).to(element)
    if RULE == SUM:
        value = gradient
    gradient = gradient + decay * value
    if RULE == SGD:
        value = value - rate * gradient
    if RULE == ADAGRAD:
        eps = tl.load(settings + 2).to(element)
        squares_at = rows_at(state_chunks, states, record, SHIFT, DIM)[:, None] + column[None, :]
        squares = tl.load(squares_at, mask=mask, other=0.0) + gradient * gradient
        tl.store(squares_at, squares, mask=mask)
        value = value - _over(rate * gradient, _root(squares, SAME_BITS) + eps, SAME_BITS)
    if RULE == ROWWISE:
        eps = tl.load(settings + 2).to(element)
        mean_at = rows_at(state_chunks, states, record, SHIFT, 1)
        gradient = tl.where(mask, gradient, 0.0)
        if SAME_BITS:
            summed = _sum_in_fours(gradient * gradient, DIM, COLUMNS, ROWS)
        else:
            summed = tl.sum(gradient * gradient, axis=1)
        number = tl.zeros((ROWS,), element) + DIM
        mean = tl.load(mean_at, mask=there, other=0.0) + _over(summed, number, SAME_BITS)
        tl.store(mean_at, mean, mask=there)
        scale = _over(tl.zeros((ROWS,), element) + rate, _root(mean, SAME_BITS) + eps, SAME_BITS)
        value = value - scale[:, None] * gradient
    if RULE == ADAM:
        eps = tl.load(settings + 2).to(element)
        beta1, beta2 = tl.load(settings + 3).to(element), tl.load(settings + 4).to(element)
        mean_at = rows_at(state_chunks, states, record, SHIFT, 2 * DIM)[:, None] + column[None, :]
        mean = beta1 * tl.load(mean_at, mask=mask, other=0.0) + (1 - beta1) * gradient
        square = beta2 * tl.load(mean_at + DIM, mask=mask, other=0.0) + (1 - beta2) * gradient * gradient
        tl.store(mean_at, mean, mask=mask)
        tl.store(mean_at + DIM, square, mask=mask)
        value = value - _over(rate * mean, _root(square, SAME_BITS) + eps, SAME_BITS)
    return value


@triton.jit
def step_short(
    starts, num_segments, sorted_records, sorted_ids, bags, offsets, weights, columns, is_mean, gradients,
    num_samples, stride, value_chunks, values, state_chunks, states, settings,
    RULE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr,
    ONE_EACH: tl.constexpr, WEIGHTED: tl.constexpr, LONG: tl.constexpr, SEGMENTS: tl.constexpr,
    SAME_BITS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of short segments, several at once, and step their rows."""
    total = tl.load(num_segments)
    if tl.program_id(0) * SEGMENTS < total:
        segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
        inside = segment < total
        first = tl.load(starts + segment, mask=inside, other=0)
        length = tl.load(starts + segment + 1, mask=inside, other=0) - first
        length = tl.where(length > LONG, 0, length)
        record = tl.load(sorted_records + first, mask=inside, other=-1)
        there = inside & (length > 0) & (record >= 0)
        length = tl.where(there, length, 0)
        record = tl.where(there, record, 0)
        column = tl.arange(0, COLUMNS)
        row = rows_at(value_chunks, values, record, SHIFT, DIM)[:, None] + column[None, :]
        mask = there[:, None] & (column < DIM)[None, :]
        value = tl.load(row, mask=mask, other=0.0)  # while gradients are on their way
        summed = tl.zeros((SEGMENTS, COLUMNS), gradients.dtype.element_ty)
        for k in range(0, tl.max(length, axis=0)):
            summed += _gradients_of(
                sorted_ids, first + k, k < length, bags, offsets, weights, columns, is_mean, gradients,
                num_samples, stride, DIM, COLUMNS, ONE_EACH, WEIGHTED,
            )  # fmt: skip
        value = _stepped(
            value, state_chunks, states, record, there, summed, settings, RULE, DIM, COLUMNS, SHIFT,
            SAME_BITS, SEGMENTS,
        )  # fmt: skip
        tl.store(row, value, mask=mask)


@triton.jit
def sum_pieces(
    starts, piece_segments, first_pieces, counters, sorted_ids, bags, offsets, weights, columns, is_mean,
    gradients, num_samples, stride, partial,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ONE_EACH: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each piece of the long segments."""
    for piece in range(tl.program_id(0), tl.load(counters + 1), tl.num_programs(0)):
        segment = tl.load(piece_segments + piece)
        number = piece - tl.load(first_pieces + segment)
        first = tl.load(starts + segment) + number * PIECE
        end = tl.minimum(first + PIECE, tl.load(starts + segment + 1))
        column = tl.arange(0, COLUMNS)
        summed = tl.zeros((ROWS, COLUMNS), gradients.dtype.element_ty)
        for k in range(first, end, ROWS):
            at = k + tl.arange(0, ROWS)
            summed += _gradients_of(
                sorted_ids, at, at < end, bags, offsets, weights, columns, is_mean, gradients,
                num_samples, stride, DIM, COLUMNS, ONE_EACH, WEIGHTED,
            )  # fmt: skip
        tl.store(partial + piece * DIM + column, tl.sum(summed, axis=0), mask=column < DIM)


@triton.jit
def step_long(
    starts, long_segments, first_pieces, counters, sorted_records, partial, value_chunks, values,
    state_chunks, states, settings,
    RULE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, SAME_BITS: tl.constexpr,
):  # fmt: skip
    """Add the pieces of long segments, in order, and step their rows."""
    for number in range(tl.program_id(0), tl.load(counters), tl.num_programs(0)):
        segment = tl.load(long_segments + number)
        first = tl.load(starts + segment)
        num_pieces = (tl.load(starts + segment + 1) - first + PIECE - 1) // PIECE
        piece = tl.load(first_pieces + segment)
        record = tl.load(sorted_records + first)
        column = tl.arange(0, COLUMNS)
        summed = tl.zeros((ROWS, COLUMNS), partial.dtype.element_ty)
        for k in range(0, num_pieces, ROWS):
            at = k + tl.arange(0, ROWS)
            mask = (at < num_pieces)[:, None] & (column < DIM)[None, :]
            row = partial + (piece + at)[:, None] * DIM
            summed += tl.load(row + column[None, :], mask=mask, other=0.0)
        gradient = tl.sum(summed, axis=0)[None, :]
        one = tl.zeros((1,), tl.int32) + record
        if record >= 0:
            row = rows_at(value_chunks, values, one, SHIFT, DIM)[:, None] + column[None, :]
            mask = (column < DIM)[None, :]
            value = tl.load(row, mask=mask, other=0.0)
            value = _stepped(
                value, state_chunks, states, one, one >= 0, gradient, settings, RULE, DIM, COLUMNS, SHIFT,
                SAME_BITS, 1,
            )  # fmt: skip
            tl.store(row, value, mask=mask)
