"""What a scheduler knows as arrays by name: written into checkpoints, read back with suspicion.

Names are flat ("caches.workers"), arrays plain, text is UTF-8 in bytes: any format that holds arrays
holds them, and nothing needs pickle. Kernels trust what they are given, so whatever comes back is
checked here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError

Arrays = dict[str, npt.NDArray[Any]]


def named(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays of a part, named as such."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def text_array(text: str) -> npt.NDArray[np.uint8]:
    """Text as an array."""
    return np.frombuffer(text.encode(), np.uint8).copy()


class Saved:
    """Arrays that were saved, or those of one part, checked as they are taken out."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], prefix: str = "") -> None:
        self._arrays = arrays
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._arrays

    def part(self, name: str) -> Saved:
        """What `named` has put under this name."""
        return Saved(self._arrays, f"{self._prefix}{name}.")

    def array(
        self, name: str, dtype: type[np.generic], length: int | None = None, *, below: int | None = None
    ) -> npt.NDArray[Any]:
        """A copy of a row of numbers, so many of them; with ``below`` all from 0 up to it, without it."""
        given = self._get(name)
        if given.dtype != dtype or given.ndim != 1 or length not in (None, len(given)):
            wanted = f"{'any number of' if length is None else length} {np.dtype(dtype)}"
            self._refuse(name, f"{wanted} are needed, {given.dtype} of shape {given.shape} was found")
        if below is not None and len(given) and not 0 <= given.min() <= given.max() < below:
            self._refuse(name, f"{given.min()} to {given.max()} was found, only 0 to {below - 1} can be")
        return np.array(given)

    def number(self, name: str) -> int:
        """A single whole number."""
        return int(self.array(name, np.int64, 1)[0])

    def text(self, name: str) -> str:
        """A text."""
        try:
            return self.array(name, np.uint8).tobytes().decode()
        except UnicodeDecodeError:
            self._refuse(name, "it is no text")
            raise

    def _get(self, name: str) -> npt.NDArray[Any]:
        if name not in self:
            raise CheckpointError(f"the saved state of the scheduler lacks {self._prefix}{name}")
        return np.asarray(self._arrays[self._prefix + name])

    def _refuse(self, name: str, reason: str) -> None:
        raise CheckpointError(f"the saved state of the scheduler is damaged: {self._prefix}{name}: {reason}")
