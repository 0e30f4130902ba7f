"""The files that one process contributes to a checkpoint: streamed, synced, with their checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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
from rowhaul.pruning.row_files import Arrays, joined

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
        tables = [TableEntry(**{**one, "files": tuple(one["files"])}) for one in given["tables"]]
        return cls(given["files"], tables, given["groups"])


class ShardWriter:
    """Writes files into a folder and keeps account of them.

    Args:
        folder: which is there.
        label: tells files of rows from those of other processes in the same folder.
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
        """Store a table's rows, given as blocks of (keys, records), values before state."""
        prefix = f"rows-{len(self.written.tables):04d}-{self._label}"
        names: list[str] = []
        num_rows = 0
        for keys, records in _joined(blocks, FILE_BYTES):
            parts = {"keys": keys, "values": records[:, :dim]}
            if state_width:
                parts["state"] = records[:, dim:]
            names.append(self.arrays(f"{prefix}{len(names):05d}", parts))
            num_rows += len(keys)
        self.written.tables.append(TableEntry(name, dim, state_width, dtype, num_rows, tuple(names)))

    def pruned_table(
        self, name: str, blocks: Iterable[Arrays], columns: Arrays, dim: int, dtype: str
    ) -> None:
        """Store a table's pruned rows as `rowhaul.pruning.row_files` has them, ``columns`` with each file."""
        prefix = f"rows-{len(self.written.tables):04d}-{self._label}"
        names: list[str] = []
        num_rows = 0
        for parts in joined(blocks, FILE_BYTES):
            names.append(self.arrays(f"{prefix}{len(names):05d}", {**parts, **columns}))
            num_rows += len(parts["keys"])
        self.written.tables.append(TableEntry(name, dim, 0, dtype, num_rows, tuple(names)))

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        path = self._folder / name
        try:
            save(path)
            sync(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}; nothing was kept of it") from None
        self.written.files[name] = {"bytes": path.stat().st_size, "xxh3": checksum(path)}


def _joined(blocks: Iterable[Block], file_bytes: int) -> Iterable[Block]:
    """Blocks put together until they are worth a file."""
    held: list[Block] = []
    held_bytes = 0
    for keys, records in blocks:
        held.append((keys, records))
        held_bytes += keys.nbytes + records.nbytes
        if held_bytes >= file_bytes:
            yield _concatenate(held)
            held, held_bytes = [], 0
    if held:
        yield _concatenate(held)


def _concatenate(held: list[Block]) -> Block:
    return np.concatenate([keys for keys, _ in held]), np.concatenate([records for _, records in held])
