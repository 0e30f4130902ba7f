"""Pruned training in one process, in plain Python, with the utilities of gradients that a cluster has.

It trains the parts that the cluster's workers trained, sums the gradients of chunks in the order of the
workers, keeps a log of utilities for each of them, and prunes when it is time. Rows are read and pooled by
the collection; everything else is dictionaries. `pruned_alone` has utilities that follow from ids alone.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from training_case import Case, Row, per_sample_loss

from rowhaul.data.samples import Samples
from rowhaul.nn import Batch, EmbeddingBagCollection
from rowhaul.nn.local_rows import LocalRows, tables_of_keys
from rowhaul.pruning.deciding.chunk_map import row_seeds
from rowhaul.pruning.deciding.decision import KnownRows, decide
from rowhaul.pruning.deciding.entries import decay_powers
from rowhaul.pruning.deciding.hashing import DistinctCounter, mixed, salt_of
from rowhaul.pruning.deciding.room import Sizes, chunk_starts, room_for
from rowhaul.store import Lookup
from rowhaul.store.arena import RecordArena

LEAST_ENTRIES = 3


@dataclass
class PrunedAlone:
    """What training in one process left: after each of some iterations, and the loss of each batch."""

    records: dict[int, dict[tuple[int, int], np.ndarray]] = field(default_factory=dict)  # chunks
    present: dict[int, dict[Row, tuple[bool, ...]]] = field(default_factory=dict)
    dense: dict[int, list[np.ndarray]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    num_held: list[tuple[int, int]] = field(default_factory=list)  # chunks, and how many there may be


class _Assembled(LocalRows):
    """Rows of the oracle's dictionaries, as a model reads them."""

    def __init__(self, oracle: PrunedOracle, collection: EmbeddingBagCollection) -> None:
        super().__init__(collection.feature_groups, collection.optimizer, collection.seed)
        self._oracle = oracle

    def look_up(self, number, ids, training, on_unknown):
        tables = self.tables[number]
        keys, starts, inverse = tables.distinct(*ids)
        rows = self._oracle._assemble(tables, keys, starts)
        return Lookup(keys, starts, inverse, -1 - np.arange(len(keys)), rows)


class PrunedOracle:
    """One process that trains and prunes."""

    def __init__(self, case: Case) -> None:
        assert case.pruning is not None
        self.case, self.settings = case, case.pruning
        self.model = case.model()
        self.source = _Assembled(self, self.model.rows)
        self.model.rows.read_from(self.source)
        self.fresh = LocalRows(self.model.rows.feature_groups, case.optimizer, case.seed)
        self.num_chunks, dim = case.pruning.chunks, case.tables[0].embedding_dim
        self._keep(np.tile(np.arange(dim), (len(case.tables), 1)))
        self.squares = np.zeros((len(case.tables), dim))
        self.columns_to_keep = case.pruning.num_columns(dim)
        self.awaits_columns = bool(self.columns_to_keep)
        self.numbers = {table.name: number for number, table in enumerate(case.tables)}
        self.seeds = row_seeds([table.name for table in case.tables], case.seed)
        self.powers = decay_powers(case.pruning.decay_of_step)
        itemsize = case.dtype.itemsize
        widest = max(self._width(place) for place in range(self.num_chunks))
        self.sizes = Sizes(widest * itemsize, 4 * (2 * self.num_chunks + 1), self.num_chunks)
        self.present: dict[Row, list[bool]] = {}
        self.records: dict[tuple[Row, int], np.ndarray] = {}  # chunks that were trained, or came back
        self.base: dict[Row, tuple[np.ndarray, int]] = {}  # as reported, and when
        self.utility_logs: list[dict[Row, tuple[np.ndarray, int]]] = [
            {} for _ in range(case.settings.topology.num_workers)
        ]
        self.counter, self.num_rows, self.is_complete = DistinctCounter(), 0, True
        self.num_rows_pruned = self.num_turned_away = 0

    def _keep(self, columns: np.ndarray) -> None:
        """Have so many columns of each table, in chunks."""
        self.columns = columns
        self.starts = chunk_starts(columns.shape[1], self.num_chunks).tolist()

    def _columns(self, row: Row, place: int) -> np.ndarray:
        return self.columns[row[0], self.starts[place] : self.starts[place + 1]]

    def run(self, workers: list[np.ndarray], ends: set[int]) -> PrunedAlone:
        """Train all batches that were dispatched so, and tell what there is after some of them."""
        alone = PrunedAlone()
        dense = torch.optim.SGD(self.model.parameters(), lr=self.case.dense_lr)
        if 0 in ends:
            self._note(alone, 0)
        for iteration, worker in enumerate(workers):
            samples = self.case.batches[iteration]
            accesses = self._accesses(samples)
            self._add_new(accesses, iteration)
            alone.num_held.append((sum(map(sum, self.present.values())), self._room().num_chunks))
            alone.losses.append(self._train(samples, worker, accesses, iteration))
            dense.step()
            dense.zero_grad()
            if self.awaits_columns and iteration + 1 >= self.settings.cold_start:
                self._shrink()
            if self._is_due(iteration + 1):
                self._prune(iteration + 1)
            if iteration + 1 in ends:
                self._note(alone, iteration + 1)
        return alone

    def _note(self, alone: PrunedAlone, iteration: int) -> None:
        alone.records[iteration] = {
            (row[0] * self.num_chunks + place, row[1]): record.copy()
            for (row, place), record in self.records.items()
        }
        alone.present[iteration] = {row: tuple(some) for row, some in self.present.items()}
        alone.dense[iteration] = [one.detach().numpy().copy() for one in self.model.parameters()]

    def _width(self, place: int) -> int:
        size = self.starts[place + 1] - self.starts[place]
        return size + self.case.optimizer.state_width(size)

    def _room(self):
        return room_for(self.settings, self.settings.budget, self.sizes, self.num_rows, LEAST_ENTRIES)

    def _accesses(self, samples: Samples) -> Counter[Row]:
        table_of = {
            name: number for number, table in enumerate(self.case.tables) for name in table.feature_names
        }
        counts: Counter[Row] = Counter()
        place = 0
        for feature, lengths in zip(samples.features, samples.lengths.tolist(), strict=True):
            for length in lengths:
                for key in samples.values[place : place + length].tolist():
                    counts[table_of[feature], key] += 1
                place += length
        return counts

    def _add_new(self, accesses: Counter[Row], iteration: int) -> None:
        new = [row for row in accesses if row not in self.present]
        if not new:
            return
        hashes = np.array([self._hash(row) for row in new])
        for hashed in map(int, hashes):  # HyperLogLog: each register keeps the longest run of zeros, and one
            register, rank = hashed >> 50, 51 - (hashed & (2**50 - 1)).bit_length()
            self.counter.registers[register] = max(self.counter.registers[register], rank)
        if self.is_complete:
            self.num_rows = len(self.present) + len(new)
        else:
            self.num_rows = max(self.num_rows, self.counter.estimate())
        drawn = mixed(hashes ^ salt_of(self.case.seed, iteration)).tolist()
        order = sorted(range(len(new)), key=lambda place: (-accesses[new[place]], drawn[place]))
        num_free = max(self._room().num_entries - len(self.present), 0)
        if len(order) > num_free:
            self.is_complete = False
            self.num_turned_away += len(order) - num_free
            order = order[:num_free]
        free = self._room().num_chunks - sum(map(sum, self.present.values()))
        for place in order:
            num_given = min(max(free, 0), self.num_chunks)
            free -= num_given
            self.present[new[place]] = [k < num_given for k in range(self.num_chunks)]

    def _hash(self, row: Row) -> np.uint64:
        return mixed(np.array([row[1]], np.int64).view(np.uint64) ^ self.seeds[row[0]])[0]

    def _first(self, row: Row, place: int) -> np.ndarray:
        """A chunk as it begins."""
        group, position = self.fresh.find_table(self.case.tables[row[0]].name)
        location = group.make_fresh(np.array([position]), np.array([row[1]]))
        values = group.arena.read(location)[0][self._columns(row, place)]
        record = np.full(self._width(place), self.case.optimizer.initial_state, values.dtype)
        record[: len(values)] = values
        return record

    def _assemble(self, group, keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(keys), group.dim), group.dtype)
        tables = np.repeat([self.numbers[one.name] for one in group.tables], np.diff(starts))
        for number, row in enumerate(zip(tables.tolist(), keys.tolist(), strict=True)):
            for place, is_there in enumerate(self.present.get(row, ())):
                if is_there:
                    record = self.records.get((row, place))
                    record = self._first(row, place) if record is None else record
                    columns = self._columns(row, place)
                    rows[number, columns] = record[: len(columns)]
        return rows

    def _train(self, samples: Samples, worker: np.ndarray, accesses: Counter[Row], iteration: int) -> float:
        total = torch.zeros((), dtype=self.case.dtype)
        parts: dict[Row, list[np.ndarray]] = {}
        for one in np.unique(worker).tolist():
            some = samples.take(np.flatnonzero(worker == one))
            batch = Batch.from_samples(some, global_size=len(samples))
            logits = self.model(batch)
            loss = batch.loss(per_sample_loss(logits, batch))
            loss.backward()
            total += loss.detach()
            for number, group in enumerate(self.source.groups):
                taken = self.source.take_gradients(number)
                if taken is None:
                    continue
                names = [self.numbers[table.name] for table in group.specs]
                tables = np.array(names)[tables_of_keys(taken[0])].tolist()
                for row, gradient in zip(
                    zip(tables, taken[0].keys.tolist(), strict=True), taken[1], strict=True
                ):
                    if row in self.present:
                        parts.setdefault(row, []).append(gradient)
                        self._learn(one, row, gradient, accesses[row], iteration + 1)
        for row, gradients in parts.items():
            summed = gradients[0]
            if len(gradients) > 1:
                summed = np.zeros_like(gradients[0])
                for gradient in gradients:
                    summed = summed + gradient
            for place, is_there in enumerate(self.present[row]):
                if is_there:
                    self._step(row, place, summed[self._columns(row, place)], iteration)
        return float(total)

    def _decay(self, steps: int) -> float:
        return float(self.powers[0, steps & 1023] * self.powers[1, min(steps >> 10, 1023)])

    def _learn(self, worker: int, row: Row, gradient: np.ndarray, total: int, now: int) -> None:
        before, touched = self.utility_logs[worker].get(row, (np.zeros(self.num_chunks, np.float32), now))
        after = np.empty(self.num_chunks, np.float32)
        for place in range(self.num_chunks):
            squares = 0.0
            for number in gradient[self._columns(row, place)].tolist():
                squares += number * number
            amount = float(total) * math.sqrt(squares)
            after[place] = np.float32(self._decay(now - touched) * float(before[place]) + amount)
        self.utility_logs[worker][row] = after, now

    def _step(self, row: Row, place: int, gradient: np.ndarray, iteration: int) -> None:
        record = self.records.get((row, place))
        record = self._first(row, place) if record is None else record
        arena = RecordArena(len(record), record.dtype)
        at = arena.allocate(1)
        arena.write(at, record[None])
        gradients = np.ascontiguousarray(gradient)[None]
        self.case.optimizer.step(arena, at, gradients, self.case.rates(iteration), iteration + 1)
        self.records[row, place] = arena.read(at)[0]

    def _shrink(self) -> None:
        """Keep the columns with the largest squares; what a chunk holds then comes from where it was."""
        before = {key: record.copy() for key, record in self.records.items()}
        rows = {row for row, some in self.present.items() if any(some)}
        whole = {row: self._whole(row, before) for row in rows}
        self._keep(
            np.sort(np.argsort(-self.squares, axis=1, kind="stable")[:, : self.columns_to_keep], axis=1)
        )
        self.awaits_columns = False
        widest = max(self._width(place) for place in range(self.num_chunks))
        columns = self.columns_to_keep / self.case.tables[0].embedding_dim
        self.sizes = Sizes(widest * self.case.dtype.itemsize, self.sizes.entry, self.num_chunks, columns)
        for row in rows:
            for place, is_there in enumerate(self.present[row]):
                if is_there:
                    parts = [plane[self._columns(row, place)] for plane in whole[row]]
                    if self.case.optimizer.state_width(8) == 1:
                        parts[1] = parts[1][None].mean(axis=1, dtype=parts[1].dtype)
                    self.records[row, place] = np.concatenate(parts)

    def _whole(self, row: Row, records: dict) -> list[np.ndarray]:
        """Values of all columns, then planes of state."""
        rule, dim = self.case.optimizer, self.starts[-1]
        one_number = rule.state_width(8) == 1
        values = np.concatenate(
            [self._first(row, k)[: self.starts[k + 1] - self.starts[k]] for k in range(self.num_chunks)]
        )
        planes = [values]
        for _ in range(1 if one_number else rule.state_width(8) // 8):
            planes.append(np.full(dim, rule.initial_state, values.dtype))
        for place, is_there in enumerate(self.present[row]):
            if is_there:
                first, end = self.starts[place : place + 2]
                record, size = records[row, place], end - first
                values[first:end] = record[:size]
                for number, plane in enumerate(planes[1:]):
                    begin = size + number * size
                    plane[first:end] = record[begin : begin + (1 if one_number else size)]
        return planes

    def _is_due(self, now: int) -> bool:
        """Every period; in the first one also early, each tenth of it, when there are too many new rows."""
        period = self.settings.period
        if now > period or now % max(1, period // 10) or not self.num_turned_away:
            return now % period == 0
        return now % period == 0 or self.num_rows >= 2 * self.num_rows_pruned

    def _prune(self, now: int) -> None:
        rows = list(self.present)
        nothing = np.zeros(self.num_chunks, np.float32), now
        kept = [self.base.get(row, nothing) for row in rows]
        utilities = np.array(
            [(self._decay(now - touched) * one.astype(np.float64)) for one, touched in kept], np.float32
        ).reshape(len(rows), self.num_chunks)
        reported = np.zeros(len(rows), np.bool_)
        for utility_log in self.utility_logs:
            for number, row in enumerate(rows):
                if row in utility_log:
                    one, touched = utility_log[row]
                    told = (self._decay(now - touched) * one.astype(np.float64)).astype(np.float32)
                    utilities[number] += torch.from_numpy(told).bfloat16().float().numpy()
                    reported[number] = True
            utility_log.clear()
        known = KnownRows(
            np.array([self._hash(row) for row in rows], np.uint64),
            utilities,
            np.array([self.present[row] for row in rows], np.bool_).reshape(len(rows), self.num_chunks),
        )
        decision = decide(known, self.settings, self._room(), self.case.seed, now)
        self.base |= {row: (utilities[number], now) for number, row in enumerate(rows) if reported[number]}
        for chunks, is_there in ((decision.evict, False), (decision.admit, True)):
            for number, place in np.argwhere(chunks).tolist():
                row = rows[number]
                self.present[row][place] = is_there
                self.records.pop((row, place), None)
                if is_there:
                    self.records[row, place] = self._first(row, place)
        for number in decision.forget.tolist():
            assert not any(self.present.pop(rows[number]))
            self.base.pop(rows[number], None)
            self.is_complete = False
        self.num_rows_pruned, self.num_turned_away = self.num_rows, 0
