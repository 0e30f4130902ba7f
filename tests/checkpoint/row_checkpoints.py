"""Small checkpoints of rows given as dictionaries, for tests."""

import numpy as np
import torch

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter

WIDTH = 3  # of a record


def record(value):
    return np.array([value, -value, value + 0.5], np.float32)


def block(rows):
    records = [record(value) for value in rows.values()]
    return np.array(list(rows), np.int64), np.array(records, np.float32).reshape(-1, WIDTH)


def write(path, tables, *, dim=2, dtype="float32", facts=None, weights=None, blocks_of=3):
    """A checkpoint of dictionaries of rows, in small blocks."""
    with CheckpointWriter(path) as writer:
        if weights is not None:
            writer.tensors("model", {"w": torch.tensor(weights)})
        for name, rows in tables.items():
            items = list(rows.items())
            some = [dict(items[first : first + blocks_of]) for first in range(0, len(items), blocks_of)]
            blocks = [(keys, records.astype(dtype)) for keys, records in map(block, some)]
            writer.table(name, blocks, dim=dim, state_width=WIDTH - dim, dtype=dtype)
        writer.facts = {"row_optimizer": "rowwise_adagrad"} | (facts or {})
    return CheckpointReader(path)
