"""A planned batch as one unnamed file, which other processes map instead of copying it; and data as bytes.

The file begins with a description of the plan's fields, by `marshal`, as all ranks of a host run the same
version; arrays follow at the offsets it gives. Classes are described by their fields, so a plan may get new
ones. Files are reused, and the leader keeps them mapped: new memory, and the kernel's copies, cost more than
writing into it.
"""

from __future__ import annotations

import fcntl
import marshal
import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.data.block import Block
from rowhaul.data.column_shares import DecodedColumns
from rowhaul.data.columns import Ids
from rowhaul.data.samples import Samples
from rowhaul.data.targets import Targets
from rowhaul.planning.planner import PlannedBatch
from rowhaul.schedule import ControlRecord, IdBatch, Moves, Plan, Steps
from rowhaul.schedule.plan import LiveRows

# The classes in a planned batch or decoded data, and their fields; packing refuses anything else.
_CLASSES: tuple[type[Any], ...] = (
    PlannedBatch, Plan, Moves, Steps, LiveRows, IdBatch, ControlRecord, Samples,
    DecodedColumns, Block, Ids, Targets,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_CLASSES)}
_FIELDS = [tuple(field.name for field in fields(kind)) for kind in _CLASSES]
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_ARRAY, _TUPLE = -1, -2  # what is described, instead of the number of a class
_PREFIX = struct.Struct("<8sQ")  # what the file is, and the length of the description that follows
_MAGIC = b"rowhaul2"
_ALIGNMENT = 64  # bytes: a cache line, and enough for any type
ONCE = 0  # the number of files that are not reused
_MOST_FILES = 8  # that are kept; a plan is out of use some three plans later


class PackedFile(NamedTuple):
    """A plan in a file."""

    number: int
    descriptor: int
    size: int


class PlanFiles:
    """Reusable files by number, and the readers of each; for one thread.

    A reader maps a file and releases it when nothing refers to the plan any more. Until all readers have,
    the next plan uses another file.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._memories: dict[int, npt.NDArray[np.uint8]] = {}
        self._readers: dict[int, set[int]] = {}

    def pack(self, planned: PlannedBatch, readers: Iterable[int]) -> PackedFile:
        """Write a plan into a file for these readers; the caller closes one of number `ONCE`."""
        number = next((one for one, having in self._readers.items() if not having), ONCE)
        if number == ONCE and len(self._descriptors) < _MOST_FILES:
            number = len(self._descriptors) + 1
            self._descriptors[number] = _unnamed_file()
            _seal(self._descriptors[number], "SHRINK")
        if number == ONCE:
            return PackedFile(ONCE, *pack(planned))
        arranged = Arranged(planned)
        arranged.write_to(self._memory(number, arranged.size))
        self._readers[number] = set(readers)
        return PackedFile(number, self._descriptors[number], arranged.size)

    def _memory(self, number: int, size: int) -> npt.NDArray[np.uint8]:
        """Map a file, large enough; a larger one is mapped anew."""
        held = self._memories.get(number)
        if held is None or held.size < size:
            capacity = size + size // 4
            os.ftruncate(self._descriptors[number], capacity)
            held = np.frombuffer(_map(self._descriptors[number], capacity, shared=True), np.uint8)
            self._memories[number] = held
        return held

    def give_back(self, number: int, reader: int) -> None:
        """Release a file for one reader."""
        if number in self._readers:
            self._readers[number].discard(reader)

    def close(self) -> None:
        """Close all files; existing mappings stay valid."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._memories.clear()
        self._readers.clear()


def pack(planned: PlannedBatch) -> tuple[int, int]:
    """Write a planned batch into a new unnamed file; return its descriptor and size."""
    file = _unnamed_file()
    try:
        arranged = Arranged(planned)
        memory = np.empty(arranged.size, np.uint8)
        arranged.write_to(memory)
        _write(file, memory.data)
        _seal(file, "SHRINK", "GROW", "WRITE", "SEAL")
    except BaseException:
        os.close(file)
        raise
    return file, arranged.size


class Arranged:
    """A planned batch, or decoded data, as it lies in memory: the description, then the arrays."""

    def __init__(self, packed: PlannedBatch | DecodedColumns) -> None:
        self._arrays: list[tuple[int, npt.NDArray[Any]]] = []  # where each begins behind the description
        self._end = 0
        text = marshal.dumps(self._describe(packed))
        self._beginning = _PREFIX.pack(_MAGIC, len(text)) + text
        self._start = _padded(len(self._beginning))
        self.size = self._start + self._end

    def write_to(self, memory: npt.NDArray[np.uint8]) -> None:
        """Copy everything to the beginning of a memory."""
        memory[: len(self._beginning)] = np.frombuffer(self._beginning, np.uint8)
        for offset, array in self._arrays:
            first = self._start + offset
            memory[first : first + array.nbytes] = array.view(np.uint8)

    def _describe(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind in "biufc":
            offset, size = self._end, value.nbytes
            if size:
                self._arrays.append((offset, np.ascontiguousarray(value).reshape(-1)))
                self._end += _padded(size)
            return _ARRAY, value.dtype.str, value.shape, offset
        if kind in _PLAIN:
            return value
        number = _NUMBERS.get(kind)
        if number is not None:
            return number, *[self._describe(getattr(value, name)) for name in _FIELDS[number]]
        if kind is tuple:
            return _TUPLE, *map(self._describe, value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, int | float | str):  # such as a member of an IntEnum
            return _plain(value)
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {kind.__qualname__}"
        raise TypeError(f"{what} inside a plan cannot be shared between processes")


def unpack(file: int, size: int, when_unused: Callable[[], object] | None = None) -> PlannedBatch:
    """Map a planned batch from a file; its arrays are views of the mapping.

    The mapping is private: writing to an array changes neither the file nor other processes' data.
    (Read-only arrays would be other types to Numba, with more kernels to compile, and PyTorch warns about
    them.) The caller keeps the descriptor. ``when_unused`` is called, in any thread, once no array is left.
    """
    mapped = _map(file, size)
    if when_unused is not None:
        weakref.finalize(mapped, when_unused).atexit = False
    planned = restore(memoryview(mapped))
    assert isinstance(planned, PlannedBatch)
    return planned


def restore(memory: memoryview) -> Any:
    """Rebuild what was `Arranged` in some memory; its arrays are views."""
    magic, length = _PREFIX.unpack_from(memory)
    if magic != _MAGIC:
        raise ValueError(f"this is neither a planned batch nor decoded data: it begins with {magic!r}")
    end = _PREFIX.size + length
    return _restore(marshal.loads(memory[_PREFIX.size : end]), memory, _padded(end))


def _restore(description: Any, memory: memoryview, start: int) -> Any:
    """Rebuild a described value; its arrays are views of ``memory`` from ``start`` on."""
    if type(description) is not tuple:
        return description
    what = description[0]
    if what == _ARRAY:
        _, dtype, shape, offset = description
        if 0 in shape:
            return np.zeros(shape, _dtype(dtype))
        return np.ndarray(shape, _dtype(dtype), memory, start + offset)
    if what == _TUPLE:
        return tuple([_restore(item, memory, start) for item in description[1:]])
    made = object.__new__(_CLASSES[what])  # without its checks, which the leader made
    values = made.__dict__
    for name, value in zip(_FIELDS[what], description[1:], strict=True):
        values[name] = _restore(value, memory, start)
    return made


@cache
def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)


def _plain(value: int | float | str) -> int | float | str:
    """The number or text that an object of a derived class is."""
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rowhaul-plan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, data: memoryview) -> None:
    """Write everything, in as many calls as the system needs."""
    while data:
        data = data[os.write(file, data) :]


def _seal(file: int, *against: str) -> None:
    """Forbid operations on a file: if it shrank, processes that map it would be killed."""
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        seals = sum(getattr(fcntl, f"F_SEAL_{one}") for one in against)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)


def _map(file: int, size: int, *, shared: bool = False) -> mmap.mmap:
    access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
    if sys.version_info >= (3, 13):  # before, every mapping keeps a descriptor of its own
        return mmap.mmap(file, size, access=access, trackfd=False)
    return mmap.mmap(file, size, access=access)
