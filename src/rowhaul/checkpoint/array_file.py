"""Safetensors files, written and read in pieces.

The format is safetensors', byte by byte as its library writes it: the header's length, the header as JSON,
then the arrays one after the other. The library itself holds the GIL for as long as a whole file takes;
pieces let other threads run in between, and are hashed on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.checkpoint.location import OpenFile
from rowhaul.errors import DamagedCheckpointError

PIECE_BYTES = 4 << 20
_ALIGNMENT = 8
_MOST_HEADER_BYTES = 100 << 20  # as the library has it
# Types by their code in the header, in the order in which the library writes arrays.
_TYPES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32", "U32": "uint32",
    "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in _TYPES.items()}
_ORDER = list(_TYPES)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """One array of a file: its type, its shape, and where its bytes are, counted from the first array's."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


def pieces(arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> Iterator[memoryview]:
    """Yield a file of arrays, a few MiB at a time."""
    plain = {name: _flat_bytes(array) for name, array in arrays.items()}
    codes = {name: _CODES[str(array.dtype).removeprefix("torch.")] for name, array in arrays.items()}
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(plain, key=lambda name: (_ORDER.index(codes[name]), name)):
        start, end = end, end + len(plain[name])
        header[name] = {"dtype": codes[name], "shape": list(arrays[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in header:
        view = plain[name].data
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _flat_bytes(array: npt.NDArray[Any] | Tensor) -> Bytes:
    if isinstance(array, Tensor):
        flat = array.detach().cpu().contiguous().reshape(-1)
        if flat.stride() != (1,):  # a single element may have any
            flat = flat.clone(memory_format=torch.contiguous_format)
        found: Bytes = flat.view(torch.uint8).numpy()
        return found
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class ArrayFile:
    """An open file of arrays, of which some, or some rows of some, are wanted.

    Args:
        file: the open file, or one that is in memory.
        name: of the file, for messages.
    """

    def __init__(self, file: OpenFile, name: str) -> None:
        self._file, self._name = file, name
        length = int.from_bytes(self._read(0, 8), "little")
        if not 0 < length <= min(file.size, _MOST_HEADER_BYTES):
            raise self._damaged()
        self._first = 8 + length
        try:
            header = json.loads(self._read(8, length).tobytes())
            self.parts = {key: self._part(entry) for key, entry in header.items() if key != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged() from None

    def keys(self) -> Sequence[str]:
        """Return the names of the arrays."""
        return list(self.parts)

    def get_tensor(self, name: str) -> npt.NDArray[Any]:
        """Read an array."""
        part = self.parts[name]
        return self._array(part, part.start, part.shape)

    def get_slice(self, name: str) -> Rows:
        """Return an array of which only some rows will be read."""
        return Rows(self, self.parts[name])

    def rows(self, part: Part, first: int, count: int) -> npt.NDArray[Any]:
        """Read some rows of an array."""
        row_bytes = (part.stop - part.start) // part.shape[0] if part.shape[0] else 0
        return self._array(part, part.start + first * row_bytes, (count, *part.shape[1:]))

    def _array(self, part: Part, start: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        kind = np.dtype(_TYPES[part.code])
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self._read(self._first + start, num_bytes).view(kind).reshape(shape)

    def _part(self, entry: Mapping[str, Any]) -> Part:
        start, stop = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        size = getattr(torch, _TYPES[entry["dtype"]]).itemsize
        if not 0 <= start <= stop <= self._file.size - self._first or stop - start != size * np.prod(shape):
            raise ValueError
        return Part(entry["dtype"], shape, start, stop)

    def _read(self, start: int, count: int) -> Bytes:
        buffer = np.empty(count, np.uint8)
        for done in range(0, count, PIECE_BYTES):
            piece = buffer.data[done : done + PIECE_BYTES]
            if self._file.read_into(start + done, piece) != len(piece):
                raise self._damaged()
        return buffer

    def _damaged(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._name} is damaged: it is no safetensors file; use another one")


class Rows:
    """An array in a file, read by rows: ``rows[first:last]``."""

    def __init__(self, file: ArrayFile, part: Part) -> None:
        self._file, self._part = file, part

    def get_shape(self) -> list[int]:
        """Return the shape of the whole array."""
        return list(self._part.shape)

    def __getitem__(self, which: slice) -> npt.NDArray[Any]:
        first, last, _ = which.indices(self._part.shape[0])
        return self._file.rows(self._part, first, max(last - first, 0))


def read_header(content: Bytes, name: str) -> tuple[dict[str, Part], Bytes]:
    """Return what a file in memory holds, and the bytes of its arrays."""
    file = ArrayFile(_InMemory(content), name)
    return file.parts, content[8 + int.from_bytes(content[:8].tobytes(), "little") :]


def as_array(part: Part, content: Bytes) -> npt.NDArray[Any]:
    """Return an array of a file in memory; it shares the memory where it is aligned."""
    flat = content[part.start : part.stop]
    kind = np.dtype(_TYPES[part.code])
    if flat.ctypes.data % kind.itemsize:
        flat = flat.copy()
    return flat.view(kind).reshape(part.shape)


def as_tensor(part: Part, content: Bytes) -> Tensor:
    """Return a tensor of a file in memory, as a copy."""
    tensor = torch.empty(part.shape, dtype=getattr(torch, _TYPES[part.code]))
    if part.stop > part.start:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(content[part.start : part.stop]))
    return tensor


class _InMemory:
    def __init__(self, content: Bytes) -> None:
        self._content, self.size = content.data, len(content)

    def read_into(self, start: int, buffer: memoryview) -> int:
        found = self._content[start : start + len(buffer)]
        buffer[: len(found)] = found
        return len(found)
