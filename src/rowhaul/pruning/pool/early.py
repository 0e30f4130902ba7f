"""Rows of batches to come, located in the thread that loads them.

What was found is kept under the batch's ids until these are read, once, and dropped with them if they never
are.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.pruning.deciding.located import Located

FoundRows = tuple[Located, slice | npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Entries of a group's rows, which ids of the batch they are, and the offsets of their bags."""


class EarlyLookups:
    """Lookups of batches that were not read yet; any thread may put and take."""

    def __init__(self) -> None:
        self._forget_all()

    def _forget_all(self) -> None:
        self._found: WeakKeyDictionary[KeyedJaggedTensor, list[FoundRows]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # of a copy (pickle, deepcopy) nobody reads the same batches

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_all()

    def __len__(self) -> int:
        return len(self._found)

    def put(self, features: KeyedJaggedTensor, found: list[FoundRows]) -> None:
        """Keep what was found for a batch."""
        with self._lock:
            self._found[features] = found

    def take(self, features: KeyedJaggedTensor) -> list[FoundRows] | None:
        """What was found for a batch, if anything was; no longer kept."""
        with self._lock:
            return self._found.pop(features, None)
