"""Pruned tables in plain files for other tools: which chunks of each row there are, and their values alone.

A row is cut into chunks: chunk ``k`` is ``columns[starts[k]:starts[k + 1]]`` of it. A file has ``keys``;
``masks``, bit ``k`` of which says whether a row holds chunk ``k`` (eight to a byte, the lowest bit first);
``values`` of all chunks that are there, one after the other, row by row; where it was asked for ``state`` in
the same way; and ``starts`` and ``columns``. So whole rows, with zeros where pruned, are three lines::

    present = np.unpackbits(masks, axis=1, count=len(starts) - 1, bitorder="little").astype(bool)
    stored = np.zeros((len(keys), len(columns)), values.dtype)
    stored[np.repeat(present, np.diff(starts), axis=1)] = values  # stored[:, i] is column columns[i]

Rows that hold nothing are left out: they read as zeros, and so does every key that is not there.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from rowhaul.checkpoint import plain_files
from rowhaul.checkpoint.plain_files import Parts, npy_kind, read_npy
from rowhaul.pruning.row_files import Arrays

Numbers = npt.NDArray[Any]


class PrunedBlock(NamedTuple):
    """Some rows of a pruned table."""

    keys: npt.NDArray[np.int64]
    present: npt.NDArray[np.bool_]  # rows x chunks
    values: Numbers  # of chunks that are there, row by row
    state: Numbers  # the same; empty where it was not asked for


@dataclass(frozen=True)
class PrunedLayout:
    """What a file of pruned rows holds.

    Args:
        num_rows: that hold something.
        dim: values of a whole row.
        dtype: of values and state.
        starts: where chunks begin among the stored columns, and where the last one ends.
        columns: of a row that are stored.
        state_widths: numbers of state of each chunk; zeros: without state.
        num_values: of all chunks together.
        num_state: of all chunks together.
    """

    num_rows: int
    dim: int
    dtype: str
    starts: tuple[int, ...]
    columns: tuple[int, ...]
    state_widths: tuple[int, ...]
    num_values: int = 0
    num_state: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of a row."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Values of each chunk."""
        return np.array(self.starts[1:], np.int64) - np.array(self.starts[:-1], np.int64)

    def parts(self) -> Parts:
        """Type and shape of each array of the file."""
        dtype, int64 = np.dtype(self.dtype), np.dtype(np.int64)
        parts: Parts = {
            "starts": (int64, (len(self.starts),)),
            "columns": (int64, (len(self.columns),)),
            "keys": (int64, (self.num_rows,)),
            "values": (dtype, (self.num_values,)),
        }
        if any(self.state_widths):
            parts["state"] = (dtype, (self.num_state,))
        # Last, so that nothing of a larger element size begins at an odd byte.
        parts["masks"] = np.dtype(np.uint8), (self.num_rows, -(-self.num_chunks // 8))
        return parts

    def pieces(self, blocks: Iterable[PrunedBlock]) -> Iterator[dict[str, Numbers]]:
        """How rows are cut, then the arrays of every block."""
        yield {"starts": np.array(self.starts, np.int64), "columns": np.array(self.columns, np.int64)}
        yield from map(self.split, blocks)

    def split(self, block: PrunedBlock) -> dict[str, Numbers]:
        """A block as the arrays of `parts`."""
        masks = np.packbits(block.present, axis=1, bitorder="little")
        arrays = {"keys": block.keys, "masks": masks, "values": block.values}
        if any(self.state_widths):
            arrays["state"] = block.state
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def present(self, masks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which chunks there are, from the masks of rows."""
        bits = np.unpackbits(masks, axis=1, count=self.num_chunks, bitorder="little")
        return bits.astype(np.bool_)

    def counts(self, present: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How many values, and how many numbers of state, each row holds."""
        held = present.astype(np.int64)
        return held @ self.sizes, held @ np.array(self.state_widths, np.int64)

    def taken(self, parts: Arrays) -> PrunedBlock:
        """Rows of a checkpoint (see `rowhaul.pruning.row_files`), those that hold something."""
        present, chunks = parts["present"], parts["chunks"]
        holds = present.any(axis=1)
        places = np.nonzero(present)[1]
        ends = self.sizes[places][:, None]
        last = ends + np.array(self.state_widths, np.int64)[places][:, None]
        number = np.arange(chunks.shape[1])
        values, state = chunks[number < ends], chunks[(number >= ends) & (number < last)]
        return PrunedBlock(parts["keys"][holds], present[holds], values, state)

    def chunks(self, block: PrunedBlock) -> Numbers:
        """The values of each chunk that is there, in a line of its own; shorter ones end with zeros."""
        sizes = self.sizes[np.nonzero(block.present)[1]]
        chunks = np.zeros((len(sizes), int(self.sizes.max())), self.dtype)
        chunks[np.arange(chunks.shape[1]) < sizes[:, None]] = block.values
        return chunks

    def whole_rows(self, block: PrunedBlock) -> Numbers:
        """Rows of ``dim`` values, zeros where pruned."""
        stored = np.zeros((len(block.keys), len(self.columns)), self.dtype)
        stored[np.repeat(block.present, self.sizes, axis=1)] = block.values
        rows = np.zeros((len(block.keys), self.dim), self.dtype)
        rows[:, np.array(self.columns, np.int64)] = stored
        return rows


def read_pruned_safetensors(path: Path, layout: PrunedLayout) -> Iterator[PrunedBlock]:
    """Read what `write_safetensors` wrote of pruned rows, a block at a time."""
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in layout.parts()}
        places = dict.fromkeys(slices, 0)

        def take(name: str, count: int) -> Numbers:
            first = places[name]
            places[name] += count
            some: Numbers = slices[name][first : first + count]
            return some

        yield from _blocks(layout, take)


def read_pruned_npz(path: Path, layout: PrunedLayout) -> Iterator[PrunedBlock]:
    """Read what `write_npz` wrote of pruned rows, a block at a time."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.open(f"{name}.npy") for name in layout.parts()}
        try:
            kinds = {name: npy_kind(file) for name, file in files.items()}
            yield from _blocks(layout, lambda name, count: read_npy(files[name], *kinds[name], count))
        finally:
            for file in files.values():
                file.close()


def _blocks(layout: PrunedLayout, take: Any) -> Iterator[PrunedBlock]:
    """Blocks of rows, given what takes the next so many elements of an array."""
    for first in range(0, layout.num_rows, plain_files.BLOCK_ROWS):
        count = min(plain_files.BLOCK_ROWS, layout.num_rows - first)
        present = layout.present(take("masks", count))
        values, state = (int(one.sum()) for one in layout.counts(present))
        held = take("state", state) if any(layout.state_widths) else np.empty(0, layout.dtype)
        yield PrunedBlock(take("keys", count), present, take("values", values), held)
