"""The files that one process contributes to a checkpoint: streamed, synced, with their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from rowhaul._activity import progressed
from rowhaul.checkpoint.array_file import pieces
from rowhaul.checkpoint.layout import TableEntry
from rowhaul.checkpoint.location import Place, as_place, storage_of
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import RowFormat, row_format
from rowhaul.store.row_parts import Arrays
from rowhaul.store.whole_rows import WholeRows

Block = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]
FILE_BYTES = 64 << 20  # files of rows are cut at about this size


@dataclass
class Shard:
    """What has been written: sizes and checksums by file name, tables, and groups of tensors."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: list[TableEntry] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """As text, for the process that writes the manifest."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Shard:
        """The inverse of `to_json`."""
        given = json.loads(text)
        return cls(given["files"], list(map(TableEntry.from_dict, given["tables"])), given["groups"])


class ShardWriter:
    """Writes files into a folder, a few MiB at a time, and keeps account of them.

    Args:
        folder: that `prepare` returned.
        label: distinguishes files of rows from those of other processes in the same folder.
    """

    def __init__(self, folder: str | Place, label: str = "") -> None:
        self.written = Shard()
        self._folder, self._label = as_place(folder), f"{label}-" if label else ""

    def tensors(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a group's name, for `CheckpointReader.tensors`."""
        self._write(
            f"tensors-{group}.safetensors", {name: one.detach().cpu() for name, one in tensors.items()}
        )
        self.written.groups.append(group)

    def arrays(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
        """Store arrays as a file of their own, for `CheckpointReader.arrays`; returns the file's name."""
        self._write(f"{name}.safetensors", arrays)
        return f"{name}.safetensors"

    def table(self, name: str, blocks: Iterable[Block], dim: int, state_width: int, dtype: str) -> None:
        """Store a table's whole rows, given as (keys, records), values before state."""
        encode = WholeRows().encode
        encoded = (encode(keys, records, dim) for keys, records in blocks)
        self.blocks(name, encoded, dim, state_width, dtype)

    def blocks(
        self,
        name: str,
        blocks: Iterable[Arrays],
        dim: int,
        state_width: int,
        dtype: str,
        format: str = "whole",
    ) -> None:
        """Store a table's rows, given as blocks of their format."""
        prefix = f"rows-{len(self.written.tables):04d}-{self._label}"
        names: list[str] = []
        num_rows = 0
        for block in _joined(row_format(format), blocks, FILE_BYTES):
            names.append(self.arrays(f"{prefix}{len(names):05d}", block))
            num_rows += len(block["keys"])
            del block  # it is as large as a file, and the next one is made now
        entry = TableEntry(name, dim, state_width, dtype, num_rows, tuple(names), format)
        self.written.tables.append(entry)

    def _write(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> None:
        path = self._folder / name
        try:
            self.written.files[name] = storage_of(path).retry(lambda: _write_file(path, arrays))
        except OSError as error:
            reason = (error.strerror or str(error)).removeprefix(f"{path}: ")
            raise CheckpointError(f"{path} cannot be written: {reason}; nothing was kept of it") from None


def _write_file(path: Place, arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> dict[str, Any]:
    """Write a file; returns its size and checksum."""
    digest, size = xxhash.xxh3_64(), 0
    file = storage_of(path).create(path)
    try:
        for piece in pieces(arrays):
            file.write(piece)
            digest.update(piece)
            progressed()
            size += len(piece)
        file.close()
    except BaseException:
        file.discard()
        raise
    return {"bytes": size, "xxh3": digest.hexdigest()}


def _joined(format: RowFormat, blocks: Iterable[Arrays], file_bytes: int) -> Iterator[Arrays]:
    """Join blocks until they are worth a file."""
    held: list[Arrays] = []
    held_bytes = 0
    for block in blocks:
        held.append(block)
        held_bytes += sum(array.nbytes for name, array in block.items() if name not in format.constants)
        if held_bytes >= file_bytes:
            yield _join_all(format, held)
            held_bytes = 0
    if held:
        yield _join_all(format, held)


def _join_all(format: RowFormat, held: list[Arrays]) -> Arrays:
    """Join blocks, and hold them no longer while the file is written."""
    joined = format.join(held)
    held.clear()
    return joined
