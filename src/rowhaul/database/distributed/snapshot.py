"""A read-only view of a distributed database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.ring import join
from rowhaul.database.distributed.routing import distinct_of, locate_everywhere
from rowhaul.database.distributed.structure import Moved, at_rank
from rowhaul.database.pooled import read_vectors
from rowhaul.database.requests import Request, read_request
from rowhaul.database.rows import Rows, starts_of
from rowhaul.database.snapshot import Snapshot
from rowhaul.store.location import rank_of, record_of
from rowhaul.transport.base import Bytes

Int64s = npt.NDArray[np.int64]


class DistributedSnapshot:
    """The rows of all ranks as they were when the snapshot was taken; see `Snapshot` for what it costs.

    `pull`, `save` and `close` are collective, with an order of calls of their own: evaluation may run in
    another thread than training.
    """

    def __init__(self, calls: Calls, rows: Rows, local: Snapshot, moved: Moved, on_unknown: str) -> None:
        self.local = local  # of the rows that this rank stored
        self._calls, self._rows, self._moved, self._on_unknown = calls, rows, moved, on_unknown

    @property
    def step(self) -> int:
        """Updates before it was taken."""
        return self.local.step

    def num_rows(self, table: str) -> int:
        """Rows of a table that this rank stored."""
        return self.local.num_rows(table)

    def pull(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> Tensor | dict[str, Tensor]:
        """Vectors of this rank's keys, as `Snapshot.pull`; nothing is inserted anywhere."""
        self.local.check_open()
        request = read_request(self._rows.settings, keys, table, lengths, pooling)
        distinct = distinct_of(self._rows, request)
        names = [spec.name for spec in self._rows.settings.tables]
        asked = [distinct[name][1] if name in distinct else np.empty(0, np.int64) for name in names]
        with self._calls.call():
            locations = locate_everywhere(self._calls, names, asked, self._locate, "snapshot.pull", self.step)
            values = self._fetch(names, locations)
        rows = dict(zip(names, values, strict=True))
        self._fill_unknown(
            rows, dict(zip(names, locations, strict=True)), dict(zip(names, asked, strict=True))
        )
        return request.result(self._pool(request, distinct, rows))

    def save(self, path: str | Path) -> None:
        """Write one checkpoint folder together, see `DistributedEmbeddingDatabase.save`."""
        from rowhaul.database.distributed.saving import save_together

        self.local.check_open()
        with self._calls.call():
            save_together(self._calls, self.local, self._rows.settings, path)

    def close(self) -> None:
        """Give up what the snapshot costs."""
        self.local.close()

    def __enter__(self) -> DistributedSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _locate(self, table: str, keys: Int64s) -> Int64s:
        """Where rows were whose keys this rank owns; -1 for those that had none."""
        locations = self._moved.find(table, keys)
        home = locations < 0
        found = self.local.find(table, np.ascontiguousarray(keys[home]))
        locations[home] = np.where(found >= 0, at_rank(self._calls.rank, found), -1)
        return locations

    def _fetch(self, names: list[str], locations: list[Int64s]) -> list[npt.NDArray[Any]]:
        """The values of rows from the ranks that stored them."""
        calls, settings = self._calls, self._rows.settings
        ranks = range(calls.num_ranks)
        places = [[np.flatnonzero(rank_of(some) == rank) for some in locations] for rank in ranks]
        counts = np.array([[len(some) for some in of_rank] for of_rank in places])
        told = calls.tell("snapshot.pull", self.step, counts)[:, : len(names)]
        requests = [
            join([record_of(some[at]) for some, at in zip(locations, places[rank], strict=True)])
            for rank in ranks
        ]
        dims = np.array([settings.table(name).dim for name in names])
        dtype = np.dtype(settings.dtype)

        def answer(rank: int, request: Bytes) -> Bytes:
            records = np.split(request.view(np.int64), np.cumsum(told[rank])[:-1])
            return join([self.local.values_at(name, some) for name, some in zip(names, records, strict=True)])

        sizes = (counts @ dims * dtype.itemsize).tolist()
        arrived = calls.ring.ask(requests, (8 * told.sum(axis=1)).tolist(), answer, sizes)
        values = [np.zeros((len(some), dim), dtype) for some, dim in zip(locations, dims, strict=True)]
        for rank in ranks:
            parts = np.split(arrived[rank].view(dtype), np.cumsum(counts[rank] * dims)[:-1])
            for out, at, part, dim in zip(values, places[rank], parts, dims, strict=True):
                out[at] = part.reshape(-1, dim)
        return values

    def _fill_unknown(
        self, rows: dict[str, npt.NDArray[Any]], locations: dict[str, Int64s], keys: dict[str, Int64s]
    ) -> None:
        for name, found in locations.items():
            absent = np.flatnonzero(found < 0)
            if len(absent):
                place = self._rows.places[name]
                group = self._rows.groups[place.group]
                starts = starts_of(len(group.tables), place.position, len(found))
                rows[name][absent] = group.unknown_rows(keys[name], starts, absent, self._on_unknown)

    def _pool(
        self, request: Request, distinct: dict[str, Any], rows: dict[str, npt.NDArray[Any]]
    ) -> dict[str, Tensor]:
        vectors: dict[str, Tensor] = {}
        for part in request.parts:
            spare = rows[part.table]
            out = torch.empty((part.num_vectors, spare.shape[1]), dtype=getattr(torch, str(spare.dtype)))
            found = distinct[part.table][2]
            arena = self._rows.groups[self._rows.places[part.table].group].arena
            made = replace(found, locations=-1 - np.arange(len(spare)), spare=spare)
            read_vectors(arena, made, out.numpy(), self._rows.pieces)
            vectors[part.table] = out
        return vectors
