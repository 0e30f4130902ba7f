"""Plain arrays: hash them, grow them, and export and restore a scheduler's state as arrays by name.

Hashes guard against mistakes, not against malice, and are computed in every iteration: hence xxHash.

Names of saved arrays are flat ("caches.workers"), text is UTF-8 bytes: any format that holds arrays can hold
a state, and nothing needs pickle. Kernels trust their input, so `Saved` checks everything that it reads.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.errors import CheckpointError

DIGEST_BYTES = 16
_SMALL_BYTES = 1 << 20  # copying less costs nothing
_ROOM = 64  # times what was asked for
_MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on

Arrays = dict[str, npt.NDArray[Any]]


def digest(text: str, arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    """A hash of the text and of the type, the shape and the content of every array."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    shapes = ";".join(f"{array.dtype.str}{array.shape}" for array in arrays)
    state = xxhash.xxh3_128(f"{len(text)}:{text}{shapes}".encode())
    for array in arrays:
        state.update(array.data)
    return state.digest()


def extended(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The array with zeros after it: the same memory where `zeros` has left room, and nothing is copied.

    Nobody may have written beyond the array: it must be the longest that shares its memory.
    """
    room = array
    while isinstance(room.base, np.ndarray):
        room = room.base
    owner: object = room.base
    if isinstance(owner, memoryview) and length * array.itemsize <= room.nbytes:  # reserved by `zeros`
        return room[: length * array.itemsize].view(array.dtype)
    longer = zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer


def zeros(length: int, dtype: npt.DTypeLike, room_to_grow: int = _ROOM) -> npt.NDArray[Any]:
    """Zeros; if they are many, with room to grow to as many times their length without a copy.

    Only addresses are reserved: memory is taken where it is written to. Where a system grants no such
    reservation, these are ordinary zeros.
    """
    num_bytes = length * np.dtype(dtype).itemsize
    if num_bytes < _SMALL_BYTES or not sys.platform.startswith("linux"):
        return np.zeros(length, dtype)
    try:
        room = mmap.mmap(-1, num_bytes * room_to_grow, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return np.zeros(length, dtype)
    return np.frombuffer(room, np.uint8)[:num_bytes].view(dtype)


def extended_stack(free: npt.NDArray[np.int32], num_free: int, length: int) -> npt.NDArray[np.int32]:
    """A stack of free places with the new ones up to ``length`` on top, the lowest of them first to go.

    It has room for all places, so its length is their number so far.
    """
    longer = extended(free, length)
    longer[num_free : num_free + length - len(free)] = np.arange(length - 1, len(free) - 1, -1)
    return longer


def named(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays of a part, named as such."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def text_array(text: str) -> npt.NDArray[np.uint8]:
    """Text as an array."""
    return np.frombuffer(text.encode(), np.uint8).copy()


class Saved:
    """Saved arrays, or those of one part, checked as they are read."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], prefix: str = "") -> None:
        self._arrays = arrays
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._arrays

    def part(self, name: str) -> Saved:
        """The part that `named` has put under this name."""
        return Saved(self._arrays, f"{self._prefix}{name}.")

    def array(
        self, name: str, dtype: type[np.generic], length: int | None = None, *, below: int | None = None
    ) -> npt.NDArray[Any]:
        """A copy of a one-dimensional array of this length; with ``below``, all from 0 to below it."""
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
