"""A checkpoint as a state dict that `torch.distributed.checkpoint` saves, and what reads it again.

Every rank has tensors of its own: the arrays of the files that it would write, by the names of the files. The
names tell whose they are, so ranks need not agree on anything, and a reader need not know how many they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from rowhaul._activity import progressed
from rowhaul.checkpoint.layout import FORMAT, LAYOUT, SCHEDULE, VERSION, TableEntry
from rowhaul.checkpoint.location import Place, as_place
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.shard import ShardWriter
from rowhaul.errors import CheckpointError

_MANIFEST, _TENSORS, _FILE = "manifest", "tensors-", ".safetensors"
_ALWAYS = {"model", "dense-optimizer"}  # groups of every state; `save` keeps no trace of empty ones


class StateShard(ShardWriter):
    """Collects what a rank would write in ``state``, but for files that only the same cluster can use."""

    def __init__(self, label: str, state: dict[str, dict[str, Tensor]]) -> None:
        super().__init__("", label)
        self.state = state

    def _write(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> None:
        if not name.startswith((LAYOUT, SCHEDULE)):
            tensors = {key: _own_tensor(array) for key, array in arrays.items()}
            self.state[name.removesuffix(_FILE).removeprefix(_TENSORS)] = tensors


def manifest(facts: Mapping[str, Any], tables: Sequence[TableEntry]) -> Tensor:
    """Describe a checkpoint, as text in a tensor: everything else would be pickled."""
    described = [{name: getattr(one, name) for name in _DESCRIBED} for one in tables]
    text = json.dumps({"format": FORMAT, "version": VERSION, "facts": facts, "tables": described})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


_DESCRIBED = ("name", "dim", "state_width", "dtype", "format")  # the rest is seen from the tensors' names


class DcpReader(CheckpointReader):
    """Reads what was saved through `torch.distributed.checkpoint`, on any number of ranks, each by itself.

    Args:
        path: the folder, ``checkpoint_id`` when it was saved.
        storage: what reads it where it is no folder, such as ``FsspecReader("s3://…")``.

    Example:
        >>> for keys, records in DcpReader("saved").rows("items"):
        ...     print(len(keys))
    """

    def __init__(self, path: str | Place, storage: StorageReader | None = None) -> None:
        self._reader = storage or FileSystemReader(str(path))
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; name a folder that torch.distributed.checkpoint.save has "
                "completed"
            ) from None
        entries = self._metadata.state_dict_metadata
        self._entries = {name: one for name, one in entries.items() if isinstance(one, TensorStorageMetadata)}
        found = self._load([_MANIFEST])[_MANIFEST] if _MANIFEST in self._entries else torch.empty(0)
        if not len(found):
            raise CheckpointError(
                f"{path} has no state of Rowhaul's: save what training.state_dict() returns on every rank"
            )
        described = json.loads(bytes(found.numpy().tobytes()))
        if (given := (described["format"], described["version"])) != (FORMAT, VERSION):
            raise CheckpointError(f"{path} is {given[0]} {given[1]}; this reads {FORMAT} {VERSION}")
        names = sorted({name.partition(".")[0] for name in self._entries} | _ALWAYS)
        self._describe(
            as_place(path),
            described["facts"],
            [name for name in names if name != _MANIFEST and not name.startswith("rows-")],
            [self._table(number, one, names) for number, one in enumerate(described["tables"])],
            {},
        )

    def _table(self, number: int, described: Mapping[str, Any], names: Sequence[str]) -> TableEntry:
        files = tuple(name for name in names if name.startswith(f"rows-{number:04d}-"))
        num_rows = sum(self._entries[f"{name}.keys"].size[0] for name in files)
        return TableEntry(**described, num_rows=num_rows, files=files)

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors stored under a group's name; none of a model or an optimizer that had none."""
        if group not in self.groups:
            raise CheckpointError(f"{self.path}: no tensors called {group!r}; there are {self.groups}")
        return self._inside(group)

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays that a file would have."""
        return {key: tensor.numpy() for key, tensor in self._inside(name).items()}

    def keys(self, table: str) -> Iterator[npt.NDArray[np.int64]]:
        """The keys of a table's rows, block by block."""
        for name in self.tables[table].files:
            yield self._load([f"{name}.keys"])[f"{name}.keys"].numpy()

    def _inside(self, name: str) -> dict[str, Tensor]:
        prefix = f"{name}."
        found = self._load([one for one in self._entries if one.startswith(prefix)])
        return {key.removeprefix(prefix): tensor for key, tensor in found.items()}

    def _load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read tensors; no other rank takes part, as `torch.distributed.checkpoint.load` would have it."""
        progressed()
        entries = {name: self._entries[name] for name in names}
        state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in entries.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(state, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        try:
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except (OSError, EOFError, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}; use another checkpoint") from error
        return state


def _own_tensor(array: npt.NDArray[Any] | Tensor) -> Tensor:
    """Copy: training goes on, and a state dict stays as it is."""
    if isinstance(array, Tensor):
        return array.detach().cpu().clone()
    return torch.from_numpy(np.array(array, order="C"))
