"""Training in one process, two ways: whole batches, and the parts that a cluster's plans dispatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from in_process_cluster import Outcome, rows_of
from training_case import Case, Row, Rows, TinyModel, per_sample_loss

from naive_lifetimes import Life, NaiveLifetimes
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.nn.local_rows import Pending, names_of
from rowhaul.schedule import HotRows
from rowhaul.store import TableGroup
from rowhaul.store.keyed import locate, remove


@dataclass
class Alone:
    """What training in one process left: after each segment, and the loss of each batch."""

    rows: list[Rows]
    dense: list[list[np.ndarray]]
    losses: list[float]


def replay(case: Case, outcome: Outcome) -> Alone:
    """Train the parts that the cluster's workers trained, gradients added up in the order of the workers."""
    return _train(case, _ends(outcome), outcome.workers)


def plain(case: Case, outcome: Outcome) -> Alone:
    """Train whole batches."""
    return _train(case, _ends(outcome), None)


def _ends(outcome: Outcome) -> list[int]:
    return [rest.iteration for rest in outcome.rests[0]]


def _train(case: Case, ends: Sequence[int], workers: Sequence[np.ndarray] | None) -> Alone:
    model = case.model()
    dense = torch.optim.SGD(model.parameters(), lr=case.dense_lr)
    admission = Admission(case)
    alone = Alone([], [], [])
    for iteration in range(max(ends) + 1):
        for _ in range(ends.count(iteration)):
            alone.rows.append(_trained_rows(case, model, admission))
            alone.dense.append([one.detach().numpy().copy() for one in model.parameters()])
            admission.replicate(case.hot_after(len(alone.rows) - 1), iteration)
        if iteration == max(ends):
            break
        samples, total = case.batches[iteration], torch.zeros((), dtype=case.dtype)
        admission.see(iteration, samples)
        for part in _parts(samples, None if workers is None else workers[iteration]):
            batch = Batch.from_samples(part, global_size=len(samples))
            loss = batch.loss(per_sample_loss(model(batch), batch))
            loss.backward()
            total += loss.detach()
        step_rows(case, model, admission, iteration, None if workers is None else workers[iteration])
        for row in admission.forget(iteration):
            _delete_row(case, model, row)
        dense.step()
        dense.zero_grad()
        alone.losses.append(float(total))
    return alone


def _parts(samples: Samples, worker: np.ndarray | None) -> list[Samples]:
    if worker is None:
        return [samples]
    return [samples.take(np.flatnonzero(worker == one)) for one in np.unique(worker)]


class Admission:
    """Which rows may learn, and which are forgotten: as the policies of tables say, but for hot ones."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._table_of = {
            name: number for number, table in enumerate(case.tables) for name in table.feature_names
        }
        self._lifetimes = NaiveLifetimes(case.settings.row_policies)
        self._lifetimes.exempt = rows_of(case.settings.hot)
        self.trained: set[Row] = set()

    def replicate(self, hot: HotRows | None, iteration: int) -> None:
        """Rows that are replicated are left alone; those that were, if trained, are as if just named."""
        if hot is None:
            return
        lives, before = self._lifetimes.lives, self._lifetimes.exempt
        self._lifetimes.exempt = rows_of(hot)
        lives.update({row: Life(iteration - 1, 1, True) for row in (before - rows_of(hot)) & self.trained})
        for row in rows_of(hot):
            if self._lifetimes.policies[row[0]].forgets:
                lives.pop(row, None)

    def forget(self, iteration: int) -> set[Row]:
        """The rows that are forgotten after an iteration."""
        expired, over = self._lifetimes.forget(iteration)
        self.trained -= expired | over
        return expired | over

    def see(self, iteration: int, samples: Samples) -> None:
        """Count a batch: a row once a sample, however often the sample names it."""
        named: list[set[Row]] = [set() for _ in range(len(samples))]
        place = 0
        for feature, lengths in zip(samples.features, samples.lengths.tolist(), strict=True):
            for sample, length in enumerate(lengths):
                keys = samples.values[place : place + length].tolist()
                named[sample] |= {(self._table_of[feature], key) for key in keys}
                place += length
        self._lifetimes.see(iteration, Counter(row for rows in named for row in rows))
        self.trained |= {row for rows in named for row in rows if self._lifetimes.knows(row)}

    def is_hot(self, row: Row) -> bool:
        return row in self._lifetimes.exempt

    def admits(self, rows: Iterable[Row]) -> np.ndarray:
        return np.array([self._lifetimes.knows(row) for row in rows], np.bool_)


def step_rows(
    case: Case, model: TinyModel, admission: Admission, iteration: int, workers: np.ndarray | None
) -> None:
    """Step the rows that are admitted; the gradients of the others are dropped."""
    number_of = {table.name: number for number, table in enumerate(case.tables)}
    source = model.rows.source
    for number, tables in enumerate(source.tables):
        numbers = np.array([number_of[table.name] for table in tables.tables])
        if tables.packing is not None and workers is not None:
            parts = source.pending[number]
            source.pending[number] = _as_sent(case, admission, iteration, tables, numbers, parts, workers)
        taken = source.take_gradients(number)
        if taken is None:
            continue
        lookup, gradients = taken
        names = names_of(lookup)
        some = admission.admits(zip(numbers[names.tables].tolist(), lookup.keys.tolist(), strict=True))
        if some.any():
            rate, these = case.rates(iteration), names.some(some)
            tables.update(lookup.locations[some], gradients[some], rate, iteration + 1, these)


def _as_sent(
    case: Case,
    admission: Admission,
    iteration: int,
    tables: TableGroup,
    numbers: np.ndarray,
    parts: list[Pending],
    workers: np.ndarray,
) -> list[Pending]:
    """Round the gradients that workers send: those of rows that several train, of all if homes step alone."""
    names = [names_of(lookup) for lookup, _ in parts]
    rows = [list(zip(numbers[one.tables].tolist(), one.keys.tolist(), strict=True)) for one in names]
    trainers = Counter(row for some in rows for row in some)
    every = case.settings.sync_mode.name == "bounded"
    sent = []
    for worker, row, name, (lookup, gradients) in zip(np.unique(workers), rows, names, parts, strict=True):
        travels = np.array([(trainers[one] > 1 or every) and not admission.is_hot(one) for one in row], bool)
        rounded = tables.pack_gradients(gradients, name, iteration + 1, int(worker))
        unpacked = tables.unpack_gradients(rounded)
        sent.append((lookup, np.where(travels[:, None], unpacked, gradients)))
    return sent


def _delete_row(case: Case, model: TinyModel, row: Row) -> None:
    tables, position = model.rows.source.find_table(case.tables[row[0]].name)
    where = np.array([position]), np.array([row[1]])
    if locate(tables, *where)[0] >= 0:  # one that was only ever replicated was not trained here
        remove(tables, *where)


def _trained_rows(case: Case, model: TinyModel, admission: Admission) -> Rows:
    return {
        (number, int(key)): record
        for number, table in enumerate(case.tables)
        for keys, records in model.rows.stored_rows(table.name)
        for key, record in zip(keys, records, strict=True)
        if (number, int(key)) in admission.trained
    }


def assert_bit_equal(case: Case, outcome: Outcome, alone: Alone) -> None:
    """Rows with their state, dense weights and losses are the same numbers, after every segment."""
    assert outcome.losses == alone.losses
    for segment, (rows, dense) in enumerate(zip(alone.rows, alone.dense, strict=True)):
        found = outcome.rows(segment)
        _assert_same_names(case, found, rows)
        different = [row for row, record in rows.items() if not np.array_equal(found[row], record)]
        assert not different, f"after segment {segment} rows {different} differ"
        assert all(map(np.array_equal, outcome.rests[0][segment].dense, dense))


def assert_close(case: Case, outcome: Outcome, alone: Alone, tolerance: float = 1e-9) -> None:
    """The same, within rounding."""
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=0, atol=tolerance)
    for segment, (rows, dense) in enumerate(zip(alone.rows, alone.dense, strict=True)):
        found = outcome.rows(segment)
        _assert_same_names(case, found, rows)
        for row, record in rows.items():
            np.testing.assert_allclose(found[row], record, rtol=0, atol=tolerance, err_msg=str(row))
        for one, other in zip(outcome.rests[0][segment].dense, dense, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def _assert_same_names(case: Case, found: Rows, expected: Rows) -> None:
    """Homes hold what was trained.

    Where nobody notes which rows are fresh, rows that enter the replicated set come from a home, which makes
    them: trained or not, they are in the model.
    """
    made = set() if case.settings.first_touch else set().union(*map(rows_of, case.replicated))
    assert expected.keys() <= found.keys()
    assert found.keys() - expected.keys() <= made
