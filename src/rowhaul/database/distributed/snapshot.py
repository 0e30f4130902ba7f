"""Read-only snapshots of a distributed database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.checkpoint import Place, ShardWriter, as_place
from rowhaul.checkpoint.layout import unfinished_folder
from rowhaul.checkpoint.location import storage_of
from rowhaul.checkpoint.shard import Shard
from rowhaul.checkpoint.writer import prepare, publish
from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.locations import Moved, at_rank
from rowhaul.database.distributed.routes import GroupRoute, find_route
from rowhaul.database.distributed.traffic import fill_tables
from rowhaul.database.requests import read_request
from rowhaul.database.rows import Keys, Rows
from rowhaul.database.saving import facts_of, write_tables
from rowhaul.database.snapshot import Snapshot
from rowhaul.database.vectors import Floats, Int64s, Vectors
from rowhaul.errors import CheckpointError


class DistributedSnapshot:
    """The rows of all ranks as they were when the snapshot was taken; see `Snapshot` for its cost.

    `pull` and `save` are collective, in an order of calls of their own: evaluation may run in another thread
    than training.
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
        """Return the vectors of this rank's keys, as `Snapshot.pull`; nothing is inserted anywhere."""
        self.local.check_open()
        settings = self._rows.settings
        request = read_request(settings, keys, table, lengths, pooling)
        calls, call = self._calls, ("snapshot.pull", self.step)
        with calls.call():
            route = find_route(calls, self._rows, request, self._locate, *call, may_sum=False)
            values = calls.swap(
                *call,
                [
                    [self._read(group, one.served[rank]) for group, one in enumerate(route)]
                    for rank in range(calls.num_ranks)
                ],
            )
        dtype = getattr(torch, settings.dtype)
        pulled = {
            part.table: torch.empty((part.num_vectors, settings.table(part.table).dim), dtype=dtype)
            for part in request.parts
        }
        outputs = {name: tensor.numpy() for name, tensor in pulled.items()}
        for group, (one, arrived) in enumerate(zip(route, zip(*values, strict=True), strict=True)):
            vectors = replace(one.vectors, locations=-1 - np.arange(one.bounds[-1]))
            read = self._with_unknown(one, np.concatenate(arrived))
            fill_tables(self._rows, group, replace(one, vectors=vectors), read, outputs)
        return request.result(pulled)

    def save(self, path: str | Place) -> None:
        """Write one checkpoint folder together, see `DistributedEmbeddingDatabase.save`.

        Rank 0 creates the folder, every rank writes its rows, and rank 0 writes the manifest last.
        """
        self.local.check_open()
        calls, call, path = self._calls, ("save", self.step), as_place(path)
        with calls.call():
            calls.attempt(*call, lambda: prepare(path) if calls.rank == 0 else None)
            shard, _ = calls.attempt(*call, lambda: self._write(path))
            own, nothing = np.frombuffer(shard.to_json().encode(), np.uint8), np.empty(0, np.uint8)
            to_first = [[nothing if rank else own] for rank in range(calls.num_ranks)]
            texts = [text.tobytes().decode() for (text,) in calls.swap(*call, to_first)]
            facts = facts_of(self._rows.settings, self.step)
            calls.attempt(
                *call,
                lambda: publish(path, facts, list(map(Shard.from_json, texts))) if calls.rank == 0 else None,
            )

    def close(self) -> None:
        """Free the snapshot's memory."""
        self.local.close()

    def __enter__(self) -> DistributedSnapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _locate(self, keys: Keys) -> Int64s:
        """Locations that keys of this rank had, -1 for those without a row."""
        locations = self._moved.find(keys)
        here = locations < 0
        found = self.local.find(keys.where(here))
        locations[here] = np.where(found < 0, -1, at_rank(self._calls.rank, found))
        return locations

    def _read(self, group: int, served: Vectors) -> Floats:
        """The values of vectors that this rank stored; zeros for keys without a row."""
        tables = self._rows.groups[group]
        out = np.empty((served.num_vectors, tables.dim), tables.dtype)
        self.local.read(group, replace(served, spare=np.zeros((1, tables.dim), tables.dtype)), out)
        return out

    def _with_unknown(self, route: GroupRoute, arrived: Floats) -> Floats:
        """Fill in the rows of keys that no rank knew."""
        own = self._calls.rank
        unknown = np.flatnonzero(route.served[own].locations < 0)
        if len(unknown):
            keys = route.asked.keys
            group = self._rows.groups[keys.group]
            arrived[route.bounds[own] + unknown] = group.unknown_rows(
                keys, route.own_keys[unknown], self._on_unknown
            )
        return arrived

    def _write(self, path: Place) -> Shard:
        folder = unfinished_folder(path)
        if not storage_of(folder).exists(folder):
            raise CheckpointError(
                f"rank {self._calls.rank} does not see {folder}, created by rank 0: save to a shared folder"
            )
        writer = ShardWriter(folder, f"r{self._calls.rank:04d}")
        write_tables(writer, self.local, self._rows.settings)
        return writer.written
