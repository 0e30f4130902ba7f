"""Convert the global batches of a user's loader to `Samples`."""

from __future__ import annotations

import numpy as np

from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.nn import Batch


def as_samples(given: Samples | Batch) -> Samples:
    """Return samples as they are, or those of a `Batch`."""
    if isinstance(given, Samples):
        return given
    if not isinstance(given, Batch):
        raise DataError(
            f"a global batch must be rowhaul.data.samples.Samples or rowhaul.Batch, got {type(given)}"
        )
    ids = given.ids
    weights = ids.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise DataError(
            "weights of ids that take gradients cannot be dispatched: data is not learned; compute them "
            "in the model, from the batch that a worker gets"
        )
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
        id_weights=None if weights is None else weights.cpu().numpy(),
    )
