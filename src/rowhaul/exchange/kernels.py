"""Compiled loops of the runtime: the rows that a worker trains."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel


@kernel
def rows_of_worker(trainers, worker):
    """The rows of a batch that a worker trains, and for each whether it alone does."""
    mask = np.uint64(1) << np.uint64(worker)
    rows = np.empty(len(trainers), np.int64)
    alone = np.empty(len(trainers), np.bool_)
    count = 0
    for r in range(len(trainers)):
        if trainers[r] & mask:
            rows[count] = r
            alone[count] = trainers[r] == mask
            count += 1
    return rows[:count], alone[:count]
