"""`ServedModel`: one version of a served model, which never changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.serve.deltas import Delta, Moment
from rowhaul.serve.dense import DenseGraph, open_dense, open_graph
from rowhaul.serve.folder import ServedFolder
from rowhaul.serve.requests import RequestReader, Samples
from rowhaul.serve.rows import MappedRows


@dataclass(frozen=True)
class ServedModel:
    """Rows, graph and what reads requests: everything that a score depends on.

    Args:
        folder: the base.
        rows: of this version.
        dense: of this version.
        reader: of requests.
        step: training steps behind it.
        version: its name; empty where the folder was exported once.
        moment: when it was published; None where the folder was exported once.
        num_deltas: applied to the base.
        threads: that one request may use for the dense part.
    """

    folder: ServedFolder
    rows: MappedRows
    dense: DenseGraph
    reader: RequestReader
    step: int
    version: str = ""
    moment: Moment | None = None
    num_deltas: int = 0
    threads: int = 1

    @classmethod
    def of(cls, folder: ServedFolder, backend: str, on_unknown: str | None, threads: int) -> ServedModel:
        """Open the base of a folder."""
        rows = MappedRows(folder.rows, folder.features, folder.width, on_unknown)
        dense, reader = open_dense(folder, backend, threads), RequestReader(folder.schema, folder.key_kinds)
        about = folder.published
        version, moment = ("", None) if about is None else (about.version, about.moment)
        return cls(folder, rows, dense, reader, folder.step, version, moment, threads=threads)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels, where there are several."""
        return tuple(column.name for column in self.folder.schema.labels)

    @property
    def is_number(self) -> npt.NDArray[np.bool_]:
        """Which logits are numbers as they are; the others are turned into probabilities."""
        kinds = [column.kind == "number" for column in self.folder.schema.tasks]
        return np.array(kinds if len(kinds) > 1 else any(kinds))

    def logits(self, samples: Samples) -> tuple[npt.NDArray[Any], int]:
        """Return a logit for each sample (and label, of several), and how many ids have no row."""
        if not len(samples):
            pooled, num_tasks = self.rows.pool(samples.bags)[0], len(self.folder.schema.labels)
            return pooled[:, :num_tasks] if num_tasks > 1 else pooled[:, 0], 0
        logits, num_unknown = self.dense.logits(self.rows, samples)
        return logits, int(num_unknown.sum())

    def after(self, delta: Delta) -> ServedModel:
        """Return the model after a delta; this one stays as it is.

        Raises:
            CheckpointError: the delta is of another version, schema or kind of graph.
        """
        delta.name.check_follows(self.version, self.folder.path)
        if delta.schema != self.folder.schema_checksum:
            raise CheckpointError(
                f"{self.folder.path / delta.name.folder} is of another schema than {self.folder.path}; the "
                "model before it stays in use"
            )
        kind = self.dense.kind
        if kind == "dots" and kind not in delta.dense:
            kind = next(iter(delta.dense), kind)  # a trainer that does not write them
        if kind not in delta.dense:
            raise CheckpointError(
                f"{self.folder.path / delta.name.folder} has no {kind} graph, only "
                f"{', '.join(delta.dense)}; serve with another --backend"
            )
        return replace(
            self,
            rows=self.rows.with_changes(delta.rows),
            dense=open_graph(delta.dense[kind], kind, bool(self.folder.schema.dense), self.threads),
            reader=RequestReader(self.folder.schema, {**self.folder.key_kinds, **delta.key_kinds}),
            step=delta.moment.step,
            version=delta.name.to,
            moment=delta.moment,
            num_deltas=self.num_deltas + 1,
        )
