"""A run of samples as NumPy columns: what readers yield and schedulers look at."""

from __future__ import annotations

from dataclasses import dataclass

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
    labels: npt.NDArray[np.float32] | None  # samples
    index: npt.NDArray[np.int64]  # samples: position of each in the whole stream
    time: int = 0  # of the newest event of the global batch, in seconds since 1970; 0: not known

    def take(self, places: npt.NDArray[np.int64]) -> Samples:
        """Some of the samples, in the order given."""
        lengths = np.ascontiguousarray(self.lengths[:, places])
        begins = (np.cumsum(self.lengths.reshape(-1), dtype=np.int64) - self.lengths.reshape(-1)).reshape(
            self.lengths.shape
        )[:, places]
        each = lengths.reshape(-1)
        # The n-th id of a sample's feature is n places after the first; one subtraction makes all n.
        firsts = np.repeat(begins.reshape(-1) - (np.cumsum(each, dtype=np.int64) - each), each)
        values = self.values[firsts + np.arange(len(firsts))]
        labels = None if self.labels is None else self.labels[places]
        index = self.index[places]
        return Samples(self.features, values, lengths, self.dense[places], labels, index, self.time)

    def ids_of_features(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each feature, of all samples together."""
        return np.split(self.values, np.cumsum(self.lengths.sum(axis=1, dtype=np.int64))[:-1])

    def __len__(self) -> int:
        return len(self.index)
