"""`DeviceRows`: whole rows in the memory of a card, found, pooled and stepped there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.device.batches import FeatureBags, Ids
from rowhaul.device.tables import DeviceTables
from rowhaul.errors import ConfigError, UnknownKeyError
from rowhaul.nn.early import EarlyLookups
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import LocalRows
from rowhaul.nn.named_rows import NamedRows
from rowhaul.nn.row_source import Arrays, RowGradients, RowNote, RowSource
from rowhaul.optim import RowOptimizerRule


class DeviceRead:
    """One batch's use of tables on a card."""

    def __init__(
        self,
        rows: DeviceRows,
        number: int,
        ids: Ids,
        records: Tensor,
        spare: Tensor | None,
        holds: Callable[[], bool] = lambda: True,  # whether the records are still those of the ids
    ) -> None:
        self.device, self.entries, self._holds = rows.device, ids.entries, holds
        self._rows, self._number, self._ids = rows, number, ids
        self._records, self._spare = records, spare
        self._cleared = rows.num_clears

    def pool(self, weights: Tensor | None, out: Any) -> None:
        """Write this group's columns of ``out``."""
        self._tables.pool(self._records, self._bags(weights), self._spare, torch.as_tensor(out))

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Any) -> None:
        """Keep the gradients of vectors for the step, which sums them by row."""
        self._check()
        one = self._records, self._bags(weights), torch.as_tensor(pooled_gradients)
        self._rows.pending[self._number].append(one)

    def weight_gradients(self, pooled_gradients: Any) -> Any:
        """Return the gradient of each id's weight."""
        self._check()
        gradients = torch.as_tensor(pooled_gradients)
        return self._tables.weight_gradients(self._records, self._ids.bags, self._spare, gradients)

    def _check(self) -> None:
        """Refuse records that may be those of other rows by now."""
        if self._cleared != self._rows.num_clears:
            raise ConfigError("rows were cleared or loaded between forward and backward; run forward again")
        if not self._holds():
            raise ConfigError(
                "a step was taken between forward and backward, after which rows may leave the card "
                "(device_memory); run forward again"
            )

    @property
    def _tables(self) -> DeviceTables:
        return self._rows.tables[self._number]

    def _bags(self, weights: Tensor | None) -> Any:
        if weights is None:
            return self._ids.bags
        chosen = weights.detach().to(self._tables.device, self._tables.dtype)[self._ids.entries]
        return replace(self._ids.bags, weights=chosen.contiguous())


class DeviceRows(NamedRows):
    """All rows of a collection in the memory of a card, created on first sight and stepped there.

    Args:
        groups: the collection's features.
        optimizer: of rows.
        seed: of first values.
        device: the card.
    """

    device_memory = 0  # bytes on the card that bound the rows there; 0: all are there

    def __init__(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, device: torch.device
    ) -> None:
        self.device, self.num_clears = device, 0
        self.same_bits = False  # whether steps give the bits of a CPU, for replays of a cluster's
        self._groups, self._seed = groups, seed
        self._early = EarlyLookups[list[Ids]]()
        self.recorded: KeyedJaggedTensor | None = None  # a batch whose step is being recorded
        self.tables: list[DeviceTables] = []
        by_dim = self.groups_by_dim(groups)
        self.features = [FeatureBags(some, device) for some in by_dim]
        self.tables = [self.make_tables(some, optimizer, seed) for some in by_dim]
        self.pending: list[list[tuple[Tensor, Any, Tensor]]] = [[] for _ in self.tables]

    @staticmethod
    def groups_by_dim(groups: Sequence[FeatureGroup]) -> list[list[FeatureGroup]]:
        """Bring groups of one row size together."""
        by_dim: dict[int, list[FeatureGroup]] = {}
        for group in groups:
            by_dim.setdefault(group.dim, []).append(group)
        return list(by_dim.values())

    def make_tables(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int
    ) -> DeviceTables:
        """Make the tables of one row size."""
        specs = [spec for one in groups for spec in one.specs]
        return DeviceTables(specs, optimizer, groups[0].dtype, seed, self.device)

    def moved_to(
        self,
        device: torch.device,
        groups: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        device_memory: int = 0,
    ) -> RowSource:
        """Return the same rows in host memory, or on another card."""
        there: Any = LocalRows(groups, optimizer, seed)
        if device.type != "cpu":
            there = rows_on(device, groups, optimizer, seed, device_memory)
        moved: RowSource = self.copied_into(there)
        return moved

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index, on the card."""
        return sum(tables.allocated_bytes for tables in self.tables)

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[DeviceRead]:
        """Find the rows of a batch; in training, create those that are new."""
        return [self._read(number, features, training, on_unknown) for number in range(len(self.tables))]

    def _read(self, number: int, features: KeyedJaggedTensor, training: bool, on_unknown: str) -> DeviceRead:
        ids, tables = self._ids_of(number, features), self.tables[number]
        if features is self.recorded:
            return DeviceRead(self, number, ids, tables.find_or_make_within(ids.keys, ids.tables), None)
        if training:
            return DeviceRead(self, number, ids, tables.find_or_make(ids.keys, ids.tables), None)
        records = tables.find(ids.keys, ids.tables)
        absent = torch.nonzero(records < 0).reshape(-1)
        spare = None
        if len(absent):
            spare = self._unknown(tables, ids, absent, on_unknown)
            records[absent] = -1 - torch.arange(len(absent), dtype=torch.int32, device=self.device)
        return DeviceRead(self, number, ids, records, spare)

    def _ids_of(self, number: int, features: KeyedJaggedTensor) -> Ids:
        found = self._early.get(features)
        return self.features[number].of(features) if found is None else found[number]

    def _unknown(self, tables: DeviceTables, ids: Ids, absent: Tensor, on_unknown: str) -> Tensor:
        """Rows for ids that have none."""
        if on_unknown == "error":
            name = tables.tables[int(ids.tables[absent[0]])].name
            raise UnknownKeyError(
                f"table {name!r}: key {int(ids.keys[absent[0]])} was never trained ({len(absent)} such ids "
                "in this batch); train on it, or set on_unknown to 'init' or 'default'"
            )
        if on_unknown == "default":
            return torch.zeros((len(absent), tables.dim), dtype=tables.dtype, device=self.device)
        return tables.initial(ids.keys[absent], ids.tables[absent])

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients."""
        for tables, pending in zip(self.tables, self.pending, strict=True):
            if len(pending) > 1 or (pending and self.same_bits):
                # The gradients of each pass are summed before they are added, as workers and CPUs do.
                parts = [self._summed(tables, *one) for one in pending]
                pending.clear()
                records, gradients = (torch.cat(one) for one in zip(*parts, strict=True))
                tables.step_rows(records, gradients, lr, number)
            elif pending:
                records, bags, gradients = pending.pop()
                tables.step(records, bags, gradients, lr, number)

    def _summed(
        self, tables: DeviceTables, records: Tensor, bags: Any, gradients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows that a pass has read, and the sums of their gradients."""
        distinct, numbers = torch.unique(records, return_inverse=True)
        return distinct, tables.sum_rows(numbers.to(torch.int32), len(distinct), bags, gradients)

    # Recording a step.

    @property
    def memory_version(self) -> tuple[Any, ...]:
        """Something that changes when a recorded step must not be replayed any more."""
        return self.num_clears, *(tables.memory_version for tables in self.tables)

    def can_record(self, features: KeyedJaggedTensor) -> bool:
        """Whether the step of a batch waits for nothing; makes room for its rows."""
        ids = self._early.get(features)
        if ids is None or not all(one.bags.one_each for one in ids) or features.weights_or_none() is not None:
            return False
        return all(tables.has_spare(len(one.keys)) for tables, one in zip(self.tables, ids, strict=True))

    def static_copy(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ids of the same shape that stay where they are."""
        static = KeyedJaggedTensor(
            features.keys(), features.values(), lengths=features.lengths(), stride=features.stride()
        )
        self._early[static] = [replace(one, keys=one.keys.clone()) for one in self._early[features]]
        return static

    @contextmanager
    def recording(self, features: KeyedJaggedTensor) -> Iterator[None]:
        """Record what is done for these ids."""
        self.recorded = features
        try:
            yield
        finally:
            self.recorded = None

    def put(self, features: KeyedJaggedTensor, static: KeyedJaggedTensor) -> None:
        """Copy the ids of a batch to where a recorded step reads them."""
        for one, there in zip(self._early[features], self._early[static], strict=True):
            there.keys.copy_(one.keys, non_blocking=True)

    def replayed(self, features: KeyedJaggedTensor) -> None:
        """Ask how many rows there are."""
        for tables, ids in zip(self.tables, self._early[features], strict=True):
            tables.index.ask(len(ids.keys))

    def set_rates(self, lr: float, number: int) -> None:
        """Put what depends on the step on the card."""
        for tables in self.tables:
            tables.set_rates(lr, number)

    def gradients(self) -> list[RowGradients]:
        """Return the gradients of vectors that await a step, a row for each sample."""
        return [
            RowGradients(np.arange(bags.num_samples), gradients, partial(_names_of, self.features[number]))
            for number, pending in enumerate(self.pending)
            for _, bags, gradients in pending
        ]

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""
        for pending in self.pending:
            pending.clear()

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Send the ids to the card; rows are found there, in the order of its work."""
        self._early[features] = [one.of(features) for one in self.features]

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Do nothing: rows are the same in whatever parts a batch is read."""

    def num_rows(self, table: str) -> int:
        """Count the rows of a table."""
        tables, position = self.find_table(table)
        return int(tables.num_rows(position))

    def clear(self) -> None:
        """Drop every row and every gradient."""
        self.drop_gradients()
        self.num_clears += 1
        for tables in self.tables:
            tables.clear()

    # A copy has memory of its own, so what tells where records are would be wrong there.

    def __deepcopy__(self, memo: Any) -> DeviceRows:
        copied: DeviceRows = self.copied_into(rows_on(*self._made_with()))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._made_with(), self.state())

    def _made_with(self) -> tuple[Any, ...]:
        return self.device, self._groups, self.tables[0].optimizer, self._seed, self.device_memory

    def report(self) -> None:
        """Return nothing: all rows are held, whole."""

    def notes(self) -> list[RowNote]:
        """Return nothing: rows come and stay."""
        return []


def rows_on(
    device: torch.device,
    groups: Sequence[FeatureGroup],
    optimizer: RowOptimizerRule,
    seed: int,
    device_memory: int,
) -> DeviceRows:
    """Make the rows of a collection on a card: all of them, or within ``device_memory`` bytes if not 0."""
    _check_is_current(device)
    if not device_memory:
        return DeviceRows(groups, optimizer, seed, device)
    from rowhaul.device.cached_rows import CachedDeviceRows  # which derives from these

    return CachedDeviceRows(groups, optimizer, seed, device, device_memory)


def _unpickled(made_with: tuple[Any, ...], state: Arrays) -> DeviceRows:
    rows = rows_on(*made_with)
    rows.load_state(state)
    return rows


def _check_is_current(device: torch.device) -> None:
    """Refuse a card that is not the thread's own: Triton starts kernels on that."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return
    raise ConfigError(
        f"rows are to be on {device}, but this thread starts kernels on cuda:{torch.cuda.current_device()}; "
        f'call torch.cuda.set_device("{device}") before rows come there, in each thread that uses them'
    )


def _names_of(features: FeatureBags, place: int) -> str:
    return f"sample {place}, features {', '.join(features.features)}"
