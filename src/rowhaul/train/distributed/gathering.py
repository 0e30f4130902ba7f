"""Gather the metrics and the errors of all ranks, so that every rank returns or raises the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul._activity import Activity, doing
from rowhaul.errors import ClusterError, DataError
from rowhaul.runtime.runtime import Runtime
from rowhaul.train.metrics import BinaryMetrics, MetricValues
from rowhaul.train.progressive import Scores
from rowhaul.transport import base
from rowhaul.transport.base import Bytes, Links
from rowhaul.transport.remote_errors import read_report, write_report


class Measured(BinaryMetrics):
    """Labels and logits of numbered batches."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[int] = []

    def add(self, number: int, labels: Tensor | None, logits: Tensor) -> None:
        """Add a batch, which must have labels."""
        if labels is None:
            raise DataError("evaluation needs labels; read the stream with require_label=True")
        self.update(labels, logits)
        self._numbers.append(number)

    def add_scores(self, number: int, scores: Scores) -> None:
        """Add samples that are scored already."""
        self._labels.append(scores.labels)
        self._logits.append(scores.logits)
        self._numbers.append(number)

    def scores(self) -> Scores:
        """All samples, in the order in which they were added."""
        return Scores(np.concatenate(self._labels), np.concatenate(self._logits))

    @property
    def size(self) -> tuple[int, int]:
        """Batches and samples."""
        return len(self._numbers), sum(map(len, self._labels))

    def to_bytes(self) -> Bytes:
        """Encode all batches as one message: 16 bytes a batch, 5 a sample."""
        counts = np.array([self._numbers, [len(labels) for labels in self._labels]], np.int64)
        parts: list[npt.NDArray[Any]] = [counts.reshape(-1), *self._labels, *self._logits]
        return np.concatenate([part.view(np.uint8) for part in parts])

    def add_bytes(self, num_batches: int, data: Bytes) -> None:
        """Add the batches of another worker."""
        numbers, sizes = data[: 16 * num_batches].copy().view(np.int64).reshape(2, num_batches)
        labels, logits = np.split(data[16 * num_batches :], [int(sizes.sum())])
        ends = np.cumsum(sizes)[:-1]
        self._numbers += numbers.tolist()
        self._labels += np.split(labels, ends) if num_batches else []
        self._logits += np.split(logits.copy().view(np.float32), ends) if num_batches else []

    def compute(self) -> MetricValues:
        """Compute metrics in the order of the stream: sums of rounded numbers depend on it."""
        order = np.argsort(self._numbers)
        self._labels = [self._labels[place] for place in order]
        self._logits = [self._logits[place] for place in order]
        self._numbers.sort()
        return super().compute()


def metrics_of_all(
    runtime: Runtime, num_workers: int, measured: Measured, read: tuple[int, int]
) -> MetricValues:
    """Gather all workers' batches on rank 0, and broadcast the metrics.

    ``read`` is the number of batches and samples that this rank has read: the same on all workers.
    """
    mine = np.array([*measured.size, *read], np.int64)
    every = runtime.in_control(lambda control: control.all_gather(mine.view(np.uint8))).wait()
    numbers = np.ascontiguousarray(every).view(np.int64)[:num_workers]  # workers x 4
    first, *others = numbers[:, 2:].tolist()
    for worker, other in enumerate(others, 1):
        if other != first:
            raise ClusterError(
                f"workers read different evaluation data: worker 0 has read {first[1]:,} samples in "
                f"{first[0]:,} batches, worker {worker} {other[1]:,} in {other[0]:,}; give every "
                "rank the same files and batch size"
            )
    sizes = [(int(batches), int(samples)) for batches, samples in numbers[:, :2]]
    runtime.in_moves(lambda mover: _gather(mover.links, runtime.rank, measured, sizes)).wait()
    counted = json.dumps([measured.keys.read, measured.keys.unknown]).encode()
    for counts in gather_texts(runtime, counted if runtime.rank else b"")[1:]:
        measured.keys.add_counts(json.loads(counts or b"[{}, {}]"))
    text = json.dumps(asdict(measured.compute())).encode() if runtime.rank == 0 else b""
    return MetricValues(**json.loads(gather_texts(runtime, text)[0]))


def _gather(links: Links, rank: int, measured: Measured, sizes: list[tuple[int, int]]) -> None:
    """Send this worker's batches to rank 0."""
    if rank == 0:
        received = {
            worker: np.empty(16 * num_batches + 5 * num_samples, np.uint8)
            for worker, (num_batches, num_samples) in enumerate(sizes[1:], 1)
        }
        with doing(Activity.WAITING):
            links.post(received, {}).wait_received()
        for worker, data in received.items():
            measured.add_bytes(sizes[worker][0], data)
    elif rank < len(sizes):
        links.post({}, {0: measured.to_bytes()}).wait_sent()


def scores_of_all(runtime: Runtime, num_workers: int, mine: Scores) -> Scores:
    """Gather all workers' scores on rank 0, in order of rank; a collective call between two segments."""
    measured = Measured()
    measured.add_scores(runtime.rank, mine)
    every = runtime.in_control(
        lambda control: control.all_gather(np.array(measured.size, np.int64).view(np.uint8))
    ).wait()
    sizes = [(int(batches), int(samples)) for batches, samples in np.ascontiguousarray(every).view(np.int64)][
        :num_workers
    ]
    runtime.in_moves(lambda mover: _gather(mover.links, runtime.rank, measured, sizes)).wait()
    return measured.scores()


def raise_first_error(runtime: Runtime, number: int, error: Exception | None) -> None:
    """Raise the error of the earliest batch, the same on every rank, if any rank has one.

    Args:
        runtime: of this rank.
        number: of the batch that failed.
        error: of this rank, if any.
    """
    report = b"" if error is None else f"{number} ".encode() + write_report(error, runtime.rank)
    texts = gather_texts(runtime, report)
    failed = [(int(text.partition(b" ")[0]), rank) for rank, text in enumerate(texts) if text]
    if not failed:
        return
    _, first = min(failed)
    if first == runtime.rank and error is not None:
        raise error
    raised = read_report(texts[first].partition(b" ")[2])
    raised.__notes__ = [f"(on rank {first})"]
    raise raised from error


def gather_texts(runtime: Runtime, text: bytes) -> list[bytes]:
    """Gather a text of every rank on all ranks."""
    return runtime.in_control(lambda control: base.gather_texts(control, text)).wait()
