"""Gather the metrics and the errors of all ranks, so that every rank returns or raises the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import Activity, doing
from rowhaul.errors import ClusterError
from rowhaul.runtime.runtime import Runtime
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import Scores
from rowhaul.train.ranking import BUCKETS, HELD_BYTES, RECORD, GroupedScores, RankingSums
from rowhaul.train.task_metrics import EvaluationMetrics, ScoreList
from rowhaul.transport import base
from rowhaul.transport.base import Bytes, Links
from rowhaul.transport.remote_errors import read_report, write_report


def metrics_of_all(
    runtime: Runtime, num_workers: int, measured: EvaluationMetrics, read: tuple[int, int]
) -> MetricValues:
    """Gather all workers' batches on rank 0, and broadcast the metrics.

    ``read`` is the number of batches and samples that this rank has read: the same on all workers.
    """
    every = _gather_numbers(runtime, num_workers, read)
    first, *others = every.tolist()
    for worker, other in enumerate(others, 1):
        if other != first:
            raise ClusterError(
                f"workers read different evaluation data: worker 0 has read {first[1]:,} samples in "
                f"{first[0]:,} batches, worker {worker} {other[1]:,} in {other[0]:,}; give every "
                "rank the same files and batch size"
            )
    for task in measured.tasks:
        _gather_scores(runtime, num_workers, task.scores)
        if task.grouped is not None:
            _rank_all(runtime, num_workers, task.grouped, task.ranking)
    counted = json.dumps([measured.keys.read, measured.keys.unknown]).encode()
    for counts in gather_texts(runtime, counted if runtime.rank else b"")[1:]:
        measured.keys.add_counts(json.loads(counts or b"[{}, {}]"))
    text = json.dumps(asdict(measured.ranked())).encode() if runtime.rank == 0 else b""
    return MetricValues(**json.loads(gather_texts(runtime, text)[0]))


def _gather_numbers(runtime: Runtime, num_workers: int, mine: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the numbers of every worker: workers x numbers."""
    sent = np.array(mine, np.int64).view(np.uint8)
    every = runtime.in_control(lambda control: control.all_gather(sent)).wait()
    return np.ascontiguousarray(every).view(np.int64)[:num_workers]


def _gather_scores(runtime: Runtime, num_workers: int, scores: ScoreList) -> None:
    """Send this worker's batches to rank 0."""
    every = _gather_numbers(runtime, num_workers, scores.size)
    sizes = [(int(batches), int(samples)) for batches, samples in every]
    lengths = [scores.num_bytes(size) for size in sizes]
    for worker, data in _gather(runtime, lengths, scores.to_bytes).items():
        scores.add_bytes(sizes[worker][0], data)


def _rank_all(runtime: Runtime, num_workers: int, grouped: GroupedScores, sums: RankingSums) -> None:
    """Measure all groups on rank 0, to which each worker sends some buckets at a time."""
    sizes = _gather_numbers(runtime, num_workers, grouped.sizes.tolist())  # workers x buckets
    for buckets in _rounds(sizes.sum(axis=0)):
        lengths = (sizes[:, buckets].sum(axis=1) * RECORD.itemsize).tolist()
        mine = [grouped.bucket(number) for number in buckets] if runtime.rank < num_workers else []
        received = _gather(runtime, lengths, partial(_joined_bytes, mine))
        if runtime.rank:
            continue
        of_workers = [
            np.split(data.copy().view(RECORD), np.cumsum(sizes[worker, buckets])[:-1])
            for worker, data in received.items()
        ]
        for place, own in enumerate(mine):
            sums.add(np.concatenate([own, *(parts[place] for parts in of_workers)]))


def _rounds(totals: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    """Part the buckets, in order, so that rank 0 holds no more than `HELD_BYTES` of several at once."""
    some: list[int] = []
    for number in range(BUCKETS):
        if some and int(totals[[*some, number]].sum()) * RECORD.itemsize > HELD_BYTES:
            yield some
            some = []
        some.append(number)
    yield some


def _joined_bytes(parts: Sequence[npt.NDArray[Any]]) -> Bytes:
    return np.concatenate(parts).view(np.uint8)


def _gather(runtime: Runtime, lengths: Sequence[int], encode: Callable[[], Bytes]) -> dict[int, Bytes]:
    """Send bytes of every worker to rank 0; return there what the others sent."""

    def exchange(links: Links) -> dict[int, Bytes]:
        if runtime.rank == 0:
            received = {worker: np.empty(size, np.uint8) for worker, size in enumerate(lengths) if worker}
            with doing(Activity.WAITING):
                links.post(received, {}).wait_received()
            return received
        if runtime.rank < len(lengths):
            links.post({}, {0: encode()}).wait_sent()
        return {}

    return runtime.in_moves(lambda mover: exchange(mover.links)).wait()


def scores_of_all(runtime: Runtime, num_workers: int, mine: Scores) -> Scores:
    """Gather all workers' scores on rank 0, in order of rank; a collective call between two segments."""
    scores = ScoreList()
    scores.add(runtime.rank, mine.labels, mine.logits)
    _gather_scores(runtime, num_workers, scores)
    return Scores(*scores.joined())


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
