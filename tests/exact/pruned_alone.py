"""Pruned training in one process by the ordinary collection: what a cluster must equal, chunk for chunk."""

from __future__ import annotations

import numpy as np
import torch
from pruned_oracle import LEAST_ENTRIES, PrunedAlone
from training_case import Case, per_sample_loss

from rowhaul.nn import Batch


class TrainedAlone:
    """A collection with pruning, which knows nothing of a cluster."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.model()
        (self.tables,) = self.model.rows.source.tables
        self.tables.map._least_entries = LEAST_ENTRIES

    def run(self, ends: set[int], workers: list[np.ndarray] | None = None) -> PrunedAlone:
        """Train whole batches or, where workers are given, the part of each in rank order."""
        alone = PrunedAlone()
        dense = torch.optim.SGD(self.model.parameters(), lr=self.case.dense_lr)
        if 0 in ends:
            self._note(alone, 0)
        for iteration, samples in enumerate(self.case.batches):
            parts = [samples]
            if workers is not None:
                worker = workers[iteration]
                parts = [samples.take(np.flatnonzero(worker == one)) for one in np.unique(worker)]
                self.model.rows.announce(Batch.from_samples(samples).ids)
            total = torch.zeros((), dtype=self.case.dtype)
            for part in parts:
                batch = Batch.from_samples(part, global_size=len(samples))
                loss = batch.loss(per_sample_loss(self.model(batch), batch))
                loss.backward()
                total += loss.detach()
            alone.losses.append(float(total))
            alone.num_held.append((self.tables.map.num_held, self.tables.map.room.num_chunks))
            self.model.rows.apply_gradients(self.case.rates(iteration), iteration + 1)
            dense.step()
            dense.zero_grad()
            if iteration + 1 in ends:
                self._note(alone, iteration + 1)
        return alone

    def _note(self, alone: PrunedAlone, iteration: int) -> None:
        present, records, cut = {}, {}, self.tables.cut
        for table in range(len(self.case.tables)):
            for block in self.tables.row_blocks(table):
                chunks = iter(block["chunks"])
                for key, some in zip(block["keys"].tolist(), block["present"].tolist(), strict=True):
                    present[table, key] = tuple(some)
                    for place in np.flatnonzero(some).tolist():
                        width = cut.widths[place]
                        records[table * cut.num_chunks + place, key] = next(chunks)[:width]
        alone.present[iteration], alone.records[iteration] = present, records
        alone.dense[iteration] = [one.detach().numpy().copy() for one in self.model.parameters()]
