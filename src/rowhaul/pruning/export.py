"""Exported files of rows in chunks: which chunks of each row are stored, and their values alone.

A file has ``keys``; ``masks``, bit ``k`` of which says whether a row holds chunk ``k`` (eight to a byte, the
lowest bit first); ``values`` of all stored chunks, row by row; if asked for ``state`` in the same way; and
``starts`` and ``columns``. In Parquet a row is one line, ``present`` is a list of booleans instead of a mask,
and how rows are cut is in the file's metadata. Rows that hold nothing are left out: they read as zeros, and
so does every key that is not in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.optim import row_optimizer
from rowhaul.pruning.deciding.room import RowCut
from rowhaul.store import row_parts
from rowhaul.store.row_parts import Arrays, ExportFile, Int64s, Parts
from rowhaul.store.served_rows import Cut, RecordBlock, ServedRows

_READ_ARRAYS = """
keys, values, starts, columns = (table[name] for name in ("keys", "values", "starts", "columns"))
present = np.unpackbits(table["masks"], axis=1, count=len(starts) - 1, bitorder="little").astype(bool)"""
_WHOLE_ROWS = """
stored = np.zeros((len(keys), len(columns)), values.dtype)
stored[np.repeat(present, np.diff(starts), axis=1)] = values
rows = np.zeros((len(keys), dim), values.dtype)  # whole rows, zeros where pruned
rows[:, columns] = stored"""
READING = {
    "parquet": """import json

import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("{file}")
cut = json.loads(table.schema.metadata[b"rowhaul"])
starts, columns, dim = cut["starts"], cut["columns"], cut["dim"]
keys = table["key"].to_numpy()
present = table["present"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
present = present.reshape(len(keys), len(starts) - 1)
values = table["values"].combine_chunks().flatten().to_numpy()"""
    + _WHOLE_ROWS,
    "safetensors": f"""import numpy as np
from safetensors.numpy import load_file

table, dim = load_file("{{file}}"), {{dim}}{_READ_ARRAYS}{_WHOLE_ROWS}""",
    "npz": f"""import numpy as np

table, dim = np.load("{{file}}"), {{dim}}{_READ_ARRAYS}{_WHOLE_ROWS}""",
}


@dataclass(frozen=True)
class ChunkedFile(ExportFile):
    """What a file of pruned rows holds.

    Args:
        num_rows: that hold something.
        dim: values of a whole row.
        dtype: of values and state.
        starts: where chunks begin among the stored columns, and where the last one ends.
        cut: the columns of a row that are stored.
        state_widths: numbers of state of each chunk; zeros: without state.
        num_values: of all chunks together.
        num_state: of all chunks together.
        rows_left_out: that hold nothing.
    """

    num_rows: int
    dim: int
    dtype: str
    starts: tuple[int, ...]
    cut: tuple[int, ...]
    state_widths: tuple[int, ...]
    num_values: int
    num_state: int
    rows_left_out: int
    format: str = "chunked"

    @classmethod
    def from_details(cls, table: Any) -> ChunkedFile:
        """Return what a manifest's table describes."""
        given: dict[str, Any] = {"cut": table.details["columns"], **table.details}
        del given["columns"]
        given = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
        return cls(num_rows=table.num_rows, dim=table.dim, dtype=table.dtype, **given)

    def details(self) -> dict[str, Any]:
        """Return how rows are cut, and how much of them is stored."""
        return {
            "starts": self.starts,
            "columns": self.cut,
            "state_widths": self.state_widths,
            "num_values": self.num_values,
            "num_state": self.num_state,
            "rows_left_out": self.rows_left_out,
        }

    @property
    def state_width(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Numbers of state of a row with all its chunks."""
        return sum(self.state_widths)

    def cells(self) -> dict[str, str]:
        """List the share of values that are stored."""
        return {"stored": f"{self.num_values / max(self.num_rows * self.dim, 1):.1%}"}

    @property
    def num_chunks(self) -> int:
        """Chunks of a row."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> Int64s:
        """Values of each chunk."""
        starts = np.array(self.starts, np.int64)
        return starts[1:] - starts[:-1]

    def constants(self) -> Arrays:
        """Return how rows are cut."""
        return {"starts": np.array(self.starts, np.int64), "columns": np.array(self.cut, np.int64)}

    def parts(self) -> Parts:
        """Type and shape of each array."""
        dtype, int64 = np.dtype(self.dtype), np.dtype(np.int64)
        parts: Parts = {name: (one.dtype, one.shape) for name, one in self.constants().items()}
        parts |= {"keys": (int64, (self.num_rows,)), "values": (dtype, (self.num_values,))}
        if self.state_width:
            parts["state"] = (dtype, (self.num_state,))
        # Last, so that nothing of a larger element size begins at an odd byte.
        parts["masks"] = np.dtype(np.uint8), (self.num_rows, -(-self.num_chunks // 8))
        return parts

    def ragged(self) -> tuple[str, ...]:
        """Return the arrays whose rows depend on their stored chunks."""
        return ("values", "state") if self.state_width else ("values",)

    def lengths(self, block: Arrays) -> dict[str, Int64s]:
        """Return how many values, and numbers of state, each row has."""
        held = self.present(block).astype(np.int64)
        widths = self.sizes, np.array(self.state_widths, np.int64)
        return {name: held @ width for name, width in zip(self.ragged(), widths, strict=False)}

    def present(self, block: Arrays) -> npt.NDArray[np.bool_]:
        """Which chunks are stored, rows x chunks."""
        return np.unpackbits(block["masks"], axis=1, count=self.num_chunks, bitorder="little").astype(
            np.bool_
        )

    def columns(self, block: Arrays) -> Arrays:
        """Return a block with booleans instead of masks."""
        rest = {name: block[name] for name in self.ragged()}
        return {"keys": block["keys"], "present": self.present(block), **rest}

    def from_columns(self, columns: Arrays) -> Arrays:
        """Invert `columns`."""
        rest = {name: one for name, one in columns.items() if name != "present"}
        return {**rest, "masks": np.packbits(columns["present"], axis=1, bitorder="little")}

    def metadata(self) -> dict[str, Any]:
        """Return how rows are cut."""
        return {"dim": self.dim, "starts": self.starts, "columns": self.cut}

    def blocks(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Take the rows of a checkpoint that hold something, some at a time."""
        for block in blocks:
            ends = np.concatenate([[0], np.cumsum(block["present"].sum(axis=1))])
            for first in range(0, len(block["keys"]), row_parts.BLOCK_ROWS):
                last = min(first + row_parts.BLOCK_ROWS, len(block["keys"]))
                present, chunks = block["present"][first:last], block["chunks"][ends[first] : ends[last]]
                yield self._taken(block["keys"][first:last], present, chunks)

    def _taken(self, keys: Int64s, present: npt.NDArray[np.bool_], chunks: npt.NDArray[Any]) -> Arrays:
        holds, places = present.any(axis=1), np.nonzero(present)[1]
        ends = self.sizes[places][:, None]
        number = np.arange(chunks.shape[1])
        taken: dict[str, npt.NDArray[Any]] = {
            "keys": keys[holds],
            "masks": np.packbits(present[holds], axis=1, bitorder="little"),
            "values": chunks[number < ends],
        }
        if self.state_width:
            last = ends + np.array(self.state_widths, np.int64)[places][:, None]
            taken["state"] = chunks[(number >= ends) & (number < last)]
        return taken

    def chunks(self, block: Arrays) -> Arrays:
        """Return a block of the `chunked` format: without state, and with utilities of zero."""
        present = self.present(block)
        sizes = self.sizes[np.nonzero(present)[1]]
        chunks: npt.NDArray[Any] = np.zeros((len(sizes), int(self.sizes.max())), self.dtype)
        chunks[np.arange(chunks.shape[1]) < sizes[:, None]] = block["values"]
        found: dict[str, npt.NDArray[Any]] = {
            "keys": block["keys"],
            "present": present,
            "chunks": chunks,
            "utilities": np.zeros(present.shape, np.float32),
            "touched": np.zeros(len(present), np.int32),
        }
        return {**found, **self.constants()}

    def vectors(self, block: Arrays) -> npt.NDArray[Any]:
        """Return rows of ``dim`` values, zeros where pruned."""
        stored: npt.NDArray[Any] = np.zeros((len(block["keys"]), len(self.cut)), self.dtype)
        stored[np.repeat(self.present(block), self.sizes, axis=1)] = block["values"]
        rows: npt.NDArray[Any] = np.zeros((len(stored), self.dim), self.dtype)
        rows[:, np.array(self.cut, np.int64)] = stored
        return rows


def lay_out(reader: Any, table: str, with_state: bool) -> ChunkedFile:
    """Count what a file of a checkpoint's table will hold."""
    entry, facts = reader.tables[table], reader.facts
    num_chunks = int(facts["pruning"]["chunks"])
    by_place, num_rows = np.zeros(num_chunks, np.int64), 0
    columns = np.empty(0, np.int64) if entry.files else _columns_without_rows(reader, table)
    for name in entry.files:
        with reader.open(name) as file:
            present, columns = map(file.get_tensor, ("present", "columns"))
        by_place += present.sum(axis=0)
        num_rows += int(present.any(axis=1).sum())
    rule = row_optimizer(facts["row_optimizer"], lr=0.0)
    cut = RowCut(len(columns), num_chunks, rule, with_state)
    return ChunkedFile(
        num_rows=num_rows,
        dim=entry.dim,
        dtype=entry.dtype,
        starts=tuple(cut.starts.tolist()),
        cut=tuple(columns.tolist()),
        state_widths=tuple(cut.state_widths.tolist()),
        num_values=int(by_place @ cut.sizes),
        num_state=int(by_place @ cut.state_widths),
        rows_left_out=entry.num_rows - num_rows,
    )


def _columns_without_rows(reader: Any, table: str) -> Int64s:
    """Return columns for a table that has no file: those of another one of its size, which keeps as many."""
    dim = reader.tables[table].dim
    files = [name for one in reader.tables.values() if one.dim == dim for name in one.files]
    if not files:
        return np.arange(dim)
    with reader.open(files[0]) as file:
        columns: Int64s = file.get_tensor("columns")
    return columns


def served_rows(reader: Any, table: str) -> ServedRows:
    """Return a checkpoint's table as a file to serve from takes it: a mask, then the stored values."""
    layout = lay_out(reader, table, with_state=False)
    cut = Cut(np.array(layout.starts, np.int64), np.array(layout.cut, np.int64))

    def records() -> Iterator[RecordBlock]:
        for block in layout.blocks(reader.blocks(table)):
            values = layout.lengths(block)["values"] * np.dtype(layout.dtype).itemsize
            lengths = cut.mask_bytes + values
            masks = np.zeros((len(lengths), cut.mask_bytes), np.uint8)
            masks[:, : block["masks"].shape[1]] = block["masks"]
            data, is_mask = np.empty(int(lengths.sum()), np.uint8), np.zeros(int(lengths.sum()), np.bool_)
            is_mask[(np.cumsum(lengths) - lengths)[:, None] + np.arange(cut.mask_bytes)] = True
            data[is_mask] = masks.reshape(-1)
            data[~is_mask] = np.ascontiguousarray(block["values"]).view(np.uint8)
            yield RecordBlock(block["keys"], lengths, data)

    def keys() -> Iterator[Int64s]:
        return (block.keys for block in records())  # rows that hold nothing are not served

    return ServedRows(layout.dim, layout.dtype, layout.num_rows, 0, keys, records, True, cut)


def explain(tables: Sequence[Any]) -> str:
    """Say what is special about exported rows of which only a part is stored."""
    files = [table.file_layout() for table in tables]
    held, rows = sum(one.num_values for one in files), sum(one.num_rows for one in files)
    every = sum(one.num_rows + one.rows_left_out for one in files)
    whole = sum((one.num_rows + one.rows_left_out) * one.dim for one in files)
    chunks = files[0].num_chunks
    return f"""Rows were pruned while they were trained. They are cut into {chunks} chunks, and only those
that are there were written: {held:,} values in {rows:,} rows, {held / max(whole, 1):.1%} of what
{every:,} whole rows would have. Chunk `k` of a row is `columns[starts[k]:starts[k + 1]]` of it;
`values` has those of the chunks that are present, one after the other, row by row. What was pruned reads as
zeros, and so does every key that is not here.

Rowhaul reads it as well: `rowhaul.train.ExportReader(".").rows({tables[0].name!r})` gives blocks of keys and
whole rows, and `rowhaul evaluate` and `rowhaul predict` take this folder in place of a run."""
