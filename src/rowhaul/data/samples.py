"""A run of samples as NumPy columns: what readers yield and schedulers look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Samples:
    """Some samples of a log, in order.

    Ids are jagged and feature-major: ``values`` holds all ids of the first feature, sample by
    sample, then all of the second; ``lengths[f, i]`` is how many of them sample ``i`` has.
    """

    features: tuple[str, ...]
    values: npt.NDArray[np.int64]  # sum(lengths)
    lengths: npt.NDArray[np.int32]  # features x samples
    dense: npt.NDArray[np.float32]  # samples x dense columns
    labels: npt.NDArray[np.float32] | None  # samples, or samples x labels with NaN where one is missing
    index: npt.NDArray[np.int64]  # samples: position of each in the whole stream
    weights: npt.NDArray[np.float32] | None = None  # samples: how much each counts in the loss
    groups: npt.NDArray[np.int64] | None = None  # samples: whose each is, for metrics within a group
    totals: npt.NDArray[np.float64] | None = None  # of the global batch that these are a part of
    time: int = 0  # of the newest event of the global batch, in seconds since 1970; 0: not known
    id_weights: npt.NDArray[Any] | None = None  # sum(lengths): what the row of each id is multiplied by

    def take(self, places: npt.NDArray[np.int64]) -> Samples:
        """Some of the samples, in the order given."""
        lengths = np.ascontiguousarray(self.lengths[:, places])
        begins = (np.cumsum(self.lengths.reshape(-1), dtype=np.int64) - self.lengths.reshape(-1)).reshape(
            self.lengths.shape
        )[:, places]
        each = lengths.reshape(-1)
        # The n-th id of a sample's feature is n places after the first; one subtraction makes all n.
        firsts = np.repeat(begins.reshape(-1) - (np.cumsum(each, dtype=np.int64) - each), each)
        return self.part(places, lengths, ids=firsts + np.arange(len(firsts)))

    def part(
        self,
        places: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32],
        *,
        values: npt.NDArray[np.int64] | None = None,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> Samples:
        """Some of the samples, given their ids, or the places of these; they know the totals of all."""
        return Samples(
            self.features,
            self.values[ids] if values is None else values,
            lengths,
            self.dense[places],
            None if self.labels is None else self.labels[places],
            self.index[places],
            None if self.weights is None else self.weights[places],
            None if self.groups is None else self.groups[places],
            self.global_totals(),
            self.time,
            None if self.id_weights is None else self.id_weights[ids],
        )

    def global_totals(self) -> npt.NDArray[np.float64] | None:
        """Count, over the global batch, what losses may be divided by; None for one label without weights.

        That is the sum of the weights, the samples that have each label, and the sum of the weights of those.
        By itself these are the whole global batch.
        """
        if self.totals is not None or self.labels is None or (self.labels.ndim == 1 and self.weights is None):
            return self.totals
        known = ~np.isnan(self.labels.reshape(len(self), -1))
        weights = np.ones(len(self)) if self.weights is None else self.weights.astype(np.float64)
        weighted = np.where(known, weights[:, np.newaxis], 0.0)
        return np.concatenate([[weights.sum()], known.sum(axis=0), weighted.sum(axis=0)]).astype(np.float64)

    def ids_of_features(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each feature, of all samples together."""
        return np.split(self.values, np.cumsum(self.lengths.sum(axis=1, dtype=np.int64))[:-1])

    def __len__(self) -> int:
        return len(self.index)
