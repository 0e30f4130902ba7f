"""Some rows of a checkpoint by their keys, without reading the others.

Of pruned rows the values that are there come with which those are: see `FoundRow`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.pruning.row_files import is_pruned

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FoundRow:
    """A row, as a person may want to look at it."""

    values: npt.NDArray[Any]  # zeros where pruned
    state: npt.NDArray[Any]  # of pruned rows: of one chunk that is there after the other
    present: tuple[bool, ...] = ()  # of pruned rows: by chunk, whether it is there
    columns: tuple[tuple[int, ...], ...] = ()  # of pruned rows: those that each chunk has
    utilities: tuple[
        float, ...
    ] = ()  # of pruned rows: how useful each chunk was when the row was last trained

    @property
    def is_pruned(self) -> bool:
        """Whether the row is in chunks that may be pruned."""
        return bool(self.present)

    def has(self, column: int) -> bool:
        """Whether the value of a column is there."""
        return not self.present or any(
            there and column in some for there, some in zip(self.present, self.columns, strict=True)
        )


def find_rows(
    reader: CheckpointReader,
    table: str,
    keys: npt.ArrayLike,
    progress: Callable[[str], None] = lambda file: None,
) -> dict[int, FoundRow]:
    """The rows of those of ``keys`` that a table has.

    Of a file without any of them only the keys are read, besides its checksum; ``progress`` is told each
    file that is done.
    """
    wanted = np.unique(np.asarray(keys, np.int64))
    found: dict[int, FoundRow] = {}
    dim = reader.tables[table].dim
    for name in reader.tables[table].files:
        with safetensors.safe_open(reader.verified(name), framework="numpy") as file:
            held: Int64s = file.get_tensor("keys")
            places = np.flatnonzero(np.isin(held, wanted))
            names = set(file.keys())
            for place in places.tolist():
                read = _pruned_row if is_pruned(dict.fromkeys(names, held)) else _whole_row
                found[int(held[place])] = read(file, place, dim)
        progress(name)
    return found


def _whole_row(file: Any, place: int, dim: int) -> FoundRow:
    values = file.get_slice("values")[place : place + 1][0]
    has_state = "state" in set(file.keys())
    return FoundRow(values, file.get_slice("state")[place : place + 1][0] if has_state else values[:0])


def _pruned_row(file: Any, place: int, dim: int) -> FoundRow:
    present = file.get_slice("present")[: place + 1]
    starts, columns = file.get_tensor("starts"), file.get_tensor("columns")
    first, count = int(present[:-1].sum()), int(present[-1].sum())
    chunks = file.get_slice("chunks")[first : first + count]
    of_chunks = [columns[starts[k] : starts[k + 1]] for k in range(len(starts) - 1)]
    values, states = np.zeros(dim, chunks.dtype), [chunks[:0, 0]]
    for chunk, k in zip(chunks, np.flatnonzero(present[-1]).tolist(), strict=True):
        values[of_chunks[k]] = chunk[: len(of_chunks[k])]
        states.append(chunk[len(of_chunks[k]) :][: _state_width(len(of_chunks[k]), starts, chunks.shape[1])])
    return FoundRow(
        values,
        np.concatenate(states),
        tuple(present[-1].tolist()),
        tuple(tuple(some.tolist()) for some in of_chunks),
        tuple(file.get_slice("utilities")[place : place + 1][0].tolist()),
    )


def _state_width(size: int, starts: Int64s, width: int) -> int:
    """Numbers of state of a chunk of ``size``, where the largest chunk and its state take ``width``."""
    largest = int(np.diff(starts).max())
    beside = width - largest
    return beside if beside <= 1 else beside // largest * size  # one a chunk, or so many a value
