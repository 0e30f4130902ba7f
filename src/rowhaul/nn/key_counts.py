"""How many of the keys that a model reads have no row: they were never trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.store import Lookup


class KeyCounts:
    """Ids that were read, and those without a row, by feature."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}
        self.unknown: dict[str, int] = {}

    def add(self, features: Sequence[str], starts: npt.NDArray[np.int64], lookup: Lookup) -> None:
        """Count a batch: feature ``f`` has the ids from ``starts[f]`` on."""
        is_unknown = lookup.locations < 0
        unknown = np.zeros(len(features), np.int64)
        if is_unknown.any():
            before = np.concatenate([[0], np.cumsum(is_unknown[lookup.inverse])])
            unknown = np.diff(before[starts])
        for name, all_ids, some in zip(features, np.diff(starts).tolist(), unknown.tolist(), strict=True):
            self.read[name] = self.read.get(name, 0) + all_ids
            self.unknown[name] = self.unknown.get(name, 0) + some

    def add_counts(self, counts: Iterable[Mapping[str, int]]) -> None:
        """Add what another process counted: ids read, then unknown ones."""
        for mine, theirs in zip((self.read, self.unknown), counts, strict=True):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count

    @property
    def share(self) -> float | None:
        """The share of unknown ids; None if nothing was counted."""
        total = sum(self.read.values())
        return sum(self.unknown.values()) / total if total else None

    @property
    def shares(self) -> dict[str, float]:
        """The share of unknown ids of each feature that had any."""
        return {name: self.unknown[name] / count for name, count in sorted(self.read.items()) if count}
