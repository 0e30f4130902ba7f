"""A planned batch as one unnamed file, which other processes map instead of copying it.

The file begins with a description of the plan's fields in JSON; arrays follow at the offsets it gives.
Classes are described by their fields, so a plan may get new ones. Files are reused: new memory costs more
than writing into it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.planning.planner import PlannedBatch
from rowhaul.schedule import ControlRecord, IdBatch, Moves, Plan, Steps
from rowhaul.schedule.plan import LiveRows

# The classes in a planned batch; packing refuses anything else.
_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (PlannedBatch, Plan, Moves, Steps, LiveRows, IdBatch, ControlRecord, Samples)
}
_PREFIX = struct.Struct("<8sQ")  # what the file is, and the length of the description that follows
_MAGIC = b"rowhaul1"
_ALIGNMENT = 64  # bytes: a cache line, and enough for any type
_MAX_BUFFERS = 512  # in one system call; every system allows at least 1,024
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
        size = _pack_into(self._descriptors[number], planned)
        self._readers[number] = set(readers)
        return PackedFile(number, self._descriptors[number], size)

    def give_back(self, number: int, reader: int) -> None:
        """Release a file for one reader."""
        if number in self._readers:
            self._readers[number].discard(reader)

    def close(self) -> None:
        """Close all files; existing mappings stay valid."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._readers.clear()


def pack(planned: PlannedBatch) -> tuple[int, int]:
    """Write a planned batch into a new unnamed file; return its descriptor and size."""
    file = _unnamed_file()
    try:
        size = _pack_into(file, planned)
        _seal(file, "SHRINK", "GROW", "WRITE", "SEAL")
    except BaseException:
        os.close(file)
        raise
    return file, size


def _pack_into(file: int, planned: PlannedBatch) -> int:
    """Overwrite a file with a planned batch; return its size."""
    arrays: list[npt.NDArray[Any]] = []
    description = json.dumps(_describe(planned, arrays, 0)[0], separators=(",", ":")).encode()
    beginning = _PREFIX.pack(_MAGIC, len(description)) + description
    buffers = [memoryview(beginning), _padding(len(beginning))]
    for array in arrays:
        buffers += [array.view(np.uint8).data, _padding(array.nbytes)]
    return _write(file, buffers)


def unpack(file: int, size: int, when_unused: Callable[[], object] | None = None) -> PlannedBatch:
    """Map a planned batch from a file; its arrays are views of the mapping.

    The mapping is private: writing to an array changes neither the file nor other processes' data.
    (Read-only arrays would be other types to Numba, with more kernels to compile, and PyTorch warns about
    them.) The caller keeps the descriptor. ``when_unused`` is called, in any thread, once no array is left.
    """
    mapped = _map(file, size)
    if when_unused is not None:
        weakref.finalize(mapped, when_unused).atexit = False
    memory = memoryview(mapped)
    magic, length = _PREFIX.unpack_from(memory)
    if magic != _MAGIC:
        raise ValueError(f"this is not a planned batch: its file begins with {magic!r}")
    end = _PREFIX.size + length
    description = json.loads(bytes(memory[_PREFIX.size : end]))
    planned = _restore(description, memory, end + -end % _ALIGNMENT)
    assert isinstance(planned, PlannedBatch)
    return planned


def _describe(value: Any, arrays: list[npt.NDArray[Any]], end: int) -> tuple[Any, int]:
    """Describe a value in JSON; append its arrays to ``arrays``, which take ``end`` bytes so far."""
    if value is None or isinstance(value, bool | int | float | str):
        return value, end
    if isinstance(value, np.generic):
        return value.item(), end
    if isinstance(value, bytes):
        return {"bytes": value.hex()}, end
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        if value.size:
            arrays.append(np.ascontiguousarray(value).reshape(-1))
        padded_bytes = value.nbytes + -value.nbytes % _ALIGNMENT
        return {"array": [value.dtype.str, value.shape, end]}, end + padded_bytes
    if isinstance(value, tuple):
        items: list[Any] = [None] * len(value)
        for place, item in enumerate(value):
            items[place], end = _describe(item, arrays, end)
        return {"tuple": items}, end
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        inside: dict[str, Any] = {}
        for field in fields(value):
            inside[field.name], end = _describe(getattr(value, field.name), arrays, end)
        return {"class": type(value).__name__, "fields": inside}, end
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__qualname__}"
    raise TypeError(f"{what} inside a plan cannot be shared between processes")


def _restore(description: Any, memory: memoryview, start: int) -> Any:
    """Rebuild a described value; its arrays are views of ``memory`` from ``start`` on."""
    if not isinstance(description, dict):
        return description
    if "array" in description:
        dtype, shape, offset = description["array"]
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.ndarray(shape, dtype, memory, start + offset)
    if "bytes" in description:
        return bytes.fromhex(description["bytes"])
    if "tuple" in description:
        return tuple(_restore(item, memory, start) for item in description["tuple"])
    kind = _CLASSES[description["class"]]
    made = object.__new__(kind)  # without its checks, which the leader made
    for name, value in description["fields"].items():
        object.__setattr__(made, name, _restore(value, memory, start))
    return made


def _padding(size: int) -> memoryview:
    return memoryview(bytes(-size % _ALIGNMENT))


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rowhaul-plan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, buffers: list[memoryview]) -> int:
    """Write all buffers, in as many calls as the system needs; return the number of bytes."""
    waiting = [buffer for buffer in buffers if len(buffer)][::-1]
    size = 0
    os.lseek(file, 0, os.SEEK_SET)
    while waiting:
        written = os.writev(file, waiting[: -_MAX_BUFFERS - 1 : -1])
        size += written
        while waiting and written >= len(waiting[-1]):
            written -= len(waiting.pop())
        if waiting:
            waiting[-1] = waiting[-1][written:]
    return size


def _seal(file: int, *against: str) -> None:
    """Forbid operations on a file: if it shrank, processes that map it would be killed."""
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        seals = sum(getattr(fcntl, f"F_SEAL_{one}") for one in against)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)


def _map(file: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # before, every mapping keeps a descriptor of its own
        return mmap.mmap(file, size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY)
