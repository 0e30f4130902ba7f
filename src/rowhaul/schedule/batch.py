"""The ids of one global batch: all that a scheduler ever sees of the data.

Ids are pairs (table, key), sample by sample. Readers hold them feature by feature, so batches are usually
made by `IdBatch.from_features`. They are transposed on first use: a scheduler finds the distinct rows of a
table faster while its ids lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.errors import DataError
from rowhaul.schedule.arrays import digest

SAMPLES_AT_ONCE = 64  # transposed together, so that writes stay in the fastest memory


@dataclass(frozen=True)
class ByFeature:
    """The same ids feature by feature."""

    tables: npt.NDArray[np.int32]  # features
    values: npt.NDArray[np.int64]  # ids
    lengths: npt.NDArray[np.int32]  # features x samples
    counts: npt.NDArray[np.int64]  # features: ids of each
    is_simple: bool  # features have different tables, ascending, and samples at most one id of each


@dataclass(frozen=True)
class IdBatch:
    """The rows that each sample of a batch needs; a sample may name a row more than once, or none."""

    offsets: npt.NDArray[np.int64]  # samples + 1: sample i's ids are offsets[i] .. offsets[i + 1]
    tables: npt.NDArray[np.int32]  # ids
    keys: npt.NDArray[np.int64]  # ids
    time: int = 0  # of the newest event, in seconds since 1970; 0: not known

    # Set by `from_features`; the arrays above then follow on first use.
    by_feature: ClassVar[ByFeature | None] = None

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> npt.NDArray[np.int64]:
            """Transpose the ids on first use."""
            given = self.__dict__.get("by_feature")
            if given is None or name not in ("offsets", "tables", "keys"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            turned = to_sample_major(given.tables, given.values, given.lengths)
            for one, array in zip(("offsets", "tables", "keys"), turned, strict=True):
                object.__setattr__(self, one, array)
            return self.__dict__[name]

    def __len__(self) -> int:
        return self.by_feature.lengths.shape[1] if self.by_feature is not None else len(self.offsets) - 1

    def without_rows(self) -> IdBatch:
        """As many samples that need no rows."""
        nothing = np.zeros(len(self) + 1, np.int64)
        return IdBatch(nothing, np.zeros(0, np.int32), np.zeros(0, np.int64), self.time)

    def digest(self) -> bytes:
        """A hash of the ids and the time: it differs between ranks that read different samples."""
        return digest(str(self.time or ""), (self.offsets, self.tables, self.keys))

    @classmethod
    def from_features(
        cls,
        feature_tables: Sequence[int],
        values: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32],
        time: int = 0,
    ) -> IdBatch:
        """A batch of feature-major ids, as readers yield them; the arrays are not copied and must not change.

        Args:
            feature_tables: the number of the table that each feature looks its ids up in.
            values: all ids of the first feature, sample by sample, then all of the second, and so on.
            lengths: features x samples, how many ids each sample has of each feature.
            time: of the newest event, in seconds since 1970; 0: not known.
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
        lengths = np.ascontiguousarray(lengths, np.int32)
        least, most, counts = least_most_and_sums(lengths)
        total = counts.sum()
        if least < 0:
            raise DataError(f"lengths must not be negative; got {least}")
        if total != len(values):
            raise DataError(f"lengths add up to {total}, but there are {len(values)} ids")
        tables = np.asarray(feature_tables, np.int32)
        is_simple = most <= 1 and bool((np.diff(tables) > 0).all()) and (not len(tables) or tables[0] >= 0)
        made = object.__new__(cls)  # without __post_init__: everything is checked above
        values = np.ascontiguousarray(values, np.int64)
        object.__setattr__(made, "by_feature", ByFeature(tables, values, lengths, counts, bool(is_simple)))
        object.__setattr__(made, "time", time)
        return made


@kernel
def least_most_and_sums(lengths):
    """The smallest number or 0, the largest or 0, and the sum of each row."""
    least, most = np.int32(0), np.int32(0)
    sums = np.zeros(lengths.shape[0], np.int64)
    for f in range(lengths.shape[0]):
        total = np.int64(0)
        for i in range(lengths.shape[1]):
            least = min(least, lengths[f, i])
            most = max(most, lengths[f, i])
            total += lengths[f, i]
        sums[f] = total
    return least, most, sums


@kernel
def to_sample_major(feature_tables, values, lengths):
    """Offsets, tables and keys sample by sample, from ids held feature by feature."""
    num_features, num_samples = lengths.shape
    offsets = np.zeros(num_samples + 1, np.int64)
    for f in range(num_features):
        for i in range(num_samples):
            offsets[i + 1] += lengths[f, i]
    for i in range(num_samples):
        offsets[i + 1] += offsets[i]
    reading = np.zeros(num_features, np.int64)  # features: the next id
    for f in range(1, num_features):
        reading[f] = reading[f - 1]
        for i in range(num_samples):
            reading[f] += lengths[f - 1, i]
    num_ids = len(values)
    tables = np.empty(num_ids + 1, np.int32)  # one more: scratch
    keys = np.empty(num_ids + 1, np.int64)
    writing = offsets[:-1].copy()
    for first in range(0, num_samples, SAMPLES_AT_ONCE):
        end = min(first + SAMPLES_AT_ONCE, num_samples)
        for f in range(num_features):
            table, at = feature_tables[f], reading[f]
            for i in range(first, end):
                place, length = writing[i], np.int64(lengths[f, i])
                writing[i] = place + length
                if length > 1:
                    for n in range(length):
                        tables[place + n] = table
                        keys[place + n] = values[at + n]
                else:  # without a branch: missing ids are unpredictable
                    place = place if length == 1 else num_ids
                    tables[place] = table
                    keys[place] = values[min(at, num_ids - 1)] if num_ids > 0 else 0
                at += length
            reading[f] = at
    return offsets, tables[:num_ids], keys[:num_ids]
