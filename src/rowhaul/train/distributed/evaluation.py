"""Evaluation on a cluster, with the metrics that one process would compute.

Each worker scores every n-th batch of the stream. It reads flushed rows from their homes into separate
tables, which replace its cache while the model computes: caches, homes and buffered gradients do not change,
so training does not depend on how often the model is evaluated. Batches and logits are those of one process,
to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul._activity import progressed
from rowhaul._threads import Future
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.nn.key_counts import KeyCounts
from rowhaul.runtime.layout import CopiedRows
from rowhaul.runtime.lookups import FlushedRows, FoundRows, RowLookups, Rows, missing_rows
from rowhaul.store.row_format import format_of
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.distributed.gathering import metrics_of_all, raise_first_error
from rowhaul.train.distributed.samples import as_samples
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.metrics import MetricValues
from rowhaul.train.row_lifecycle import table_of_feature
from rowhaul.train.task_metrics import EvaluationMetrics

Progress = Callable[[int, int], None]
"""Called with the samples done by all workers together, and the total."""

KEPT_BYTES = 256 << 20  # of rows pulled for earlier batches and kept for later ones


def evaluate(
    training: DistributedTraining,
    stream: Iterable[Samples | Batch],
    progress: Progress = lambda done, total: None,
    metrics: EvaluationMetrics | None = None,
) -> MetricValues:
    """Compute metrics over a stream, the same on every rank; the state of training does not change.

    A collective call between two segments: every rank, stores included, makes it with the same stream.
    ``metrics``, made alike on all ranks, says what is measured: by default one label of 0 and 1.

    Raises:
        UnknownKeyError: on every rank, if a worker finds a key that was never trained, and the collection has
            ``on_unknown="error"``. Training can continue.
        ClusterError: if workers have read different streams.
    """
    share = EveryNth(stream, training.runtime.rank, training.settings.topology.num_workers)
    measured = metrics or EvaluationMetrics()
    scored = _scored(training, share, progress, measured.keys)
    for number, batch, logits in scored:
        try:
            measured.add(batch, logits, number)
        except Exception as error:
            scored.throw(error)  # which sends it to the other ranks, and raises it
    read = (share.num_batches, share.num_samples)
    return metrics_of_all(training.runtime, training.settings.topology.num_workers, measured, read)


def score(
    training: DistributedTraining,
    stream: Iterable[Samples | Batch],
    progress: Progress = lambda done, total: None,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield (batch, logits) for the batches that this worker scores; ``batch.index`` says which they are.

    Collective, like `evaluate`; on a store it serves rows and yields nothing. Exhaust or close it before
    training continues.
    """
    share = EveryNth(stream, training.runtime.rank, training.settings.topology.num_workers)
    for _, batch, logits in _scored(training, share, progress, KeyCounts()):
        yield batch, logits


class EveryNth:
    """A worker's share of a stream: every n-th batch, beginning with the worker's number."""

    def __init__(self, stream: Iterable[Samples | Batch], worker: int, num_workers: int) -> None:
        self._stream, self._worker, self._num_workers = stream, worker, num_workers
        self.num_batches = self.num_samples = 0  # of the whole stream, read so far

    @property
    def total(self) -> int:
        """Samples of the whole stream, as far as known."""
        return int(getattr(self._stream, "num_samples", self.num_samples))

    def __iter__(self) -> Iterator[tuple[int, Samples]]:
        """Yield batches with their numbers in the stream."""
        for number, given in enumerate(self._stream):
            self.num_batches += 1
            self.num_samples += len(given)
            if number % self._num_workers == self._worker:
                yield number, as_samples(given)


def _scored(
    training: DistributedTraining, share: EveryNth, progress: Progress, keys: KeyCounts
) -> Generator[tuple[int, Batch, Tensor], None, None]:
    """Yield this worker's batches with numbers and logits; raise a worker's error on all ranks.

    ``keys`` counts the ids that they read.
    """
    runtime = training.runtime
    training.catch_up()
    training.upkeep.prepare_copies(runtime)
    flushed, home = training.flushed(), runtime.mover.home
    answers = FlushedRows(home, flushed) if home is not None and flushed is not None else None
    lookups = RowLookups(runtime.rank, training.settings.topology, training.settings.sizes, answers)
    scoring = _Scoring(training, share, lookups, keys)
    error: Exception | None = None
    done = 0
    try:
        if runtime.trains:
            for number, batch, logits, done in scoring.batches():
                progressed()
                yield number, batch, logits
                progress(done, share.total)
    except GeneratorExit:
        pass  # closed by the caller; the other ranks continue
    except Exception as raised:
        error = raised
    runtime.in_moves(lambda mover: lookups.finish(mover.links, failed=error is not None)).wait()
    raise_first_error(runtime, scoring.number, error)
    if done < share.num_samples:
        progress(share.num_samples, share.total)


@dataclass(frozen=True)
class _Waiting:
    """A batch whose rows are being pulled."""

    number: int
    samples: Samples
    done: int  # samples of the stream up to here
    rows: CopiedRows
    found: Future[FoundRows | None]


class _Scoring:
    """Runs a worker's model over its share of a stream while the rows of the next batch are pulled."""

    def __init__(
        self, training: DistributedTraining, share: EveryNth, lookups: RowLookups, keys: KeyCounts
    ) -> None:
        self.number = 0  # of the current batch
        self._training, self._share, self._lookups, self._keys = training, share, lookups, keys
        self._given = iter(share)
        self._pulled = self._copied_rows()
        self._table_of = table_of_feature(training.collection)

    def batches(self) -> Iterator[tuple[int, Batch, Tensor, int]]:
        """Yield number, batch and logits, and the samples of the stream done so far."""
        waiting = self._pull_next()
        while waiting is not None:
            found = waiting.found.wait()
            if found is None:
                return  # a worker has failed
            found.write_to(waiting.rows.memory)
            following = self._pull_next()
            self.number = waiting.number
            batch = Batch.from_samples(waiting.samples).beside(self._training.collection.device)
            with _evaluating(self._training, waiting.rows):
                logits = self._training.model(batch)
            yield waiting.number, batch, logits, waiting.done
            waiting = following

    def _copied_rows(self) -> CopiedRows:
        collection = self._training.collection
        rows = self._training.upkeep.copied_rows(collection.feature_groups)
        # Pruned rows cannot be told from those never trained, and shared rows are read by both.
        format = format_of(collection.row_settings)
        if isinstance(format, WholeRows) and format.keyed_by_id:
            rows.source.key_counts = self._keys
        return rows

    def _pull_next(self) -> _Waiting | None:
        """Read a batch of this worker and start pulling the rows that it lacks."""
        self.number = self._share.num_batches  # the one that fails if reading does
        number, samples = next(self._given, (-1, None))
        if samples is None:
            return None
        if self._pulled.allocated_bytes > KEPT_BYTES:
            self._pulled = self._copied_rows()
        wanted = missing_rows(self._pulled.memory, self._pulled.records_of(_rows_of(samples, self._table_of)))
        lookups = self._lookups
        found = self._training.runtime.in_moves(lambda mover: lookups.exchange(mover.links, wanted))
        return _Waiting(number, samples, self._share.num_samples, self._pulled, found)


def _rows_of(samples: Samples, table_of: dict[str, int]) -> Rows:
    """Return the distinct rows that samples read."""
    ends = np.cumsum(samples.lengths.sum(axis=1, dtype=np.int64)).tolist()
    keys: dict[int, list[npt.NDArray[np.int64]]] = {}
    for feature, first, last in zip(samples.features, [0, *ends[:-1]], ends, strict=True):
        if feature in table_of:
            keys.setdefault(table_of[feature], []).append(samples.values[first:last])
    distinct = {table: np.unique(np.concatenate(parts)) for table, parts in keys.items()}
    tables = np.repeat(np.array(list(distinct), np.int64), [len(some) for some in distinct.values()])
    return Rows(tables, np.concatenate([np.empty(0, np.int64), *distinct.values()]))


@contextmanager
def _evaluating(training: DistributedTraining, rows: CopiedRows) -> Iterator[None]:
    """Make the model read copied rows, in evaluation mode."""
    modes = [(module, module.training) for module in training.model.modules()]
    try:
        training.model.eval()
        with training.collection.reading(rows.source), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
