"""Tables and tensors in files of their own, for other tools: safetensors and NumPy archives.

A table is written and read a block of rows at a time. It is ``keys`` (int64), ``values`` (rows x dim) and,
where there is any, ``state`` (rows x its width).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import safe_open

from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.shard import Block
from rowhaul.errors import CheckpointError

BLOCK_ROWS = 1 << 16

Parts = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
OneBlock = TypeVar("OneBlock", contravariant=True)


class FileLayout(Protocol[OneBlock]):
    """What a file holds: arrays of known shapes, filled from blocks of rows."""

    def parts(self) -> Parts:
        """Type and shape of each array, as it is when all blocks are written."""

    def pieces(self, blocks: Iterable[OneBlock]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """What is to be added to the end of the arrays, piece by piece."""


@dataclass(frozen=True)
class RowLayout:
    """What every row of a file has."""

    num_rows: int
    dim: int
    state_width: int  # 0: without state
    dtype: str

    def parts(self) -> Parts:
        """Type and shape of each array of the table."""
        dtype = np.dtype(self.dtype)
        parts: Parts = {
            "keys": (np.dtype(np.int64), (self.num_rows,)),
            "values": (dtype, (self.num_rows, self.dim)),
        }
        if self.state_width:
            parts["state"] = (dtype, (self.num_rows, self.state_width))
        return parts

    def split(self, block: Block) -> dict[str, npt.NDArray[Any]]:
        """A block as the arrays of `parts`."""
        keys, records = block
        arrays = {"keys": keys, "values": records[:, : self.dim]}
        if self.state_width:
            arrays["state"] = records[:, self.dim : self.dim + self.state_width]
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def pieces(self, blocks: Iterable[Block]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """The arrays of every block."""
        return map(self.split, blocks)

    def join(self, arrays: dict[str, npt.NDArray[Any]]) -> Block:
        """The inverse of `split`."""
        columns = [arrays["values"]] + ([arrays["state"]] if self.state_width else [])
        return arrays["keys"], np.concatenate(columns, axis=1)


def write_safetensors(path: Path, layout: FileLayout[OneBlock], blocks: Iterable[OneBlock]) -> None:
    """Write rows as one safetensors file."""
    # The format's own library wants whole tensors; the sizes are known, so rows can go to their places.
    header: dict[str, Any] = {}
    begins, end = {}, 0
    for name, (dtype, shape) in layout.parts().items():
        size = int(np.prod(shape)) * dtype.itemsize
        kind = {"i": "I", "u": "U", "f": "F"}[dtype.kind] + str(8 * dtype.itemsize)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        begins[name], end = end, end + size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        places = {name: 8 + len(text) + begin for name, begin in begins.items()}
        for piece in layout.pieces(blocks):
            for name, array in piece.items():
                file.seek(places[name])
                file.write(array.data)
                places[name] += array.nbytes


def read_safetensors(path: Path, layout: RowLayout) -> Iterator[Block]:
    """Read what `write_safetensors` wrote."""
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in layout.parts()}
        for first in range(0, layout.num_rows, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, layout.num_rows)
            yield layout.join({name: one[first:last] for name, one in slices.items()})


def write_npz(path: Path, layout: FileLayout[OneBlock], blocks: Iterable[OneBlock]) -> None:
    """Write rows as an uncompressed ``.npz``, which `numpy.load` opens."""
    # The members of an archive lie one after the other, so each grows in a file of its own first.
    members = {name: path.with_name(f"{path.name}.{name}") for name in layout.parts()}
    files = {name: member.open("wb") for name, member in members.items()}
    try:
        for name, (dtype, shape) in layout.parts().items():
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(files[name], header)
        for piece in layout.pieces(blocks):
            for name, array in piece.items():
                files[name].write(array.data)
    finally:
        for file in files.values():
            file.close()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            archive.write(member, f"{name}.npy")
            member.unlink()


def read_npz(path: Path, layout: RowLayout) -> Iterator[Block]:
    """Read what `write_npz` wrote."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.open(f"{name}.npy") for name in layout.parts()}
        try:
            kinds = {name: npy_kind(file) for name, file in files.items()}
            for first in range(0, layout.num_rows, BLOCK_ROWS):
                count = min(BLOCK_ROWS, layout.num_rows - first)
                yield layout.join({name: read_npy(files[name], *kinds[name], count) for name in files})
        finally:
            for file in files.values():
                file.close()


def npy_kind(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of an array of NumPy's format, which is read up to its first element."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return dtype, shape


def read_npy(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...], count: int) -> npt.NDArray[Any]:
    """The next ``count`` rows of such an array."""
    size = count * int(np.prod(shape[1:])) * dtype.itemsize
    return np.frombuffer(file.read(size), dtype).reshape(-1, *shape[1:])


def write_tensors(reader: CheckpointReader, group: str, path: Path) -> dict[str, list[int]]:
    """Write a group of a checkpoint's tensors as one safetensors file, read it back, and tell the shapes."""
    tensors = reader.tensors(group)
    safetensors.torch.save_file(tensors, path)
    again: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    if again.keys() != tensors.keys() or not all(_same_bits(again[name], tensors[name]) for name in tensors):
        raise CheckpointError(
            f"{path.name} reads back otherwise than {group!r} in {reader.path}; use another disk"
        )
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
