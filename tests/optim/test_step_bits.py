"""The bits of a step do not depend on how many values are stepped at a time, nor on where gradients lie."""

import numpy as np
import pytest

from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store.arena import RecordArena

RULES = [
    SGD(lr=0.1, weight_decay=0.01),
    Adagrad(lr=0.1, weight_decay=0.01),
    RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    Adam(lr=0.1, weight_decay=0.01),
]
DIMS = (1, 3, 4, 5, 8, 11, 16)


def plain_step(rule, record, gradient, number):
    """One record after a step, number by number; every operation rounds to the record's type."""
    kind, dim = record.dtype.type, len(gradient)
    rate, decay, *others = (kind(one) for one in rule.settings(rule.lr, number))
    values, state = list(record[:dim]), list(record[dim:])
    whole = [gradient[k] + decay * values[k] for k in range(dim)]
    if rule.name == "sgd":
        return np.array([values[k] - rate * whole[k] for k in range(dim)], record.dtype)
    eps = others[0]
    if rule.name == "rowwise_adagrad":
        sums = [kind(0)] * 4
        for k in range(dim - dim % 4):
            sums[k % 4] += whole[k] * whole[k]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        for k in range(dim - dim % 4, dim):
            total += whole[k] * whole[k]
        state[0] += total / kind(dim)
        scale = rate / (np.sqrt(state[0]) + eps)
        return np.array([values[k] - scale * whole[k] for k in range(dim)] + state, record.dtype)
    for k in range(dim):
        if rule.name == "adagrad":
            state[k] += whole[k] * whole[k]
            values[k] -= rate * whole[k] / (np.sqrt(state[k]) + eps)
        else:
            one, (beta1, beta2) = kind(1), others[1:]
            state[k] = beta1 * state[k] + (one - beta1) * whole[k]
            state[dim + k] = beta2 * state[dim + k] + (one - beta2) * whole[k] * whole[k]
            values[k] -= rate * state[k] / (np.sqrt(state[dim + k]) + eps)
    return np.array(values + state, record.dtype)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_record_is_stepped_as_if_alone_and_number_by_number(rule):
    random = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        for dim in DIMS:
            arena = RecordArena(dim + rule.state_width(dim), dtype)
            records = arena.allocate(40)
            before = np.abs(random.normal(size=(40, arena.width))).astype(dtype)
            arena.write(records, before)
            touched = random.permutation(40)[:30]
            gradients = random.normal(size=(30, dim)).astype(dtype)
            rule.step(arena, records[touched], gradients, rule.lr, 3)
            expected = before.copy()
            for record, gradient in zip(touched, gradients, strict=True):
                expected[record] = plain_step(rule, before[record], gradient, 3)
            np.testing.assert_array_equal(arena.read(records), expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_parts_of_a_gradient_step_records_as_copies_of_them_do(rule):
    random = np.random.default_rng(1)
    gradients = random.normal(size=(9, 10)).astype(np.float32)
    firsts = np.array([3, 17, 40, 41, 84])
    copies = np.stack([gradients.reshape(-1)[first : first + 6] for first in firsts])
    stepped = []
    for _ in range(2):
        arena = RecordArena(6 + rule.state_width(6), np.float32)
        records = arena.allocate(5)
        arena.write(records, np.ones((5, arena.width), np.float32))
        stepped.append((arena, records))
    rule.step(*stepped[0], copies, rule.lr, 1)
    rule.step_parts(*stepped[1], gradients, firsts, 6, rule.lr, 1)
    np.testing.assert_array_equal(*(arena.read(records) for arena, records in stepped))
