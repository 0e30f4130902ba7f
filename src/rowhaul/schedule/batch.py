"""The ids of one global batch: all that a scheduler ever sees of the data.

Ids are pairs (table, key), sample by sample. Readers hold them feature by feature, so the usual way
in is `IdBatch.from_features`, which turns them around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import DataError
from rowhaul.schedule.digest import digest
from rowhaul.schedule.kernels import least_and_sum, to_sample_major


@dataclass(frozen=True)
class IdBatch:
    """The rows that each sample of a batch needs; a sample may name a row more than once, or none."""

    offsets: npt.NDArray[np.int64]  # samples + 1: sample i's ids are offsets[i] .. offsets[i + 1]
    tables: npt.NDArray[np.int32]  # ids
    keys: npt.NDArray[np.int64]  # ids

    def __post_init__(self) -> None:
        for name, kind in (("offsets", np.int64), ("tables", np.int32), ("keys", np.int64)):
            array = np.asarray(getattr(self, name))
            if array.ndim != 1 or not np.can_cast(array.dtype, kind, "same_kind"):
                raise DataError(
                    f"{name} must be a row of {np.dtype(kind)}; got {array.dtype} of shape {array.shape}"
                )
            object.__setattr__(self, name, np.ascontiguousarray(array, kind))
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.keys):
            raise DataError(
                f"offsets must start at 0 and end at the number of ids, {len(self.keys)}; "
                f"got {self.offsets[[0, -1]].tolist() if len(self.offsets) else 'none'}"
            )
        if len(self.tables) != len(self.keys):
            raise DataError(f"{len(self.tables)} tables were given for {len(self.keys)} keys")
        if np.any(np.diff(self.offsets) < 0):
            raise DataError("offsets must not decrease")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def digest(self) -> bytes:
        """A hash of the ids: ranks that read different samples differ here."""
        return digest("", (self.offsets, self.tables, self.keys))

    @classmethod
    def from_features(
        cls, feature_tables: Sequence[int], values: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
    ) -> IdBatch:
        """Turn feature-major ids (as readers yield them) into sample-major ones.

        Args:
            feature_tables: the number of the table that each feature looks its ids up in.
            values: all ids of the first feature, sample by sample, then all of the second, and so on.
            lengths: features x samples, how many ids each sample has of each feature.
        """
        values, lengths = np.asarray(values), np.asarray(lengths)
        if values.dtype.kind not in "iu" and values.size:
            raise DataError(
                f"ids must be integers; got {values.dtype} "
                "(strings become integers with rowhaul.data.keys.hash_strings)"
            )
        if lengths.ndim != 2 or lengths.shape[0] != len(feature_tables):
            raise DataError(
                f"lengths must be features x samples, with {len(feature_tables)} features; "
                f"got {lengths.shape}"
            )
        lengths = np.asarray(lengths, np.int32)
        least, total = least_and_sum(lengths)
        if least < 0:
            raise DataError(f"lengths must not be negative; got {least}")
        if total != len(values):
            raise DataError(f"lengths add up to {total}, but there are {len(values)} ids")
        made = object.__new__(cls)  # past its checks: what follows has passed them
        turned = to_sample_major(np.asarray(feature_tables, np.int32), np.asarray(values, np.int64), lengths)
        for name, array in zip(("offsets", "tables", "keys"), turned, strict=True):
            object.__setattr__(made, name, array)
        return made
