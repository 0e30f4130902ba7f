"""A planned batch as one file without a name, which other processes map instead of copying it.

The file begins with a description of the plan's fields in JSON; arrays stand behind it, each where the
description says. Classes are described by whatever fields they have, so a plan may grow new ones.
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
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.planning.planner import PlannedBatch
from rowhaul.schedule import ControlRecord, IdBatch, Moves, Plan, Steps
from rowhaul.schedule.plan import LiveRows

# What a planned batch is made of; anything else inside it is refused when it is packed.
_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (PlannedBatch, Plan, Moves, Steps, LiveRows, IdBatch, ControlRecord, Samples)
}
_PREFIX = struct.Struct("<8sQ")  # what the file is, and the length of the description that follows
_MAGIC = b"rowhaul1"
_ALIGNMENT = 64  # bytes: a cache line, and enough for any type
_MAX_BUFFERS = 512  # in one system call; every system allows at least 1,024


def pack(planned: PlannedBatch) -> tuple[int, int]:
    """Write a planned batch into a new file without a name; gives its descriptor and its size."""
    file = _unnamed_file()
    try:
        size = pack_into(file, planned)
        _seal(file, "SHRINK", "GROW", "WRITE", "SEAL")
    except BaseException:
        os.close(file)
        raise
    return file, size


def new_file() -> int:
    """The descriptor of a new file without a name, to be packed into again and again; it never shrinks."""
    file = _unnamed_file()
    _seal(file, "SHRINK")
    return file


def pack_into(file: int, planned: PlannedBatch) -> int:
    """Write a planned batch into a file, over what is there; gives its size."""
    arrays: list[npt.NDArray[Any]] = []
    description = json.dumps(_describe(planned, arrays, 0)[0], separators=(",", ":")).encode()
    beginning = _PREFIX.pack(_MAGIC, len(description)) + description
    buffers = [memoryview(beginning), _padding(len(beginning))]
    for array in arrays:
        buffers += [array.view(np.uint8).data, _padding(array.nbytes)]
    return _write(file, buffers)


def unpack(file: int, size: int, when_unused: Callable[[], object] | None = None) -> PlannedBatch:
    """The planned batch in a file; its arrays are the mapped file, which lives as long as any of them.

    The mapping is private: writing to an array changes neither the file nor what other processes see.
    (Arrays that cannot be written to at all would be other types to Numba, with kernels of their own
    to compile, and PyTorch warns of them.) The descriptor stays the caller's. ``when_unused`` is called, in
    any thread, once none of the arrays is left.
    """
    mapped = _map(file, size)
    if when_unused is not None:
        weakref.finalize(mapped, when_unused).atexit = False
    memory = memoryview(mapped)
    magic, length = _PREFIX.unpack_from(memory)
    if magic != _MAGIC:
        raise ValueError(f"this is no planned batch: its file begins with {magic!r}")
    end = _PREFIX.size + length
    description = json.loads(bytes(memory[_PREFIX.size : end]))
    planned = _restore(description, memory, end + -end % _ALIGNMENT)
    assert isinstance(planned, PlannedBatch)
    return planned


def _describe(value: Any, arrays: list[npt.NDArray[Any]], end: int) -> tuple[Any, int]:
    """A value in JSON's terms; its arrays are added to ``arrays``, which so far take ``end`` bytes."""
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
        items = []
        for item in value:
            described, end = _describe(item, arrays, end)
            items.append(described)
        return {"tuple": items}, end
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        inside: dict[str, Any] = {}
        for field in fields(value):
            inside[field.name], end = _describe(getattr(value, field.name), arrays, end)
        return {"class": type(value).__name__, "fields": inside}, end
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__qualname__}"
    raise TypeError(f"{what} inside a plan cannot be shared between processes")


def _restore(description: Any, memory: memoryview, start: int) -> Any:
    """The value of a description, whose arrays are views on ``memory`` from ``start`` on."""
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
    made = object.__new__(kind)  # past its checks: the leader's one has passed them
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
    """Write everything, however little of it the system takes at a time; gives the number of bytes."""
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
    """Let nobody do this to the file any more: a mapping of a file that shrinks kills its process."""
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        seals = sum(getattr(fcntl, f"F_SEAL_{one}") for one in against)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)


def _map(file: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # before, every mapping keeps a descriptor of its own
        return mmap.mmap(file, size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY)
