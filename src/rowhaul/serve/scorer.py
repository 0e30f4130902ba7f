"""`Scorer`: click probabilities from a served folder, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.serve.dense import open_dense
from rowhaul.serve.folder import ServedFolder
from rowhaul.serve.requests import Candidates, RequestReader, Samples, Shared
from rowhaul.serve.rows import IdBags, MappedRows

Floats = npt.NDArray[Any]


class Scored(NamedTuple):
    """The scores of a request, and how many of its ids have no row."""

    scores: npt.NDArray[np.float32]
    num_ids: int
    num_unknown: int


class Scorer:
    """Scores candidates by a model that `rowhaul export --dense` wrote.

    Rows stay in the mapped file: opening takes no time, and processes on one machine share the memory. Any
    number of threads may score at once.

    Args:
        path: the folder.
        backend: ``onnx``, ``pt2``, or ``auto`` for what is there and installed.
        on_unknown: what ids never trained read (``init``, ``default`` or ``error``) instead of what the run
            was configured with.
        threads: that one request may use for the dense part, by ONNX Runtime.
        verify: compare the checksum of all rows first, which reads them once.

    Example:
        >>> scorer = Scorer("served")
        >>> scorer.score({"user": 17}, [{"item": 5, "price": 9.5}, {"item": 8, "price": 3.0}])
        array([0.12, 0.31], dtype=float32)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        backend: str = "auto",
        on_unknown: str | None = None,
        threads: int = 1,
        verify: bool = False,
    ) -> None:
        self.folder = ServedFolder(path, verify=verify)
        self.rows = MappedRows(self.folder.rows, self.folder.features, self.folder.width, on_unknown)
        self.dense = open_dense(self.folder, backend, threads)
        kinds = [column.kind for column in self.folder.schema.tasks]
        self._is_number = np.array(
            [kind == "number" for kind in kinds] if len(kinds) > 1 else kinds == ["number"]
        )
        self._reader = RequestReader(self.folder.schema, self.folder.key_kinds)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels, where there are several."""
        return tuple(column.name for column in self.folder.schema.labels)

    @property
    def step(self) -> int:
        """Training steps behind the model."""
        return self.folder.step

    def score(self, shared: Shared, candidates: Candidates) -> npt.NDArray[np.float32]:
        """Return a probability for each candidate, as `rowhaul predict` writes them.

        Of several labels these are candidates x labels, in the order of `tasks`; a number is itself.

        Args:
            shared: features that all candidates have in common, by name.
            candidates: the others: a mapping for each candidate, or a column for each feature (lists, arrays
                of NumPy or Arrow, an Arrow table).

        Raises:
            RequestError: a value is missing or of the wrong type; the error names it.
            UnknownKeyError: with ``on_unknown="error"``.
        """
        return self.score_request(shared, candidates).scores

    def score_request(self, shared: Shared, candidates: Candidates) -> Scored:
        """Score, and count the ids that have no row."""
        return self.score_samples(self._reader.read(shared, candidates))

    def score_samples(self, samples: Samples) -> Scored:
        """Score what a request was read into."""
        logits, num_unknown = self.logits(samples)
        with np.errstate(over="ignore"):  # the exponential of a large number is infinity, and the score 0
            scores = np.where(self._is_number, logits, 1 / (1 + np.exp(-logits.astype(np.float64))))
        return Scored(scores.astype(np.float32), len(samples.bags.ids), num_unknown)

    def read(self, shared: Shared, candidates: Candidates) -> Samples:
        """Check a request and turn it into ids and numbers."""
        return self._reader.read(shared, candidates)

    def warm_up(self) -> None:
        """Compile what scoring needs, so that the first request does not wait for it."""
        num_features = len(self.rows.features)
        bags = IdBags(
            np.empty(0, np.int64), np.zeros(num_features + 1, np.int64), np.arange(num_features + 1), 1
        )
        self.logits(Samples(bags, np.zeros((1, len(self.folder.schema.dense)), np.float32)))

    def logits(self, samples: Samples) -> tuple[Floats, int]:
        """Return a logit for each sample, and how many ids have no row."""
        pooled, num_unknown = self.rows.pool(samples.bags)
        if not len(samples):
            return pooled[:, : len(self.tasks)] if len(self.tasks) > 1 else pooled[:, 0], 0
        logits = self.dense(pooled, samples.numbers.astype(pooled.dtype, copy=False))
        return logits, int(num_unknown.sum())
