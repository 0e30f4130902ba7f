"""`CachedDeviceRows`: rows in host memory, those used last on a card, where they are pooled and stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from rowhaul._quantities import bytes_text
from rowhaul.device.batches import FeatureBags
from rowhaul.device.cache_counts import CacheCounts
from rowhaul.device.cache_size import CacheSize
from rowhaul.device.cached_tables import CachedTables
from rowhaul.device.lanes import Lanes, await_here, here, worker
from rowhaul.device.lookahead import Lookahead, PlannedBatch
from rowhaul.device.rows import DeviceRead, DeviceRows
from rowhaul.errors import ConfigError
from rowhaul.nn.early import EarlyLookups
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.row_source import Int64s
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableGroup


class CachedDeviceRows(DeviceRows):
    """All rows of a collection in host memory; the card holds those used last, within so many bytes.

    Rows of a batch are brought to the card when it is announced (`locate_early`), beside training on others,
    or at the latest when it is read. What is learned does not depend on how many fit.

    Args:
        groups: the collection's features.
        optimizer: of rows.
        seed: of first values.
        device: the card.
        device_memory: bytes on the card for records, index and notes on both.
    """

    tables: list[CachedTables]  # type: ignore[assignment]  # a list of a narrower kind

    def __init__(
        self,
        groups: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        device: torch.device,
        device_memory: int,
    ) -> None:
        self.device_memory = device_memory
        self._lanes = Lanes(device)
        self._hauling = worker(device, "rowhaul-haul")
        self._batches = EarlyLookups[PlannedBatch]()
        self._ahead = Lookahead(self._plan, self._refuse, device)
        self._counted = CacheCounts()
        self._is_settled = True  # whether host memory has all rows as they are
        # A row size gets its share of the memory by what a sample reads of it.
        width = {group.dim: group.dim + optimizer.state_width(group.dim) for group in groups}
        self._wanted = dict.fromkeys(width, 0)
        for group in groups:
            self._wanted[group.dim] += len(group.features) * width[group.dim]
        super().__init__(groups, optimizer, seed, device)
        self._looked = [FeatureBags(some, device) for some in self.groups_by_dim(groups)]
        for lane in self._lanes.all():
            lane.wait(here(device))  # until all of this is there

    def make_tables(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int
    ) -> CachedTables:
        """Make the tables of one row size."""
        share = self._wanted[groups[0].dim] / sum(self._wanted.values())
        return CachedTables(
            [spec for one in groups for spec in one.specs], optimizer, groups[0].dtype, seed, self.device,
            int(self.device_memory * share), self._lanes, self._hauling,
        )  # fmt: skip

    # Planning.

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Bring the rows of a batch to the card, as soon as there is room."""
        self._announce(features)

    def _announce(self, features: KeyedJaggedTensor) -> PlannedBatch:
        with self._lanes.planning.use():
            ids = [one.of(features) for one in self.features]
        batch = self._batches[features] = self._ahead.announce(ids)
        return batch

    def _plan(self, batch: PlannedBatch) -> bool:
        with self._lanes.planning.use():
            done = len(batch.records)
            for tables, ids in zip(self.tables[done:], batch.ids[done:], strict=True):
                plan = tables.plan(ids, batch.number, self._ahead.released)
                if plan is None:
                    return False
                batch.records.append(plan.records)
                batch.fetched.append(plan.fetched)
        return True

    def _refuse(self, batch: PlannedBatch) -> ConfigError:
        """Say how much memory this batch needs."""
        needed = 0.0
        with self._lanes.planning.use():
            for tables, ids in zip(self.tables, batch.ids, strict=True):
                rows = tables.num_pinned(self._ahead.oldest) + tables.count_missing(ids)
                share = tables.num_bytes / self.device_memory
                needed = max(needed, CacheSize.for_records(rows, tables.arena.record_bytes) / share)
        is_alone = batch.number == self._ahead.oldest
        what = "one batch" if is_alone else "the batches whose gradients await a step"
        return ConfigError(
            f"device_memory is {bytes_text(self.device_memory)}, too little for the rows of {what}; give at "
            f"least {bytes_text(1.05 * needed)}, and twice that to fetch rows ahead, or use smaller batches"
        )

    def _batch_of(self, features: KeyedJaggedTensor) -> PlannedBatch:
        """Return a batch whose rows are on the card; what follows on this stream finds them there."""
        self._is_settled = False
        batch = self._batches.get(features)
        if batch is None or not self._ahead.is_valid(batch):
            batch = self._announce(features)
        for passed in self._ahead.acquire(batch, keeps=torch.is_grad_enabled()):
            for tables, fetched in zip(self.tables, passed.fetched, strict=False):  # maybe given up
                tables.hauler.num_homeless += fetched.result().made
        for fetched in batch.fetched:  # again: this may be another stream than where it was read first
            await_here(self.device, fetched.result().ready)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for records, ids in zip(batch.records, batch.ids, strict=True):
                for one in (records, ids.entries, ids.bags.offsets, ids.bags.bags):
                    if isinstance(one, torch.Tensor):
                        one.record_stream(stream)
        return batch

    # Reading and stepping.

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[DeviceRead]:
        """Find the rows of a batch; in training they come to the card, and new ones are made."""
        if not training:
            return self._look(features, on_unknown)
        batch = self._batches[features] if features is self.recorded else self._batch_of(features)
        holds = partial(self._ahead.is_valid, batch)
        return [
            DeviceRead(self, number, ids, records, None, holds)
            for number, (ids, records) in enumerate(zip(batch.ids, batch.records, strict=True))
        ]

    def _look(self, features: KeyedJaggedTensor, on_unknown: str) -> list[DeviceRead]:
        """Read copies of rows, wherever they are; the cache stays as it is."""
        reads = []
        with self._paused():
            for number, tables in enumerate(self.tables):
                ids = self._looked[number].of(features)
                records, values, absent = tables.look(ids, self._ahead.last_read)
                if len(absent):
                    unknown = self._unknown(tables, ids, absent, on_unknown)
                    places = torch.arange(len(absent), dtype=torch.int32, device=self.device)
                    records[absent] = -1 - len(values) - places
                    values = torch.cat([values, unknown])
                reads.append(DeviceRead(self, number, ids, records, values))
        return reads

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients."""
        super().step(lr, number)
        self._is_settled = False
        if self.recorded is None:
            self._ahead.finish()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Plan nothing for a while; all rows are where they belong, for this thread's stream."""
        with self._ahead.planning:
            self._hauling.submit(lambda: None).result()  # what was before it is done
            for lane in self._lanes.all():
                await_here(self.device, lane.mark())
            self._lanes.planning.wait(here(self.device))
            yield
            for lane in self._lanes.all():
                lane.wait(here(self.device))

    # Recording a step: it reads records where others are put for each batch.

    def can_record(self, features: KeyedJaggedTensor) -> bool:
        """Whether the step of a batch waits for nothing but its rows, which are on their way."""
        if features not in self._batches or features.weights_or_none() is not None:
            return False
        return all(ids.bags.one_each for ids in self._batch_of(features).ids)

    def static_copy(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ids of the same shape, whose records stay where they are."""
        static = KeyedJaggedTensor(
            features.keys(), features.values(), lengths=features.lengths(), stride=features.stride()
        )
        batch = self._batches[features]
        ids = [replace(one) for one in batch.ids]
        records = [one.clone() for one in batch.records]
        self._batches[static] = PlannedBatch(batch.number, ids, records)
        return static

    def put(self, features: KeyedJaggedTensor, static: KeyedJaggedTensor) -> None:
        """Copy the records of a batch to where a recorded step reads them."""
        # `can_record` has brought its rows, for this stream.
        for one, there in zip(self._batches[features].records, self._batches[static].records, strict=True):
            there.copy_(one, non_blocking=True)

    def replayed(self, features: KeyedJaggedTensor) -> None:
        """Note that a step was taken."""
        self._ahead.finish()

    # All rows.

    def settled_tables(self) -> list[TableGroup]:
        """Write the card's rows to host memory, and return the tables there."""
        if not self._is_settled:
            with self._paused():
                for tables in self.tables:
                    tables.settle(self._ahead.last_read)
            self._is_settled = True
        return [tables.host.group for tables in self.tables]

    def stored_rows(self, table: str) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """Yield all rows of a table as blocks of (keys, records)."""
        self.settled_tables()
        return super().stored_rows(table)

    def load_rows(self, table: str, keys: Int64s, records: npt.NDArray[Any]) -> None:
        """Set rows of a table, creating those it lacks."""
        self._empty_card()
        super().load_rows(table, keys, records)

    def load_stored(self, table: str, keys: Int64s, stored: npt.NDArray[Any]) -> None:
        """Set rows of a table, creating those it lacks."""
        self._empty_card()
        super().load_stored(table, keys, stored)

    def _empty_card(self) -> None:
        if not all(tables.is_empty for tables in self.tables):
            self.drop_gradients()
            self.num_clears += 1
            self.settled_tables()
            with self._paused():
                self._ahead.clear()
                for tables in self.tables:
                    tables.forget_card()

    def clear(self) -> None:
        """Drop every row and every gradient."""
        with self._paused():
            self._ahead.clear()
            super().clear()

    # What was done.

    @property
    def counts(self) -> CacheCounts:
        """What the cache has found, fetched and written back so far."""
        return sum((tables.counts for tables in self.tables), CacheCounts())

    def take_counts(self) -> dict[str, float]:
        """Return the same since the last call, by name."""
        counts = self.counts
        since, self._counted = counts - self._counted, counts
        return since.by_name()

    def report(self) -> Any:
        """Describe what the cache has done."""
        return self.counts
