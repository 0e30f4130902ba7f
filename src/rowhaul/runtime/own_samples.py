"""A worker's part of a global batch, as its plan says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.runtime.phase_kernels import take_ids


def part_of(samples: Samples, worker: npt.NDArray[np.int32], rank: int) -> Samples:
    """Return the samples that a worker trains, in order: `Samples.take` in one pass over the ids."""
    mine, lengths = np.flatnonzero(worker == rank), np.ascontiguousarray(samples.lengths)
    if samples.id_weights is not None:
        ids, taken = take_ids(np.arange(len(samples.values)), lengths, mine)
        return samples.part(mine, taken, ids=ids)
    values, taken = take_ids(samples.values, lengths, mine)
    return samples.part(mine, taken, values=values)


def own_batch(samples: Samples, worker: npt.NDArray[np.int32], rank: int) -> Batch:
    """The same, as a model takes it."""
    return Batch.from_samples(part_of(samples, worker, rank), global_size=len(samples))
