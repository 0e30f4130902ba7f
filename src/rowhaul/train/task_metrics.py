"""The metrics of an evaluation: of every label, and within groups where the schema names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.data.schema import LabelColumn, Schema
from rowhaul.errors import DataError
from rowhaul.nn import Batch
from rowhaul.nn.key_counts import KeyCounts
from rowhaul.nn.losses import as_columns
from rowhaul.train.metrics import MetricValues, binary_values, number_values
from rowhaul.train.ranking import BUCKETS, DEFAULT_METRICS, GroupedScores, RankingSums
from rowhaul.transport.base import Bytes

_MAIN = ("auc", "log_loss", "normalised_entropy", "accuracy", "base_rate", "calibration", "num_samples")
ONE_LABEL = (LabelColumn("label"),)


class ScoreList:
    """Labels and scores of numbered batches: 5 bytes a sample, or 8 where labels are any numbers."""

    def __init__(self, label_type: Any = np.uint8) -> None:
        self.label_type = np.dtype(label_type)
        self._numbers: list[int] = []
        self._labels: list[npt.NDArray[Any]] = []
        self._scores: list[npt.NDArray[np.float32]] = []

    def add(self, number: int, labels: npt.NDArray[Any], scores: npt.NDArray[Any]) -> None:
        """Add a batch."""
        self._numbers.append(number)
        self._labels.append(labels.astype(self.label_type))
        self._scores.append(scores.astype(np.float32))

    @property
    def size(self) -> tuple[int, int]:
        """Batches and samples."""
        return len(self._numbers), sum(map(len, self._labels))

    def num_bytes(self, size: tuple[int, int]) -> int:
        """The length of `to_bytes` for so many batches and samples."""
        return 16 * size[0] + (4 + int(self.label_type.itemsize)) * size[1]

    def to_bytes(self) -> Bytes:
        """Encode all batches as one message."""
        counts = np.array([self._numbers, [len(labels) for labels in self._labels]], np.int64)
        parts: list[npt.NDArray[Any]] = [counts.reshape(-1), *self._labels, *self._scores]
        return np.concatenate([part.view(np.uint8) for part in parts])

    def add_bytes(self, num_batches: int, data: Bytes) -> None:
        """Add the batches of another worker."""
        numbers, sizes = data[: 16 * num_batches].copy().view(np.int64).reshape(2, num_batches)
        split = int(sizes.sum()) * self.label_type.itemsize
        labels, scores = np.split(data[16 * num_batches :], [split])
        ends = np.cumsum(sizes)[:-1]
        self._numbers += numbers.tolist()
        self._labels += np.split(labels.copy().view(self.label_type), ends) if num_batches else []
        self._scores += np.split(scores.copy().view(np.float32), ends) if num_batches else []

    def joined(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """All labels and scores in the order of the batches: sums of rounded numbers depend on it."""
        order = np.argsort(self._numbers, kind="stable")
        labels = [np.empty(0, self.label_type), *(self._labels[place] for place in order)]
        scores = [np.empty(0, np.float32), *(self._scores[place] for place in order)]
        return np.concatenate(labels), np.concatenate(scores)


class TaskScores:
    """What an evaluation knows of one label."""

    def __init__(self, column: LabelColumn, ranking: Sequence[str] = ()) -> None:
        self.name, self.is_binary = column.name, column.kind == "binary"
        self.scores = ScoreList(np.uint8 if self.is_binary else np.float32)
        self.grouped = GroupedScores() if ranking and self.is_binary else None
        self._ranking = tuple(ranking)
        self.ranking = RankingSums(ranking)

    def add(
        self,
        number: int,
        labels: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float32],
        groups: npt.NDArray[np.int64] | None,
    ) -> None:
        """Add a batch; samples whose label is missing do not count."""
        known = ~np.isnan(labels)
        labels, scores = labels[known], scores[known]
        if self.is_binary and not np.isin(labels, (0, 1)).all():
            raise DataError("labels for metrics must be 0 or 1")
        self.scores.add(number, labels, scores)
        if self.grouped is not None:
            if groups is None:
                raise DataError(
                    "metrics within groups need batches with groups; read them with the run's schema"
                )
            self.grouped.add(groups[known], labels, scores)

    def rank_all(self) -> None:
        """Measure all groups added so far, where there are any."""
        if self.grouped is not None:
            self.ranking = RankingSums(self._ranking)
            for number in range(BUCKETS):
                self.ranking.add(self.grouped.bucket(number))

    def values(self) -> tuple[MetricValues, dict[str, float]]:
        """The metrics, and the same by name."""
        labels, scores = self.scores.joined()
        if self.is_binary:
            main = replace(binary_values(labels, scores), in_groups=self._in_groups())
            return main, {name: getattr(main, name) for name in _MAIN} | main.in_groups
        nan, note = math.nan, f"{self.name!r} is a number: it has an RMSE, no AUC"
        main = MetricValues(nan, nan, nan, nan, nan, len(labels), note)
        return main, number_values(labels, scores)

    def _in_groups(self) -> dict[str, float]:
        return self.ranking.values() if self.grouped is not None else {}


class EvaluationMetrics:
    """Collects the scores of an evaluation and measures them together.

    Args:
        schema: whose labels are measured; without one, one label of 0 and 1 is.
        ranking: metrics within groups, where the schema has them; empty: `DEFAULT_METRICS`.
        targets: what a model makes of labels before it learns them.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        ranking: Sequence[str] = (),
        targets: Callable[[Tensor], Tensor] = lambda labels: labels,
    ) -> None:
        in_groups = (ranking or DEFAULT_METRICS) if schema is not None and schema.group else ()
        columns = ONE_LABEL if schema is None else schema.tasks
        self.tasks = [TaskScores(column, in_groups) for column in columns]
        self.keys = KeyCounts()
        self._targets = targets
        self._is_named = schema is not None and bool(schema.labels)

    def add(self, batch: Batch, logits: Tensor, number: int = 0) -> None:
        """Add a batch, which must have labels; ``number`` is its place in the stream."""
        if batch.labels is None:
            raise DataError("evaluation needs labels; read the stream with require_label=True")
        labels = self._targets(as_columns(batch.labels, len(batch))).cpu().numpy()
        scores = as_columns(logits.detach(), len(batch)).to("cpu").float().numpy()
        if labels.shape[1] != len(self.tasks) or labels.shape != scores.shape:
            raise DataError(
                f"{len(self.tasks)} labels are to be measured, but batches have {labels.shape[1]} and the "
                f"model returns {scores.shape[1]} logits a sample"
            )
        groups = None if batch.groups is None else batch.groups.cpu().numpy()
        for place, task in enumerate(self.tasks):
            task.add(number, labels[:, place], scores[:, place], groups)

    def compute(self) -> MetricValues:
        """The metrics of everything added so far."""
        for task in self.tasks:
            task.rank_all()
        return self.ranked()

    def ranked(self) -> MetricValues:
        """The metrics, once all groups are measured."""
        found = [task.values() for task in self.tasks]
        by_task = {task.name: values for task, (_, values) in zip(self.tasks, found, strict=True)}
        return replace(
            found[0][0],
            unknown_keys=self.keys.share,
            unknown_by_feature=self.keys.shares,
            tasks=by_task if self._is_named or not self.tasks[0].is_binary else {},
        )
