"""Digests of what a worker holds a copy of, taken at iterations that all workers agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from rowhaul._machine import describe_machine
from rowhaul.planning.replicas import ReplicaDigests
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import HotRows

# A digest reads every value once, the optimizer's step several times: far below 1 % of an iteration.
COMPARE_EVERY = 100
ROWS_IN_PASSING = 256  # replicated rows hashed at a time, others the next time
ROWS_AT_REST = 4096


class Replicas:
    """The copies of one worker.

    Args:
        model: its parameters and persistent buffers are compared.
        cache: holds the replicated rows.
        optimizer: its state is compared, too, if given.
        every: iterations between two comparisons in passing; 0: none.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: RowMemory,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = COMPARE_EVERY,
    ) -> None:
        self._model, self._cache, self._optimizer, self._every = model, cache, optimizer, every
        self._rows: dict[str, str] = {}

    def is_due(self, iteration: int) -> bool:
        """Whether all workers compare their copies after this many iterations."""
        return self._every > 0 and iteration % self._every == 0

    def hash_rows(self, iteration: int, hot: HotRows | None) -> None:
        """Hash some replicated rows for `in_passing`, before the moves thread changes the cache."""
        first = iteration // max(self._every, 1) * ROWS_IN_PASSING
        self._rows = dict(_rows(self._cache, hot, first, ROWS_IN_PASSING))

    def in_passing(self, iteration: int) -> ReplicaDigests:
        """Hash the dense weights after the optimizer's step; rows were hashed before."""
        return self._digests(iteration, self._rows, self._optimizer)

    def at_rest(
        self, iteration: int, hot: HotRows | None, optimizer: torch.optim.Optimizer | None
    ) -> ReplicaDigests:
        """Hash everything between two segments, with the state of this optimizer, if given."""
        rows = dict(_rows(self._cache, hot, iteration * ROWS_AT_REST, ROWS_AT_REST))
        return self._digests(iteration, rows, optimizer or self._optimizer)

    def _digests(
        self, iteration: int, rows: Mapping[str, str], optimizer: torch.optim.Optimizer | None
    ) -> ReplicaDigests:
        tensors = {**dict(dense_tensors(self._model)), **dict(_state(self._model, optimizer))}
        by_name = {name: _digest(tensor) for name, tensor in tensors.items()}
        return ReplicaDigests(iteration, {**by_name, **rows}, describe_machine())


def dense_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that belong to the model's state; others may differ between ranks."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    if optimizer is None:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name} of {names.get(parameter, f'parameter {number}')}", value


def _rows(cache: RowMemory, hot: HotRows | None, first: int, count: int) -> Iterator[tuple[str, str]]:
    """Hash ``count`` replicated rows with their optimizer state, from the ``first`` on, in a circle."""
    if hot is None or not len(hot):
        return
    places = (first + np.arange(min(count, len(hot)))) % len(hot)
    tables, keys = hot.tables[places], hot.keys[places]
    for number, some, positions in cache.by_group(tables):
        group = cache.groups[number]
        locations = group.index.find_each(positions, keys[some])
        held = locations >= 0
        records = iter(group.arena.read(locations[held]))
        for place, is_held in zip(some.tolist(), held.tolist(), strict=True):
            table = cache.layout.specs[tables[place]].name
            digest = xxhash.xxh3_64_hexdigest(next(records).data) if is_held else "absent"
            yield f"replicated row {keys[place]} of table {table!r}", digest


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(values.view(torch.uint8).numpy().data)
