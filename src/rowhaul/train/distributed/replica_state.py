"""What every worker holds a copy of, as bytes: dense weights, buffers, optimizer state and replicated rows.

Rank 0 sends it to workers that were left out. The other end gets the same bits, and continues as if it had
trained all along.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import HotRows
from rowhaul.store import TableGroup
from rowhaul.train.dense_state import load_portable, portable_state
from rowhaul.train.distributed.replicas import dense_tensors
from rowhaul.train.snapshot import join_state, split_state
from rowhaul.transport.base import Bytes


class ReplicaState:
    """Packs one worker's copies, and replaces them by those of another.

    Args:
        model: its parameters and persistent buffers; others may differ between ranks.
        optimizer: of the dense weights.
        cache: holds the replicated rows.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, cache: RowMemory) -> None:
        self._model, self._optimizer, self._cache = model, optimizer, cache

    def pack(self, hot: HotRows | None) -> Bytes:
        """Copy everything into one message; ``hot`` are the replicated rows."""
        state, plain = split_state(portable_state(self._optimizer))
        tensors = {"model": dict(dense_tensors(self._model)), "optimizer": state}
        described = [
            [part, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for part, named in tensors.items()
            for name, tensor in named.items()
        ]
        header = json.dumps({"tensors": described, "plain": plain}).encode()
        parts = [np.array([len(header)], np.int64).view(np.uint8), np.frombuffer(header, np.uint8)]
        parts += [_as_bytes(tensor) for named in tensors.values() for tensor in named.values()]
        parts += [
            group.arena.read(locations).view(np.uint8).reshape(-1) for group, locations in self._rows(hot)
        ]
        return np.concatenate(parts)

    @torch.no_grad()
    def unpack(self, data: Bytes, hot: HotRows | None) -> None:
        """Replace everything here by what another worker has packed."""
        place = 8 + int(data[:8].view(np.int64)[0])
        header = json.loads(data[8:place].tobytes())
        tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for part, name, type_name, shape in header["tensors"]:
            dtype = getattr(torch, type_name)
            end = place + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            tensors[part][name] = torch.from_numpy(data[place:end].copy()).view(dtype).reshape(shape)
            place = end
        for name, tensor in dense_tensors(self._model):
            tensor.copy_(tensors["model"][name])
        state = join_state(tensors["optimizer"], header["plain"])
        _restore_tuples(state["param_groups"], self._optimizer.param_groups)
        load_portable(self._optimizer, state)
        for group, locations in self._rows(hot):
            records = np.empty_like(group.arena.read(locations))
            records.view(np.uint8).reshape(-1)[:] = data[place : place + records.nbytes]
            group.arena.write(locations, records)
            place += records.nbytes
        assert place == len(data), "the workers hold different copies"

    def _rows(self, hot: HotRows | None) -> Iterator[tuple[TableGroup, npt.NDArray[np.int64]]]:
        """Yield the locations of the replicated rows in each group, in the same order on all workers."""
        if hot is None or not len(hot):
            return
        for number, places, positions in self._cache.by_group(hot.tables):
            group = self._cache.groups[number]
            locations = group.index.find_each(positions, hot.keys[places])
            assert (locations >= 0).all(), "a replicated row is missing"
            yield group, locations


def _as_bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _restore_tuples(groups: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Turn lists back into the tuples that JSON had no word for, such as Adam's betas."""
    for group, ours in zip(groups, own, strict=True):
        group |= {name: tuple(value) for name, value in group.items() if _is_tuple(ours, name)}


def _is_tuple(group: Mapping[str, Any], name: str) -> bool:
    return isinstance(group.get(name), tuple)
