"""Convert the global batches of a user's loader to `Samples`, and pick a worker's part of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.nn import Batch
from rowhaul.runtime.phase_kernels import take_ids


def part_of(samples: Samples, worker: npt.NDArray[np.int32], rank: int) -> Samples:
    """Return the samples that a worker trains, in order: `Samples.take` in one pass over the ids."""
    mine = np.flatnonzero(worker == rank)
    values, lengths = take_ids(samples.values, np.ascontiguousarray(samples.lengths), mine)
    return samples.part(mine, values, lengths)


def as_samples(given: Samples | Batch) -> Samples:
    """Return samples as they are, or those of a `Batch`."""
    if isinstance(given, Samples):
        return given
    if not isinstance(given, Batch):
        raise DataError(
            f"a global batch must be rowhaul.data.samples.Samples or rowhaul.Batch, got {type(given)}"
        )
    ids = given.ids
    if ids.weights_or_none() is not None:
        raise DataError("ids with weights cannot be dispatched; leave them out, or train in one process")
    shape = (len(ids.keys()), ids.stride())
    return Samples(
        features=tuple(ids.keys()),
        values=ids.values().cpu().numpy().astype(np.int64, copy=False),
        lengths=ids.lengths().cpu().numpy().astype(np.int32, copy=False).reshape(shape),
        dense=given.dense.cpu().numpy().astype(np.float32, copy=False),
        labels=None if given.labels is None else given.labels.cpu().numpy().astype(np.float32, copy=False),
        index=given.index.cpu().numpy().astype(np.int64, copy=False),
        weights=None if given.weights is None else given.weights.cpu().numpy().astype(np.float32, copy=False),
        groups=None if given.groups is None else given.groups.cpu().numpy().astype(np.int64, copy=False),
        time=given.time,
    )
