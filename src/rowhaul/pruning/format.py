"""Rows in chunks, of which some are stored: the `chunked` format.

A block has ``keys``; ``present[i, k]``, whether row ``i`` holds its chunk ``k``; ``chunks``, the values of
all that are held, row by row, each with its optimizer state; ``utilities`` of all chunks and ``touched``, the
step that they are of. Chunk ``k`` is ``columns[starts[k]:starts[k + 1]]`` of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.pruning import checkpoint
from rowhaul.pruning.comparison import aligned, empty_block
from rowhaul.pruning.export import READING, ChunkedFile, explain, lay_out, served_rows
from rowhaul.pruning.merging import ChunkMerging
from rowhaul.pruning.sizing import ChunkEstimate
from rowhaul.store.row_format import RowFormat
from rowhaul.store.row_parts import Arrays, FoundRow, Int64s

FACT = checkpoint.FACT


class ChunkedRows(RowFormat):
    """Rows whose chunks come and go."""

    name = "chunked"
    constants = ("columns", "starts")
    state_by_row = False
    reading: ClassVar[dict[str, str]] = READING
    cluster_rows = "rowhaul.pruning.cluster.checkpoint:ChunkedClusterRows"

    def why_inexact(self, layout: Any) -> str:
        """Say why one process may keep other chunks: only where utilities are norms of gradients."""
        if layout.pruning.by_access:
            return ""
        return (
            "with prune.utility gradient each worker adds the norm of its own part of a gradient, one "
            "process that of their sum; set it to access to keep the same chunks everywhere"
        )

    def select(self, block: Arrays, rows: npt.NDArray[np.bool_]) -> Arrays:
        """Return some rows of a block, with their chunks."""
        chunks = np.repeat(rows, block["present"].sum(axis=1))
        by_row = {name: one for name, one in block.items() if name != "chunks"}
        return {**super().select(by_row, rows), "chunks": block["chunks"][chunks]}

    def decode(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Return whole vectors, zeros where pruned; state belongs to chunks."""
        rows = np.zeros((len(block["present"]), dim), dtype=block["chunks"].dtype)
        row_of_chunk, places = np.nonzero(block["present"])
        for place, columns in enumerate(_columns_of(block["starts"], block["columns"])):
            some = np.flatnonzero(places == place)
            rows[row_of_chunk[some][:, None], columns] = block["chunks"][some, : len(columns)]
        return rows

    def find(self, file: Any, place: int, dim: int) -> FoundRow:
        """Read one row."""
        present = file.get_slice("present")[: place + 1]
        starts = file.get_tensor("starts")
        by_chunk = _columns_of(starts, file.get_tensor("columns"))
        first, held = int(present[:-1].sum()), np.flatnonzero(present[-1]).tolist()
        chunks = file.get_slice("chunks")[first : first + len(held)]
        values, stored, states = np.zeros(dim, chunks.dtype), np.zeros(dim, np.bool_), [chunks[:0, 0]]
        for chunk, columns in zip(chunks, (by_chunk[number] for number in held), strict=True):
            size = len(columns)
            values[columns], stored[columns] = chunk[:size], True
            states.append(chunk[size : size + _state_width(size, starts, chunks.shape[1])])
        utilities = file.get_slice("utilities")[place : place + 1][0].tolist()
        details = {
            "present": tuple(present[-1].tolist()),
            "columns": tuple(tuple(some.tolist()) for some in by_chunk),
            "utilities": tuple(utilities),
        }
        what = f"{len(held)} of {len(by_chunk)} stored{': ' if held else ''}{', '.join(map(str, held))}"
        rest = "; pruned values (·) read as zero" if len(held) < len(by_chunk) else ""
        note = f"{what}{rest}; utilities {' '.join(f'{one:.3g}' for one in utilities)}"
        return FoundRow(values, np.concatenate(states), stored, details, {"chunks": note})

    def contents(
        self, facts: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Count chunks a row, chunks that are stored (None: unknown), and stored columns."""
        found = {"chunks": int(facts[FACT]["chunks"]), "chunks_there": None, "columns": None}
        if shapes is not None:
            found["chunks_there"] = sum(one["chunks"][0] for one in shapes)
            found["columns"] = shapes[-1]["columns"][0] if shapes else None
        return found

    def note(self, facts: Mapping[str, Any]) -> str:
        """Say how rows are cut."""
        return f"pruned, {facts[FACT]['chunks']} chunks a row"

    def cells(self, tables: Sequence[Any]) -> dict[str, str]:
        """List stored columns, and stored chunks with their share of all chunks of these rows."""
        details = [one.details for one in tables]
        columns = "-" if details[0]["columns"] is None else str(details[0]["columns"])
        held, share = "?", "?"
        if all(one["chunks_there"] is not None for one in details):
            num_held = sum(one["chunks_there"] for one in details)
            every = sum(table.rows * table.details["chunks"] for table in tables)
            held, share = f"{num_held:,}", f"{num_held / max(every, 1):.1%}"
        return {"columns": columns if len(tables) == 1 else "", "stored chunks": held, "of all": share}

    def check_mergeable(self, sources: Sequence[Any]) -> None:
        """Refuse chunks of other sizes and other tables: tables pruned together share their memory."""
        first, chunks = sources[0], sources[0].facts[FACT]["chunks"]
        for reader in sources[1:]:
            if (other := reader.facts[FACT]["chunks"]) != chunks:
                raise CheckpointError(
                    f"{first.path} was pruned with {chunks} chunks a row and {reader.path} with {other}: "
                    "chunks of one size cannot become those of another; merge checkpoints with the same "
                    "prune.chunks"
                )
            if set(first.tables) != set(reader.tables):
                others = ", ".join(sorted(set(first.tables) ^ set(reader.tables)))
                raise CheckpointError(
                    f"{first.path} and {reader.path} have not the same tables, only one has {others}: tables "
                    "that are pruned together share their memory; merge checkpoints of one configuration"
                )

    def merging(self, sources: Sequence[Any], tables: Mapping[str, Any]) -> ChunkMerging:
        """Decide which chunks the merged pool has room for."""
        return ChunkMerging(self, sources, tables)

    def check_loadable(self, reader: Any, collection: Any) -> None:
        """Refuse chunks of another size."""
        chunks, ours = reader.facts[FACT]["chunks"], collection.row_settings.chunks
        if chunks != ours:
            raise CheckpointError(
                f"{reader.path} was pruned with {chunks} chunks a row, here prune.chunks is {ours}: chunks "
                f"of one size cannot become those of another; set it to {chunks}"
            )

    def serve(self, collection: Any) -> None:
        """Drop utilities and state before rows come."""
        checkpoint.pruned_rows(collection).serve()

    # Files and sizes of chunks are in modules of their own.
    blocks = staticmethod(checkpoint.blocks)
    save = staticmethod(checkpoint.write)
    load = staticmethod(checkpoint.read)
    load_export = staticmethod(checkpoint.load_export)
    export_file = staticmethod(lay_out)
    exported_file = staticmethod(ChunkedFile.from_details)
    served_rows = staticmethod(served_rows)
    export_note = staticmethod(explain)
    empty = staticmethod(empty_block)
    align = aligned
    estimate = staticmethod(ChunkEstimate.of)


def _columns_of(starts: Int64s, columns: Int64s) -> list[Int64s]:
    """Return the columns of each chunk."""
    return [columns[first:end] for first, end in pairwise(starts.tolist())]


def _state_width(size: int, starts: Int64s, width: int) -> int:
    """Numbers of state of a chunk of ``size``, where the largest chunk and its state take ``width``."""
    largest = int(np.diff(starts).max())
    beside = width - largest
    return beside if beside <= 1 else beside // largest * size  # one a chunk, or some for each value
