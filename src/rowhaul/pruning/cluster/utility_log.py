"""The utilities of gradients that a worker has measured since the last pruning.

They decide nothing until rows are pruned, so they do not travel with rows: every worker adds up its own, and
reports once a period. Of a row that several workers train in one iteration each adds the norm of its own part
of the gradient, times the accesses of all: together that is at least what the norm of the sum would give, and
the same where one of them trains it alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.utilities import decay_powers, decayed
from rowhaul.store.index import KeyIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


class UtilityLog:
    """Utilities of the rows that one worker has trained, by their numbers.

    Args:
        num_chunks: of a row.
        decay: of utilities, by step.
    """

    def __init__(self, num_chunks: int, decay: float) -> None:
        self._num_chunks, self._powers = num_chunks, decay_powers(decay)
        self.clear()

    def __len__(self) -> int:
        return int(self._index.num_keys[0])

    def add(self, numbers: npt.NDArray[Any], amounts: npt.NDArray[np.float64], now: int) -> None:
        """Add amounts to the utilities of rows, each once, in step ``now``."""
        places = self._find_or_add(numbers.astype(np.int64), now)
        kept = decayed(self._powers, now - self._touched[places])
        self._utilities[places] = kept[:, None] * self._utilities[places].astype(np.float64) + amounts
        self._touched[places] = now

    def report(self, now: int) -> tuple[npt.NDArray[np.int32], Floats]:
        """All rows, ascending, and their utilities as they are after step ``now``."""
        numbers, places = self._rows()
        kept = decayed(self._powers, now - self._touched[places])
        utilities = kept[:, None] * self._utilities[places].astype(np.float64)
        return numbers.astype(np.int32), utilities.astype(np.float32)

    def export(self) -> Arrays:
        """Everything, to continue from."""
        numbers, places = self._rows()
        return {
            "numbers": numbers,
            "utilities": self._utilities[places],
            "touched": self._touched[places],
        }

    def restore(self, arrays: Arrays) -> None:
        """Continue where `export` was called."""
        self.clear()
        places = self._find_or_add(arrays["numbers"], 0)
        self._utilities[places], self._touched[places] = arrays["utilities"], arrays["touched"]

    def clear(self) -> None:
        """Begin anew: everything was reported."""
        self._index = KeyIndex(1)
        self._utilities: Floats = np.zeros((0, self._num_chunks), np.float32)
        self._touched: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def _find_or_add(self, numbers: Ints, now: int) -> Ints:
        starts = np.array([0, len(numbers)])
        places, num_absent = self._index.find(numbers, starts)
        if int(num_absent):
            count = len(self)
            self._reserve(count + int(num_absent))
            new = np.arange(count, count + int(num_absent))
            self._index.insert(numbers, starts, places, num_absent, new)
            self._utilities[new], self._touched[new] = 0, now
        return places

    def _reserve(self, count: int) -> None:
        if count > len(self._touched):
            larger = max(count, len(self._touched) * 3 // 2, 1024)
            for name in ("_utilities", "_touched"):
                old = getattr(self, name)
                new = np.zeros((larger, *old.shape[1:]), old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)

    def _rows(self) -> tuple[Ints, Ints]:
        blocks = [(np.empty(0, np.int64), np.empty(0, np.int64)), *self._index.blocks(0)]
        numbers = np.concatenate([keys for keys, _ in blocks])
        places = np.concatenate([found for _, found in blocks])
        order = np.argsort(numbers)
        return numbers[order], places[order]
