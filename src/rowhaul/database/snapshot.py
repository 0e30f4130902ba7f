"""A read-only view of a database, for evaluation beside training."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.database.pooled import Vectors, read_vectors
from rowhaul.database.requests import Request, TableKeys, read_request
from rowhaul.database.rows import Rows, starts_of
from rowhaul.database.tickets import by_group, distinct_keys
from rowhaul.database.views import View
from rowhaul.errors import ConfigError
from rowhaul.store.tables import ON_UNKNOWN

Int64s = npt.NDArray[np.int64]


class Snapshot:
    """The rows of a database as they were when the snapshot was taken, whatever is trained since.

    Taking it copies nothing. While it lives, a step saves each record before it changes it for the first
    time: the cost is a copy, in time and memory, of the rows trained since. Several threads may use it.
    """

    def __init__(self, rows: Rows, view: View, on_unknown: str, step: int) -> None:
        self.step = step  # updates before it was taken
        self._rows, self._view, self._on_unknown = rows, view, on_unknown
        weakref.finalize(self, view.close)

    def __len__(self) -> int:
        return sum(self.num_rows(spec.name) for spec in self._rows.settings.tables)

    def num_rows(self, table: str) -> int:
        """Rows that a table had."""
        place = self._rows.places[self._rows.settings.table(table).name]
        return int(self._view.num_keys[place.group][place.position])

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the snapshot costs by now."""
        return self._view.allocated_bytes

    def pull(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> Tensor | dict[str, Tensor]:
        """Vectors of keys given as to `EmbeddingDatabase.prefetch`; nothing is inserted."""
        self.check_open()
        request = read_request(self._rows.settings, keys, table, lengths, pooling)
        return request.result(self.read(request))

    def read(self, request: Request) -> dict[str, Tensor]:
        """The vectors of a request by table."""
        dtype = getattr(torch, self._rows.settings.dtype)
        vectors: dict[str, Tensor] = {}
        for group, parts in by_group(self._rows, request).items():
            for part, found in self._locate(group, parts):
                out = torch.empty((part.num_vectors, self._rows.groups[group].dim), dtype=dtype)
                with self._rows.records.shared():
                    whole = self._with_saved(group, found)
                    read_vectors(self._rows.groups[group].arena, whole, out.numpy(), self._rows.pieces)
                vectors[part.table] = out
        return {part.table: vectors[part.table] for part in request.parts}

    def blocks(self, table: str) -> Generator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, records). Deletions wait until the last one was taken."""
        self.check_open()
        place = self._rows.places[self._rows.settings.table(table).name]
        changed = self._view.changed[place.group]
        with self._rows.deleting:
            for keys, records in self._rows.groups[place.group].index.blocks(place.position):
                codes = changed.find_each(np.full(len(keys), place.position), keys)
                yield from self._contents(place.group, keys[codes < 0], records[codes < 0])
            for keys, codes in changed.blocks(place.position):
                yield from self._contents(place.group, keys[codes > 0], codes[codes > 0] - 1)

    def find(self, table: str, keys: Int64s) -> Int64s:
        """Where the rows of distinct keys of a table are in this process, -1 for those that had none."""
        place = self._rows.places[table]
        group = self._rows.groups[place.group]
        starts = starts_of(len(group.tables), place.position, len(keys))
        with self._rows.structure.shared():
            return self._view.locate(place.group, group.index, keys, starts)

    def values_at(self, table: str, locations: Int64s) -> npt.NDArray[Any]:
        """The values of rows that `find` found."""
        place = self._rows.places[table]
        group = self._rows.groups[place.group]
        out = np.empty((len(locations), group.dim), group.dtype)
        plain = Vectors(locations, np.arange(len(locations), dtype=np.int32))
        with self._rows.records.shared():
            read_vectors(group.arena, self._with_saved(place.group, plain), out, self._rows.pieces)
        return out

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the snapshot, see `EmbeddingDatabase.save`."""
        from rowhaul.database.saving import save_snapshot

        self.check_open()
        save_snapshot(self, self._rows.settings, path)

    def close(self) -> None:
        """Give up what the snapshot costs; it cannot be used any more."""
        self._view.close()
        self._rows.forget_closed_views()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_open(self) -> None:
        """Refuse use after `close`."""
        if not self._view.is_open:
            raise ConfigError("the snapshot is closed; take another one")

    def _locate(self, group: int, parts: list[TableKeys]) -> list[tuple[TableKeys, Vectors]]:
        tables = self._rows.groups[group]
        keys, starts, located = distinct_keys(self._rows, parts, group)
        with self._rows.structure.shared():
            locations = self._view.locate(group, tables.index, keys, starts)
        absent = np.flatnonzero(locations < 0)
        spare = tables.unknown_rows(keys, starts, absent, self._on_unknown) if len(absent) else None
        locations[absent] = -1 - np.arange(len(absent))
        return [(part, replace(found, locations=locations[own], spare=spare)) for part, own, found in located]

    def _with_saved(self, group: int, vectors: Vectors) -> Vectors:
        """The same vectors, reading rows that have changed since from what was saved of them."""
        which, contents = self._view.saved(group, vectors.locations)
        if not len(which):
            return vectors
        dim = self._rows.groups[group].dim
        before = np.empty((0, dim), contents.dtype) if vectors.spare is None else vectors.spare
        locations = vectors.locations.copy()
        locations[which] = -1 - len(before) - np.arange(len(which))
        return replace(vectors, locations=locations, spare=np.concatenate([before, contents[:, :dim]]))

    def _contents(
        self, group: int, keys: Int64s, records: Int64s
    ) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        for first in range(0, len(keys), _BLOCK_ROWS):
            some = records[first : first + _BLOCK_ROWS]
            with self._rows.records.shared():
                contents = self._rows.groups[group].arena.read(some)
                which, saved = self._view.saved(group, some)
            contents[which] = saved
            yield keys[first : first + _BLOCK_ROWS], contents


_BLOCK_ROWS = 1 << 16  # rows copied at a time


def check_on_unknown(on_unknown: str) -> None:
    """Refuse what no snapshot can do with unknown keys."""
    if on_unknown not in ON_UNKNOWN:
        raise ConfigError(f"on_unknown must be one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}")
