"""The kinds of files that a table can be exported to, written and read a block of rows at a time.

Which arrays a file holds is the rows' format's to say: see `ExportFile`. Parquet has a line a row, the key as
``key`` and arrays as lists, of any length where rows differ.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open

from rowhaul.store import row_parts
from rowhaul.store.row_parts import Arrays, ExportFile

METADATA = b"rowhaul"  # of a Parquet file: what its format says of all rows, as JSON
Take = Callable[[str, int], npt.NDArray[Any]]


class FileKind(NamedTuple):
    """How files of one kind are written and read."""

    suffix: str
    write: Callable[[Path, ExportFile, Iterable[Arrays]], None]
    read: Callable[[Path, ExportFile], Iterator[Arrays]]


def _write_safetensors(path: Path, layout: ExportFile, blocks: Iterable[Arrays]) -> None:
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
        for block in _with_constants(layout, blocks):
            for name, array in block.items():
                file.seek(places[name])
                file.write(np.ascontiguousarray(array).data)
                places[name] += array.nbytes


def _read_safetensors(path: Path, layout: ExportFile) -> Iterator[Arrays]:
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in layout.parts()}
        places = dict.fromkeys(slices, 0)

        def take(name: str, count: int) -> npt.NDArray[Any]:
            first = places[name]
            places[name] += count
            some: npt.NDArray[Any] = slices[name][first : first + count]
            return some

        yield from _blocks(layout, take)


def _write_npz(path: Path, layout: ExportFile, blocks: Iterable[Arrays]) -> None:
    # The members of an archive lie one after the other, so each grows in a file of its own first.
    members = {name: path.with_name(f"{path.name}.{name}") for name in layout.parts()}
    with ExitStack() as stack:
        files = {name: stack.enter_context(member.open("wb")) for name, member in members.items()}
        for name, (dtype, shape) in layout.parts().items():
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(files[name], header)
        for block in _with_constants(layout, blocks):
            for name, array in block.items():
                files[name].write(np.ascontiguousarray(array).data)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            archive.write(member, f"{name}.npy")
            member.unlink()


def _read_npz(path: Path, layout: ExportFile) -> Iterator[Arrays]:
    with zipfile.ZipFile(path) as archive, ExitStack() as stack:
        files = {name: stack.enter_context(archive.open(f"{name}.npy")) for name in layout.parts()}
        kinds = {name: _npy_kind(file) for name, file in files.items()}

        def take(name: str, count: int) -> npt.NDArray[Any]:
            dtype, shape = kinds[name]
            data = files[name].read(count * int(np.prod(shape[1:])) * dtype.itemsize)
            return np.frombuffer(data, dtype).reshape(-1, *shape[1:])

        yield from _blocks(layout, take)


def _npy_kind(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return type and shape of an array in NumPy's format, which is read up to its first element."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return dtype, shape


def _with_constants(layout: ExportFile, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
    yield layout.constants()
    yield from blocks


def _blocks(layout: ExportFile, take: Take) -> Iterator[Arrays]:
    """Yield blocks of rows, given what takes the next elements of an array."""
    parts = [name for name in layout.parts() if name not in layout.constants()]
    for first in range(0, layout.num_rows, row_parts.BLOCK_ROWS):
        count = min(row_parts.BLOCK_ROWS, layout.num_rows - first)
        ragged = layout.ragged()
        block = {name: take(name, count) for name in parts if name not in ragged}
        lengths = layout.lengths(block)
        yield {name: block[name] if name in block else take(name, int(lengths[name].sum())) for name in parts}


def _write_parquet(path: Path, layout: ExportFile, blocks: Iterable[Arrays]) -> None:
    nothing = {name: np.empty((0, *shape[1:]), dtype) for name, (dtype, shape) in layout.parts().items()}
    for name in layout.constants():
        del nothing[name]
    fields = []
    for name, array in layout.columns(nothing).items():
        kind = pa.from_numpy_dtype(array.dtype)
        if name in layout.ragged():
            kind = pa.list_(kind)
        elif array.ndim > 1:
            kind = pa.list_(kind, array.shape[1])
        fields.append(pa.field("key" if name == "keys" else name, kind, nullable=False))
    said = layout.metadata()
    schema = pa.schema(fields, metadata={METADATA: json.dumps(said).encode()} if said else None)
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for block in blocks:
            lengths = layout.lengths(block)
            columns = [_column(array, lengths.get(name)) for name, array in layout.columns(block).items()]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _column(array: npt.NDArray[Any], lengths: npt.NDArray[np.int64] | None) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(array).ravel())
    if lengths is not None:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), flat)
    return pa.FixedSizeListArray.from_arrays(flat, array.shape[1]) if array.ndim > 1 else flat


def _read_parquet(path: Path, layout: ExportFile) -> Iterator[Arrays]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=row_parts.BLOCK_ROWS):
            columns: dict[str, npt.NDArray[Any]] = {}
            for field in batch.schema:
                column, kind = batch.column(field.name), field.type
                if not pa.types.is_list(kind) and not pa.types.is_fixed_size_list(kind):
                    columns["keys" if field.name == "key" else field.name] = column.to_numpy()
                    continue
                flat = column.flatten().to_numpy(zero_copy_only=False)
                is_fixed = pa.types.is_fixed_size_list(kind)
                columns[field.name] = flat.reshape(len(batch), kind.list_size) if is_fixed else flat
            yield layout.from_columns(columns)


FILE_KINDS = {
    "parquet": FileKind(".parquet", _write_parquet, _read_parquet),
    "safetensors": FileKind(".safetensors", _write_safetensors, _read_safetensors),
    "npz": FileKind(".npz", _write_npz, _read_npz),
}
