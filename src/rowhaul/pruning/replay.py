"""One process that trains pruned rows as the workers of a cluster did: the same parts, one after the other.

All rows are in one memory, which is their home; nothing is cached, moved or planned. Gradients of a row are
summed in the order of the workers, each worker keeps its own account of what was useful, and when it is time
rows are pruned by what all of them tell. So a cluster that lost, mixed up or counted anything twice on its
way cannot end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.pruning.chunk_map import ChunkMap
from rowhaul.pruning.cluster.coding import Told, decode_told, encode_told
from rowhaul.pruning.cluster.narrowing import narrowed
from rowhaul.pruning.cluster.utility_log import UtilityLog
from rowhaul.pruning.cluster.worker import ChunkedWorkerRows
from rowhaul.pruning.comparison import empty_block
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool.shrink import best_columns
from rowhaul.pruning.timing import next_stop
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule import IdBatch
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.distinct import KnownRows
from rowhaul.store.keyed import locate
from rowhaul.store.row_parts import Arrays
from rowhaul.train.distributed.training import layout_of, tables_of_features
from rowhaul.train.trainer import Trainer, check_finite, per_sample_loss, rate_factor

Ints = npt.NDArray[np.int64]
_NONE = slice(0, 0)
_NOTHING = np.empty(0, np.int64)


class _Taken(NamedTuple):
    """Gradients of some chunks of one group, from one worker."""

    tables: Ints  # positions in the group
    keys: Ints
    gradients: npt.NDArray[Any]


class PrunedReplay:
    """Pruned training in one process.

    Args:
        trainer: whose model is trained, and by whose settings; it must not have been trained.
        workers: of each batch: who trained each sample.
    """

    def __init__(self, trainer: Trainer, workers: Sequence[npt.NDArray[np.int32]]) -> None:
        layout, config = layout_of(trainer.collection), trainer.config
        assert isinstance(layout, ChunkLayout)
        self._trainer, self._workers, self.layout = trainer, workers, layout
        self._rates: Rates = lambda iteration: (
            config.rows.lr * rate_factor(config.rates, iteration, trainer.total_steps)
        )
        num_workers = max((int(one.max(initial=0)) for one in workers), default=0) + 1
        self._map, self._memory = ChunkMap(layout), RowMemory(layout)
        columns = (len(layout.rows), layout.rows[0].dim) if layout.awaits_columns else (0, 0)
        self._utility_logs = [
            UtilityLog(layout.num_chunks, layout.pruning.decay, columns) for _ in range(num_workers)
        ]
        self._parts = self._make_parts()

    def train(self, samples: Samples) -> float:
        """Step on the next batch; returns its mean loss."""
        trainer, iteration = self._trainer, self._trainer.step
        workers = self._workers[iteration]
        trainer.model.train()
        trainer.set_rates()
        ids = IdBatch.from_features(
            tables_of_features(trainer.collection, samples.features), samples.values, samples.lengths
        )
        chunks, live = self._map.take_in(ids)
        self._have(chunks.tables, chunks.keys)
        taken: dict[int, list[_Taken]] = {}
        total = torch.zeros((), dtype=getattr(torch, trainer.config.precision))
        for worker in np.unique(workers).tolist():
            part = Batch.from_samples(
                samples.take(np.flatnonzero(workers == worker)), global_size=len(samples)
            )
            trainer.collection.read_from(self._parts[worker])
            loss = part.loss(per_sample_loss(trainer.model(part), part))
            loss.backward()
            total += loss.detach()
            mine = np.repeat(workers == worker, np.diff(chunks.offsets))
            rows = self._rows_of(chunks.tables[mine], chunks.keys[mine])
            for one, gradients in self._parts[worker].learn(iteration, live, rows):
                some = _Taken(one.rows.tables, one.rows.keys, gradients)
                taken.setdefault(one.number, []).append(some)
        for number, parts in taken.items():
            self._step(number, parts, iteration)
        trainer.dense.step()
        trainer.dense.zero_grad()
        trainer.step += 1
        trainer.samples += len(samples)
        self._after(trainer.step)
        check_finite(total.item(), trainer.step, trainer.config)
        return total.item()

    def blocks(self, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table as checkpoints have them."""
        now, layout = self._trainer.step, self.layout
        known = self._map.rows(self._map.total(self._told(now), now))
        assert known.present is not None
        assert known.utilities is not None
        number = [spec.name for spec in layout.rows].index(table)
        some = np.flatnonzero(known.tables == number)
        keys, present, empty = known.keys[some], known.present[some], empty_block(layout, table)
        row_of_chunk, places = np.nonzero(present)
        chunks = np.zeros((len(places), empty["chunks"].shape[1]), layout.dtype)
        for place in range(layout.num_chunks):
            held = np.flatnonzero(places == place)
            records = self._records(number * layout.num_chunks + place, keys[row_of_chunk[held]])
            chunks[held, : records.shape[1]] = records
        yield {
            **empty,
            "keys": keys,
            "present": present,
            "chunks": chunks,
            "utilities": known.utilities[some],
            "touched": np.full(len(keys), now, np.int32),
        }

    def _make_parts(self) -> list[_Part]:
        groups = self._trainer.collection.feature_groups
        return [_Part(groups, self._memory, self._rates, utility_log) for utility_log in self._utility_logs]

    def _have(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Make chunks that are not there yet."""
        for number, places, positions in self._memory.by_group(tables):
            group = self._memory.groups[number]
            distinct = np.unique(np.stack([positions, keys[places]]), axis=1)
            absent = locate(group, distinct[0].copy(), distinct[1].copy()) < 0
            group.make_fresh(distinct[0][absent].copy(), distinct[1][absent].copy())

    def _rows_of(self, tables: npt.NDArray[Any], keys: Ints) -> list[BatchRows]:
        """The distinct chunks that a worker has read."""
        found = []
        for number, places, positions in self._memory.by_group(tables):
            distinct = np.unique(np.stack([positions, keys[places]]), axis=1)
            rows = KnownRows(distinct[1].copy(), distinct[0].copy(), _NOTHING, _NOTHING, _NOTHING, _NOTHING)
            found.append(BatchRows(number, rows, _NONE, _NONE, _NONE, _NOTHING, _NOTHING))
        return found

    def _step(self, number: int, taken: Sequence[_Taken], iteration: int) -> None:
        """Sum what workers have, in their order, and step each chunk once."""
        group = self._memory.groups[number]
        tables = np.concatenate([one.tables for one in taken])
        keys = np.concatenate([one.keys for one in taken])
        gradients = np.concatenate([one.gradients for one in taken])
        rows, first, inverse, times = np.unique(
            np.stack([tables, keys]), axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        inverse = inverse.reshape(-1)
        summed = np.zeros((len(first), gradients.shape[1]), gradients.dtype)
        np.add.at(summed, inverse, gradients)  # one after the other, as they are given
        summed[times == 1] = gradients[first[times == 1]]
        places = locate(group, rows[0].copy(), rows[1].copy())
        group.update(places, summed, self._rates(iteration), iteration + 1)

    def _after(self, now: int) -> None:
        """Choose columns and prune, if it is time."""
        settings = self.layout.pruning
        if self.layout.awaits_columns and now >= settings.cold_start:
            self._narrow()
        if next_stop(settings, now - 1) == now and self._map.look(now):
            self._prune(now)

    def _prune(self, now: int) -> None:
        self._map.learn(self._told(now), now)
        for utility_log in self._utility_logs:
            utility_log.clear()
        pruned = self._map.carry_out(self._map.decide(now), now)
        self._memory.forget(pruned.evicted.tables, pruned.evicted.keys)
        self._have(pruned.admitted.tables, pruned.admitted.keys)

    def _told(self, now: int) -> list[Told]:
        """What workers tell, as it arrives."""
        chunks = self.layout.num_chunks
        return [
            decode_told(encode_told(*utility_log.told(now)), chunks) for utility_log in self._utility_logs
        ]

    def _narrow(self) -> None:
        total = np.zeros(self._utility_logs[0].squares.shape)
        for utility_log in self._utility_logs:
            total += utility_log.squares
            utility_log.squares = np.zeros((0, 0))
        self.layout = self.layout.narrowed(best_columns(total, self.layout.columns_to_keep))
        self._memory = narrowed(self._memory, self.layout)
        self._map.use(self.layout)
        self._parts = self._make_parts()

    def _records(self, table: int, keys: Ints) -> npt.NDArray[Any]:
        """The records of chunks, which there are; those never trained are as they begin."""
        self._have(np.full(len(keys), table), keys)
        number, position = self._memory.place_of(table)
        group = self._memory.groups[number]
        records: npt.NDArray[Any] = group.arena.read(locate(group, np.full(len(keys), position), keys))
        return records


class _Part(ChunkedWorkerRows):
    """What one worker does with the gradients of its part."""

    def learn(
        self, iteration: int, live: LiveRows, rows: Sequence[BatchRows]
    ) -> list[tuple[BatchRows, npt.NDArray[Any]]]:
        """Note what was useful, and take the gradients of chunks."""
        self._live = live
        return self.take(iteration, rows).parts
