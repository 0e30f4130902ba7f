"""The pruned tables of a checkpoint as an export has them: the chunks that there are, and which those are.

What is in a file is said in `rowhaul.pruning.plain_files`. In Parquet a row is one line: ``key``,
``present`` (a list of as many truth values as a row has chunks), ``values`` (a list of those that are there,
of any length) and, if asked for, ``state``; how rows are cut is in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors

from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.plain_files import BLOCK_ROWS, write_npz, write_safetensors
from rowhaul.errors import CheckpointError
from rowhaul.optim import row_optimizer
from rowhaul.pruning.cut import chunk_starts
from rowhaul.pruning.plain_files import (
    PrunedBlock,
    PrunedLayout,
    read_pruned_npz,
    read_pruned_safetensors,
)
from rowhaul.pruning.row_files import FACT, is_pruned

METADATA = b"rowhaul"  # of a Parquet file: how rows are cut, as JSON


class PrunedFormat(NamedTuple):
    """How files of one kind hold pruned tables."""

    suffix: str
    write: Callable[[Path, PrunedLayout, Iterable[PrunedBlock]], None]
    read: Callable[[Path, PrunedLayout], Iterator[PrunedBlock]]


def is_pruned_checkpoint(reader: CheckpointReader) -> bool:
    """Whether the rows of a checkpoint are pruned."""
    return reader.facts.get(FACT) is not None


def pruned_layout(reader: CheckpointReader, table: str, with_state: bool) -> tuple[PrunedLayout, int]:
    """What a file of a table will hold; and how many rows it leaves out, since they hold nothing."""
    entry, facts = reader.tables[table], reader.facts
    num_chunks = int(facts[FACT]["chunks"])
    starts, columns = chunk_starts(entry.dim, num_chunks), np.arange(entry.dim)
    by_place = np.zeros(num_chunks, np.int64)
    num_rows = 0
    for name in entry.files:
        with safetensors.safe_open(reader.verified(name), framework="numpy") as file:
            if not is_pruned(dict.fromkeys(file.keys(), columns)):
                raise CheckpointError(
                    f"{reader.path}: {name} holds whole rows of table {table!r}, but the checkpoint is said "
                    "to be pruned; use another checkpoint"
                )
            present = file.get_tensor("present")
            starts, columns = file.get_tensor("starts"), file.get_tensor("columns")
        by_place += present.sum(axis=0)
        num_rows += int(present.any(axis=1).sum())
    rule = row_optimizer(facts["row_optimizer"], lr=0.0)
    sizes = np.diff(starts)
    widths = np.array([rule.state_width(int(size)) if with_state else 0 for size in sizes], np.int64)
    layout = PrunedLayout(
        num_rows=num_rows,
        dim=entry.dim,
        dtype=entry.dtype,
        starts=tuple(starts.tolist()),
        columns=tuple(columns.tolist()),
        state_widths=tuple(widths.tolist()),
        num_values=int(by_place @ sizes),
        num_state=int(by_place @ widths),
    )
    return layout, entry.num_rows - num_rows


def pruned_blocks(reader: CheckpointReader, table: str, layout: PrunedLayout) -> Iterator[PrunedBlock]:
    """The rows of a table that hold something, some at a time."""
    for parts in reader.pruned_rows(table):
        ends = np.concatenate([[0], np.cumsum(parts["present"].sum(axis=1))])
        for first in range(0, len(parts["keys"]), BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, len(parts["keys"]))
            some = {
                "keys": parts["keys"][first:last],
                "present": parts["present"][first:last],
                "chunks": parts["chunks"][ends[first] : ends[last]],
            }
            yield layout.taken(some)


def _write_parquet(path: Path, layout: PrunedLayout, blocks: Iterable[PrunedBlock]) -> None:
    number = pa.from_numpy_dtype(np.dtype(layout.dtype))
    fields = [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("present", pa.list_(pa.bool_(), layout.num_chunks), nullable=False),
        pa.field("values", pa.list_(number), nullable=False),
    ]
    if any(layout.state_widths):
        fields.append(pa.field("state", pa.list_(number), nullable=False))
    cut = {"dim": layout.dim, "starts": layout.starts, "columns": layout.columns}
    schema = pa.schema(fields, metadata={METADATA: json.dumps(cut).encode()})
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for block in blocks:
            num_values, num_state = layout.counts(block.present)
            present = pa.FixedSizeListArray.from_arrays(pa.array(block.present.ravel()), layout.num_chunks)
            columns = [pa.array(block.keys), present, _lists(num_values, block.values)]
            if any(layout.state_widths):
                columns.append(_lists(num_state, block.state))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _lists(lengths: npt.NDArray[np.int64], numbers: npt.NDArray[Any]) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(numbers))


def _read_parquet(path: Path, layout: PrunedLayout) -> Iterator[PrunedBlock]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BLOCK_ROWS):
            arrays = {
                name: batch.column(name).flatten().to_numpy(zero_copy_only=False)
                for name in batch.schema.names
                if name != "key"
            }
            present = arrays["present"].reshape(len(batch), layout.num_chunks)
            nothing = np.empty(0, layout.dtype)
            yield PrunedBlock(
                batch.column("key").to_numpy(), present, arrays["values"], arrays.get("state", nothing)
            )


PRUNED_FORMATS = {
    "parquet": PrunedFormat(".parquet", _write_parquet, _read_parquet),
    "safetensors": PrunedFormat(".safetensors", write_safetensors, read_pruned_safetensors),
    "npz": PrunedFormat(".npz", write_npz, read_pruned_npz),
}
