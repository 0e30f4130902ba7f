"""Writing a checkpoint: streamed, synced, and visible only when whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from rowhaul._files import sync
from rowhaul.checkpoint.layout import (
    FORMAT,
    MANIFEST_FILE,
    UNFINISHED_SUFFIX,
    VERSION,
    TableEntry,
    checksum,
)
from rowhaul.errors import CheckpointError

Block = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]
_FILE_BYTES = 64 << 20


class CheckpointWriter:
    """Builds a checkpoint beside its final place and renames it there when it is whole.

    Example:
        >>> with CheckpointWriter("run/checkpoints/step-000000010") as writer:
        ...     writer.tensors("model", dict(model.named_parameters()))
        ...     writer.table("items", collection.rows("items"), dim=16, state_width=1, dtype="float32")
        ...     writer.facts["step"] = 10
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.facts: dict[str, Any] = {}
        self._folder = self.path.with_name(self.path.name + UNFINISHED_SUFFIX)
        self._files: dict[str, dict[str, Any]] = {}
        self._tables: list[TableEntry] = []
        self._groups: list[str] = []

    def __enter__(self) -> CheckpointWriter:
        if (self.path / MANIFEST_FILE).exists():
            raise CheckpointError(f"{self.path} is a complete checkpoint already; choose another folder")
        shutil.rmtree(self._folder, ignore_errors=True)  # what an interrupted save left
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def tensors(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a group's name."""
        name = f"tensors-{group}.safetensors"
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        self._write(name, partial(safetensors.torch.save_file, plain))
        self._groups.append(group)

    def table(self, name: str, blocks: Iterable[Block], dim: int, state_width: int, dtype: str) -> None:
        """Store a table's rows, given as blocks of (keys, records), values before state."""
        names: list[str] = []
        num_rows = 0
        for keys, records in _joined(blocks, _FILE_BYTES):
            names.append(f"rows-{len(self._tables):04d}-{len(names):05d}.safetensors")
            parts = {"keys": keys, "values": np.ascontiguousarray(records[:, :dim])}
            if state_width:
                parts["state"] = np.ascontiguousarray(records[:, dim:])
            self._write(names[-1], partial(safetensors.numpy.save_file, parts))
            num_rows += len(keys)
        self._tables.append(TableEntry(name, dim, state_width, dtype, num_rows, tuple(names)))

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        path = self._folder / name
        try:
            save(path)
            sync(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}; nothing was kept of it") from None
        self._files[name] = {"bytes": path.stat().st_size, "xxh3": checksum(path)}

    def _finish(self) -> None:
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "facts": self.facts,
            "groups": self._groups,
            "tables": [asdict(table) for table in self._tables],
            "files": self._files,
        }
        path = self._folder / MANIFEST_FILE
        path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        sync(path)
        sync(self._folder)
        if self.path.exists():
            shutil.rmtree(self.path)  # a folder without a manifest, seen above
        self._folder.rename(self.path)
        sync(self.path.parent)


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
