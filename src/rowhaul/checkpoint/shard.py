"""The files that one process contributes to a checkpoint: streamed, synced, with their checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from rowhaul._files import sync
from rowhaul.checkpoint.layout import TableEntry, checksum
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
    """Writes files into a folder and keeps account of them.

    Args:
        folder: which is there.
        label: distinguishes files of rows from those of other processes in the same folder.
    """

    def __init__(self, folder: Path, label: str = "") -> None:
        self.written = Shard()
        self._folder, self._label = folder, f"{label}-" if label else ""

    def tensors(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a group's name, for `CheckpointReader.tensors`."""
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        self._write(f"tensors-{group}.safetensors", partial(safetensors.torch.save_file, plain))
        self.written.groups.append(group)

    def arrays(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
        """Store arrays as a file of their own, for `CheckpointReader.arrays`; returns the file's name."""
        plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        self._write(f"{name}.safetensors", partial(safetensors.numpy.save_file, plain))
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
        entry = TableEntry(name, dim, state_width, dtype, num_rows, tuple(names), format)
        self.written.tables.append(entry)

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        path = self._folder / name
        try:
            save(path)
            sync(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}; nothing was kept of it") from None
        self.written.files[name] = {"bytes": path.stat().st_size, "xxh3": checksum(path)}


def _joined(format: RowFormat, blocks: Iterable[Arrays], file_bytes: int) -> Iterator[Arrays]:
    """Join blocks until they are worth a file."""
    held: list[Arrays] = []
    held_bytes = 0
    for block in blocks:
        held.append(block)
        held_bytes += sum(array.nbytes for name, array in block.items() if name not in format.constants)
        if held_bytes >= file_bytes:
            yield format.join(held)
            held, held_bytes = [], 0
    if held:
        yield format.join(held)
