"""The database as anybody would first write it: a dictionary of rows, optimizers in NumPy."""

from __future__ import annotations

import copy

import numpy as np

from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store import TableGroup


def plain_step(rule, row, state, gradient, lr, number):
    """New (row, state) of one step, as the optimizers' docstrings say."""
    gradient = gradient + rule.weight_decay * row
    if isinstance(rule, SGD):
        return row - lr * gradient, state
    if isinstance(rule, RowwiseAdagrad):
        state = state + np.mean(gradient**2)
        return row - lr * gradient / (np.sqrt(state) + rule.eps), state
    if isinstance(rule, Adagrad):
        state = state + gradient**2
        return row - lr * gradient / (np.sqrt(state) + rule.eps), state
    assert isinstance(rule, Adam)
    mean, square = np.split(state, 2)
    mean = rule.beta1 * mean + (1 - rule.beta1) * gradient
    square = rule.beta2 * square + (1 - rule.beta2) * gradient**2
    corrected = mean / (1 - rule.beta1**number)
    # eps stands beside the uncorrected root, as in torch.optim.SparseAdam
    step = (
        lr * np.sqrt(1 - rule.beta2**number) * mean / (1 - rule.beta1**number) / (np.sqrt(square) + rule.eps)
    )
    assert corrected.shape == step.shape
    return row - step, np.concatenate([mean, square])


class PlainDatabase:
    """Rows of every table by key; keys are looked up one at a time."""

    def __init__(self, settings):
        self.settings = settings
        self.rows = {spec.name: {} for spec in settings.tables}
        self.pushed = []
        self.number = 0

    def first_values(self, table, key):
        """What a row starts with, from a group of its own."""
        spec = self.settings.table(table)
        group = TableGroup([spec], self.settings.optimizer, self.settings.dtype, self.settings.seed)
        found = group.lookup(np.array([key]), np.array([0, 1]), np.array([0]), insert=False)
        return found.spare[0].copy()

    def insert(self, table, keys):
        for key in keys:
            if key not in self.rows[table]:
                width = self.settings.state_width(self.settings.table(table))
                state = np.full(width, self.settings.optimizer.initial_state)
                self.rows[table][key] = (self.first_values(table, key), state)

    def value(self, table, key, on_unknown="init"):
        if key in self.rows[table]:
            return self.rows[table][key][0]
        return self.first_values(table, key) if on_unknown == "init" else 0 * self.first_values(table, key)

    def pull(self, table, keys, lengths=None, pooling="sum", on_unknown="init"):
        dim = self.settings.table(table).dim
        rows = [self.value(table, key, on_unknown) for key in keys]
        if lengths is None:
            return np.array(rows).reshape(len(keys), dim)
        bags = np.split(np.array(rows).reshape(len(keys), dim), np.cumsum(lengths)[:-1]) if lengths else []
        sums = [bag.sum(axis=0) / (max(len(bag), 1) if pooling == "mean" else 1) for bag in bags]
        return np.array(sums).reshape(len(lengths), dim)

    def push(self, table, keys, gradients, lengths=None, pooling="sum"):
        if lengths is not None:
            of_bag = np.repeat(np.arange(len(lengths)), lengths)
            scale = np.repeat([1 / max(count, 1) if pooling == "mean" else 1.0 for count in lengths], lengths)
            gradients = gradients[of_bag] * scale.reshape(-1, 1)
        self.pushed.append((table, list(keys), gradients))

    def update(self, lr):
        self.number += 1
        sums = {}
        for table, keys, gradients in self.pushed:
            for key, gradient in zip(keys, gradients, strict=True):
                if key in self.rows[table]:
                    sums[table, key] = sums.get((table, key), 0) + gradient
        for (table, key), gradient in sums.items():
            row, state = self.rows[table][key]
            self.rows[table][key] = plain_step(self.settings.optimizer, row, state, gradient, lr, self.number)
        self.pushed.clear()
        return len(sums)

    def delete(self, table, keys):
        gone = [self.rows[table].pop(key, None) for key in dict.fromkeys(keys)]
        self.pushed = [(t, *_without(k, g, keys if t == table else ())) for t, k, g in self.pushed]
        return sum(row is not None for row in gone)

    def copy(self):
        return copy.deepcopy(self)


def _without(keys, gradients, gone):
    kept = [place for place, key in enumerate(keys) if key not in set(gone)]
    return [keys[place] for place in kept], gradients[kept]
