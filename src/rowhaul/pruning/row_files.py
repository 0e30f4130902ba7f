"""Pruned rows in files: keys, which of their chunks are there, and those chunks one after the other.

``present[i, k]`` says whether row ``i`` holds its chunk ``k``; ``chunks`` has the values of all that are
held, row by row, each with its optimizer state. Chunk ``k`` is ``columns[starts[k]:starts[k + 1]]`` of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
FACT = "pruning"  # of a checkpoint's facts: how its rows were pruned; absent where they were not


def is_pruned(parts: Arrays) -> bool:
    """Whether a file of rows holds pruned ones."""
    return "present" in parts


def whole_rows(parts: Arrays, dim: int) -> npt.NDArray[Any]:
    """The rows of a file with ``dim`` values each, zeros where pruned."""
    present, chunks, starts = parts["present"], parts["chunks"], parts["starts"]
    rows = np.zeros((len(present), dim), dtype=chunks.dtype)
    row_of_chunk, places = np.nonzero(present)
    for place in range(present.shape[1]):
        some = np.flatnonzero(places == place)
        columns = parts["columns"][starts[place] : starts[place + 1]]
        rows[row_of_chunk[some][:, None], columns] = chunks[some, : len(columns)]
    return rows


def kept_rows(parts: Arrays, rows: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    """Some rows of a file, with their chunks."""
    chunks = np.repeat(rows, parts["present"].sum(axis=1))
    kept = {name: parts[name][rows] for name in ("keys", "present", "utilities", "touched")}
    return {**kept, "chunks": parts["chunks"][chunks]}


def joined(blocks: Iterable[Arrays], file_bytes: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Blocks put together until they are worth a file."""
    held: list[Arrays] = []
    for block in blocks:
        held.append(block)
        if sum(array.nbytes for one in held for array in one.values()) >= file_bytes:
            yield _concatenate(held)
            held = []
    if held:
        yield _concatenate(held)


def _concatenate(held: list[Arrays]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([one[name] for one in held]) for name in held[0]}
