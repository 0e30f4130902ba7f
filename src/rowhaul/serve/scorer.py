"""`Scorer`: click probabilities from a served folder, in this process."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.serve.deltas import Delta, Published
from rowhaul.serve.dense import DenseGraph
from rowhaul.serve.folder import ServedFolder, published_in, read_served
from rowhaul.serve.model import ServedModel
from rowhaul.serve.requests import Candidates, Samples, Shared
from rowhaul.serve.rows import MappedRows

Floats = npt.NDArray[Any]
_log = logging.getLogger(__name__)
_ATTEMPTS = 3  # to open files that a publisher may remove while they are opened


class Scored(NamedTuple):
    """The scores of a request, how many of its ids have no row, and what they are of: the training steps
    behind the model, and the labels, where there are several."""

    scores: npt.NDArray[np.float32]
    num_ids: int
    num_unknown: int
    step: int
    tasks: tuple[str, ...] = ()


class Refreshed(NamedTuple):
    """What a refresh brought."""

    num_deltas: int
    new_base: bool


class Scorer:
    """Scores candidates by a model that `rowhaul export --dense` wrote, or `rowhaul train --publish` writes.

    Rows stay in the mapped file: opening takes no time, and processes on one machine share the memory. Any
    number of threads may score at once. What is published later is applied by `refresh`, in one step: a
    request is scored by the model before it, or by the one after it.

    Args:
        path: the folder.
        backend: ``dots`` (kernels for a DLRM), ``onnx``, ``pt2``, or ``auto`` for the first of these that is
            there and installed.
        on_unknown: what ids never trained read (``init``, ``default``, ``error`` or ``tail``) instead of what
            the run was configured with.
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
        self._path, self._verify = Path(path), verify
        self._how = backend, on_unknown, threads
        self._refreshing = threading.Lock()
        self._seen: str | None = None  # checksum of the manifest that the model is of
        self.num_deltas, self.num_bases = 0, 0  # that were applied and opened by refreshes
        self.model = ServedModel.of(ServedFolder(path, verify=verify), *self._how)
        try:
            self.refresh()
        except CheckpointError as error:  # what was published before it can be served
            _log.warning("%s", error)

    @property
    def folder(self) -> ServedFolder:
        """The folder of the base."""
        return self.model.folder

    @property
    def rows(self) -> MappedRows:
        """The rows."""
        return self.model.rows

    @property
    def dense(self) -> DenseGraph:
        """The graph."""
        return self.model.dense

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels, where there are several."""
        return self.model.tasks

    @property
    def step(self) -> int:
        """Training steps behind the model."""
        return self.model.step

    def refresh(self) -> Refreshed:
        """Apply what was published since; scoring goes on meanwhile.

        Where there is a new base, that is opened: whoever fell behind has no other way on, and the others
        free the deltas that are in it.

        Raises:
            CheckpointError: a delta is missing, cut off, damaged, or of another version or schema. The last
                good model stays in use.
        """
        with self._refreshing:
            num_deltas, num_bases = self.num_deltas, self.num_bases
            for attempt in range(1, _ATTEMPTS + 1):
                manifest = read_served(self._path)
                about, seen = published_in(self._path, manifest), str(manifest.get("xxh3"))
                if about is None or seen == self._seen:
                    break
                try:
                    self._follow(about, about.version != self._base_version())
                except CheckpointError:
                    is_last = attempt == _ATTEMPTS
                    if is_last or str(read_served(self._path).get("xxh3")) == seen:
                        raise
                    continue  # the publisher went on, and may have removed what was to be read
                self._seen = seen
            return Refreshed(self.num_deltas - num_deltas, self.num_bases > num_bases)

    def _base_version(self) -> str:
        about = self.model.folder.published
        return "" if about is None else about.version

    def _follow(self, about: Published, new_base: bool) -> None:
        """Open a new base, apply deltas, and take the result; of a damaged delta those before it."""
        model = self.model
        if new_base:
            model = ServedModel.of(ServedFolder(self._path, verify=self._verify), *self._how)
            about = model.folder.published or about  # of the manifest that was read with it
        before, first = about.position(self.model.version), about.position(model.version)
        deltas = about.after(model.version) or ()
        try:
            for one in deltas:
                one.check_follows(model.version, self._path)  # before it is opened
                model = model.after(Delta.open(self._path, one))
        finally:
            reached = about.position(model.version)
            if reached > before or model.version == about.newest:
                self.model = model
                self.num_deltas += reached - first
                self.num_bases += new_base

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
        model = self.model  # it is read, too, by the version that scores it
        return _scored(model, model.reader.read(shared, candidates))

    def score_samples(self, samples: Samples) -> Scored:
        """Score what a request was read into."""
        return _scored(self.model, samples)

    def read(self, shared: Shared, candidates: Candidates) -> Samples:
        """Check a request and turn it into ids and numbers."""
        return self.model.reader.read(shared, candidates)

    def warm_up(self) -> None:
        """Compile what scoring needs, so that the first request does not wait for it."""
        names = self.folder.schema.column_names(with_label=False)
        self.score(dict.fromkeys(names), [{}])

    def logits(self, samples: Samples) -> tuple[Floats, int]:
        """Return a logit for each sample, and how many ids have no row."""
        return self.model.logits(samples)


def _scored(model: ServedModel, samples: Samples) -> Scored:
    """Score all of a request by one version."""
    logits, num_unknown = model.logits(samples)
    with np.errstate(over="ignore"):  # the exponential of a large number is infinity, and the score 0
        scores = np.where(model.is_number, logits, 1 / (1 + np.exp(-logits.astype(np.float64))))
    return Scored(scores.astype(np.float32), len(samples.bags.ids), num_unknown, model.step, model.tasks)
