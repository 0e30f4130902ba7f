"""Training within a budget in one process, the plain way: a collection of whole rows, keyed by their names.

The maps decide; ids are replaced by the rows that they read, and at a stop rows are copied and deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from in_process_cluster import rows_of
from oracles import Alone, step_rows
from training_case import Case, Row, Rows, TinyModel, per_sample_loss

from rowhaul.budget.maps import SlotMaps
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.store.keyed import locate, remove
from rowhaul.train.distributed.tables import layout_of, only_collection


def train_alone(case: Case, ends: list[int], workers: list[np.ndarray] | None = None) -> Alone:
    """Train whole batches or, where workers are given, the part of each in rank order."""
    return _BudgetAlone(case).run(ends, workers)


@dataclass
class Collected:
    """What training by an ordinary collection within the budget left, after each of some iterations."""

    rows: list[Rows]
    scores: list[dict[int, float]]  # of samples that are only read


def train_collection(
    case: Case, ends: list[int], workers: list[np.ndarray], scored: list[Samples]
) -> Collected:
    """Train by a collection that knows nothing of a cluster: the parts of each batch in rank order."""
    model, found = case.model(), Collected([], [])
    dense = torch.optim.SGD(model.parameters(), lr=case.dense_lr)
    for iteration in range(max(ends) + 1):
        for _ in range(ends.count(iteration)):
            found.rows.append(_rows_of(case, model))
            found.scores.append(_scores(model, scored))
        if iteration == max(ends):
            break
        samples, worker = case.batches[iteration], workers[iteration]
        model.rows.announce(Batch.from_samples(samples).ids)
        for one in np.unique(worker):
            part = samples.take(np.flatnonzero(worker == one))
            batch = Batch.from_samples(part, global_size=len(samples))
            batch.loss(per_sample_loss(model(batch), batch)).backward()
        model.rows.apply_gradients(case.rates(iteration), iteration + 1)
        dense.step()
        dense.zero_grad()
    return found


def _scores(model: TinyModel, scored: list[Samples]) -> dict[int, float]:
    model.eval()
    with torch.no_grad():
        logits = [model(Batch.from_samples(one)).tolist() for one in scored]
    model.train()
    every = zip(scored, logits, strict=True)
    return {
        index: logit for one, some in every for index, logit in zip(one.index.tolist(), some, strict=True)
    }


def _rows_of(case: Case, model: TinyModel) -> Rows:
    return {
        (number, int(key)): record.copy()
        for number, table in enumerate(case.tables)
        for keys, records in model.rows.source.stored_rows(table.name)
        for key, record in zip(keys, records, strict=True)
    }


class _BudgetAlone:
    def __init__(self, case: Case) -> None:
        self.maps: SlotMaps = layout_of(only_collection(case.model())).make_maps()
        self.budget, self.hot = case.pruning, rows_of(case.settings.hot)
        self.case = replace(case, pruning=None)
        self.model = self.case.model()
        self.table_of = {
            name: number for number, table in enumerate(case.tables) for name in table.feature_names
        }

        for tables, one in self.maps:
            for table, size in zip(tables.tolist(), one.shared_sizes.tolist(), strict=True):
                for number in range(size):
                    group, *where = self._where((table, -1 - number))
                    group.make_fresh(*where)

    def run(self, ends: list[int], workers: list[np.ndarray] | None) -> Alone:
        alone, case = Alone([], [], []), self.case
        dense = torch.optim.SGD(self.model.parameters(), lr=case.dense_lr)
        for iteration in range(max(ends) + 1):
            for _ in range(ends.count(iteration)):
                alone.rows.append(_rows_of(case, self.model))
                alone.dense.append([one.detach().numpy().copy() for one in self.model.parameters()])
                if (hot := case.hot_after(len(alone.rows) - 1)) is not None:
                    self.hot = rows_of(hot)
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
            step_rows(case, self.model, self, iteration, None if workers is None else workers[iteration])
            dense.step()
            dense.zero_grad()
            if self.budget.is_stop(iteration + 1):
                self._hand_over(iteration + 1)
        return alone

    def admits(self, rows: Iterable[Row]) -> np.ndarray:
        """Every row learns."""
        return np.ones(len(list(rows)), np.bool_)

    def is_hot(self, row: Row) -> bool:
        return row in self.hot

    def _named(self, samples: Samples) -> Samples:
        """The samples with the rows that they read instead of ids; counts them."""
        per_feature = samples.lengths.sum(axis=1)
        tables = np.repeat([self.table_of[name] for name in samples.features], per_feature)
        pairs = np.stack([tables, samples.values], axis=1).astype(np.int64)
        distinct, inverse, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
        starts = np.searchsorted(distinct[:, 0], np.arange(len(self.case.tables) + 1))
        batch = self.maps.find(np.ascontiguousarray(distinct[:, 1]), starts, counts, seat=True)
        self.maps.count(batch)
        return replace(samples, values=batch.rows[inverse.reshape(-1)])

    def _hand_over(self, now: int) -> None:
        change = self.maps.change(now)
        tables = change.tables.tolist()
        self.hot -= {*zip(change.gone_tables.tolist(), change.gone_rows.tolist(), strict=True)}
        self.hot -= {*zip(tables, change.rows.tolist(), strict=True)}
        values = [
            self._values((table, source))
            for table, source in zip(tables, change.sources.tolist(), strict=True)
        ]
        for row in zip(change.gone_tables.tolist(), change.gone_rows.tolist(), strict=True):
            group, *where = self._where(row)
            remove(group, *where)
        for row, some in zip(zip(tables, change.rows.tolist(), strict=True), values, strict=True):
            group, *where = self._where(row)
            assert locate(group, *where)[0] < 0
            location = group.make_fresh(*where)
            record = group.arena.read(location)
            record[0, : len(some)] = some
            group.arena.write(location, record)

    def _values(self, row: Row) -> np.ndarray:
        """What a row reads as now."""
        group, *where = self._where(row)
        location = locate(group, *where)
        assert location[0] >= 0
        num_values = group.dim if group.packing is None else group.packing.value_bytes
        return group.arena.read(location)[0, :num_values].copy()

    def _where(self, row: Row):
        group, position = self.model.rows.source.find_table(self.case.tables[row[0]].name)
        return group, np.array([position]), np.array([row[1]])
