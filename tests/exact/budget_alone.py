"""Training within a budget in one process, the plain way: a collection of whole rows, keyed by their names.

The maps decide; ids are replaced by the rows that they read, and at a stop rows are copied and deleted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from oracles import Alone
from training_case import Case, Row, per_sample_loss

from rowhaul.budget.maps import SlotMaps
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.store.keyed import locate, remove
from rowhaul.train.distributed.training import layout_of, only_collection


def train_alone(case: Case, ends: list[int], workers: list[np.ndarray] | None = None) -> Alone:
    """Train whole batches or, where workers are given, the part of each in rank order."""
    return _BudgetAlone(case).run(ends, workers)


class _BudgetAlone:
    def __init__(self, case: Case) -> None:
        self.maps: SlotMaps = layout_of(only_collection(case.model())).make_maps()
        self.budget = case.pruning
        self.case = replace(case, pruning=None)
        self.model, self.fresh = self.case.model(), self.case.model().rows
        self.table_of = {
            name: number for number, table in enumerate(case.tables) for name in table.feature_names
        }

    def run(self, ends: list[int], workers: list[np.ndarray] | None) -> Alone:
        alone, case = Alone([], [], []), self.case
        dense = torch.optim.SGD(self.model.parameters(), lr=case.dense_lr)
        for iteration in range(max(ends) + 1):
            for _ in range(ends.count(iteration)):
                alone.rows.append(self._rows())
                alone.dense.append([one.detach().numpy().copy() for one in self.model.parameters()])
            if iteration == max(ends):
                break
            samples, parts = self._named(case.batches[iteration]), []
            if workers is None:
                parts = [samples]
            else:
                worker = workers[iteration]
                parts = [samples.take(np.flatnonzero(worker == one)) for one in np.unique(worker)]
            total = torch.zeros((), dtype=case.dtype)
            for part in parts:
                batch = Batch.from_samples(part, global_size=len(samples))
                loss = batch.loss(per_sample_loss(self.model(batch), batch))
                loss.backward()
                total += loss.detach()
            alone.losses.append(float(total))
            self.model.rows.apply_gradients(case.rates(iteration), iteration + 1)
            dense.step()
            dense.zero_grad()
            if self.budget.is_stop(iteration + 1):
                self._hand_over(iteration + 1)
        return alone

    def _named(self, samples: Samples) -> Samples:
        """The samples with the rows that they read instead of ids; counts them."""
        per_feature = samples.lengths.sum(axis=1)
        tables = np.repeat([self.table_of[name] for name in samples.features], per_feature)
        pairs = np.stack([tables, samples.values], axis=1).astype(np.int64)
        distinct, inverse, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
        starts = np.searchsorted(distinct[:, 0], np.arange(len(self.case.tables) + 1))
        batch = self.maps.find(np.ascontiguousarray(distinct[:, 1]), starts, counts)
        self.maps.count(batch)
        return replace(samples, values=batch.rows[inverse.reshape(-1)])

    def _hand_over(self, now: int) -> None:
        change = self.maps.change(now)
        tables = change.tables.tolist()
        values = [
            self._values((table, source))
            for table, source in zip(tables, change.sources.tolist(), strict=True)
        ]
        for row in zip(change.gone_tables.tolist(), change.gone_rows.tolist(), strict=True):
            group, *where = self._where(row)
            if locate(group, *where)[0] >= 0:
                remove(group, *where)
        for row, some in zip(zip(tables, change.rows.tolist(), strict=True), values, strict=True):
            group, *where = self._where(row)
            assert locate(group, *where)[0] < 0
            location = group.make_fresh(*where)
            record = group.arena.read(location)
            record[0, : group.dim] = some
            group.arena.write(location, record)

    def _values(self, row: Row) -> np.ndarray:
        """What a row reads as now."""
        group, *where = self._where(row)
        location = locate(group, *where)
        if location[0] < 0:
            group, *where = self._where(row, self.fresh)
            location = group.make_fresh(*where)
        return group.arena.read(location)[0, : group.dim].copy()

    def _where(self, row: Row, rows=None):
        group, position = (rows or self.model.rows).source.find_table(self.case.tables[row[0]].name)
        return group, np.array([position]), np.array([row[1]])

    def _rows(self) -> dict[Row, np.ndarray]:
        return {
            (number, int(key)): record.copy()
            for number, table in enumerate(self.case.tables)
            for keys, records in self.model.rows.rows(table.name)
            for key, record in zip(keys, records, strict=True)
        }
