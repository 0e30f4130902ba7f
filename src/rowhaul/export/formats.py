"""The kinds of files that a table can be exported to, each written and read a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul.checkpoint.plain_files import (
    BLOCK_ROWS,
    RowLayout,
    read_npz,
    read_safetensors,
    write_npz,
    write_safetensors,
)
from rowhaul.checkpoint.shard import Block


class Format(NamedTuple):
    """How files of one kind are written and read."""

    suffix: str
    write: Callable[[Path, RowLayout, Iterable[Block]], None]
    read: Callable[[Path, RowLayout], Iterator[Block]]


def _write_parquet(path: Path, layout: RowLayout, blocks: Iterable[Block]) -> None:
    fields = [pa.field("key", pa.int64(), nullable=False)]
    for name, (dtype, shape) in list(layout.parts().items())[1:]:
        fields.append(pa.field(name, pa.list_(pa.from_numpy_dtype(dtype), shape[1]), nullable=False))
    schema = pa.schema(fields)
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for block in blocks:
            keys, *others = layout.split(block).values()
            lists = [pa.FixedSizeListArray.from_arrays(one.ravel(), one.shape[1]) for one in others]
            writer.write_table(pa.Table.from_arrays([pa.array(keys), *lists], schema=schema))


def _read_parquet(path: Path, layout: RowLayout) -> Iterator[Block]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BLOCK_ROWS):
            arrays = {"keys": batch.column("key").to_numpy()}
            for name, (_, shape) in list(layout.parts().items())[1:]:
                flat = batch.column(name).flatten().to_numpy(zero_copy_only=False)
                arrays[name] = flat.reshape(len(batch), shape[1])
            yield layout.join(arrays)


FORMATS = {
    "parquet": Format(".parquet", _write_parquet, _read_parquet),
    "safetensors": Format(".safetensors", write_safetensors, read_safetensors),
    "npz": Format(".npz", write_npz, read_npz),
}
