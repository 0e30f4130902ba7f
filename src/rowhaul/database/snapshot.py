"""Read-only snapshots of a database, for evaluation and saving beside training.

Taking a snapshot copies nothing. While it is open, a step first saves the records it is about to change, once
for each record; an insertion notes which keys are new; a deletion notes where the row was, and the snapshot's
lease keeps the record from being reused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.checkpoint import CheckpointWriter
from rowhaul.database.requests import read_request
from rowhaul.database.rows import Keys, Rows
from rowhaul.database.saving import facts_of, write_tables
from rowhaul.database.tickets import group_requests
from rowhaul.database.vectors import Floats, Int64s, Vectors, read_vectors
from rowhaul.errors import ConfigError
from rowhaul.store.index import KeyIndex
from rowhaul.store.keyed import KeyedVectors
from rowhaul.store.tables import ON_UNKNOWN

_BLOCK_ROWS = 1 << 16  # rows copied at a time
_INSERTED = 0  # the change noted for a key inserted since; for one deleted since it is 1 + its record


class Snapshot:
    """The rows of a database as they were when the snapshot was taken; for any number of threads.

    It costs a copy, in time and memory, of each row trained since.
    """

    def __init__(self, rows: Rows, on_unknown: str) -> None:
        self.is_open = True
        self._rows, self._on_unknown = rows, on_unknown
        groups = rows.groups
        self._changed = [KeyIndex(len(group.tables)) for group in groups]  # keys inserted or deleted since
        self._saved = [KeyedVectors(1, group.arena.width, group.dtype) for group in groups]  # by record
        with rows.structure.exclusive(), rows.records.exclusive():
            self.step = rows.num_steps  # updates before it was taken
            self._num_keys = [group.index.num_keys for group in groups]
            self._lease = rows.leases.begin()
            rows.add_snapshot(self)

    def __len__(self) -> int:
        return int(sum(counts.sum() for counts in self._num_keys))

    def num_rows(self, table: str) -> int:
        """Rows that a table had."""
        place = self._rows.places[self._rows.settings.table(table).name]
        return int(self._num_keys[place.group][place.position])

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the snapshot costs by now."""
        saved = sum(one.arena.allocated_bytes + one.index.allocated_bytes for one in self._saved)
        return saved + sum(index.allocated_bytes for index in self._changed)

    def pull(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> Tensor | dict[str, Tensor]:
        """Return the vectors of keys, given as to `EmbeddingDatabase.prefetch`; nothing is inserted."""
        self.check_open()
        request = read_request(self._rows.settings, keys, table, lengths, pooling)
        dtype = getattr(torch, self._rows.settings.dtype)
        pulled = {}
        for asked in group_requests(self._rows, request):
            group = self._rows.groups[asked.keys.group]
            locations = self.find(asked.keys)
            absent = np.flatnonzero(locations < 0)
            spare = group.unknown_rows(asked.keys, absent, self._on_unknown) if len(absent) else None
            locations[absent] = -1 - np.arange(len(absent))
            for part, vectors in asked.vectors(locations):
                pulled[part.table] = torch.empty((part.num_vectors, group.dim), dtype=dtype)
                self.read(asked.keys.group, replace(vectors, spare=spare), pulled[part.table].numpy())
        return request.result({part.table: pulled[part.table] for part in request.parts})

    def blocks(self, table: str) -> Generator[tuple[Int64s, Floats]]:
        """All rows of a table as blocks of (keys, records); deletions wait until the generator ends.

        The thread that reads them cannot delete, or read other blocks, before: it is refused.
        """
        place = self._rows.places[self._rows.settings.table(table).name]
        with self._rows.structure.shared():
            self.check_open()
            changed = self._changed[place.group]
        with self._rows.deleting:
            for keys, records in self._rows.groups[place.group].index.blocks(place.position):
                changes = changed.find_each(np.full(len(keys), place.position), keys)
                yield from self._contents(place.group, keys[changes < 0], records[changes < 0])
            for keys, changes in changed.blocks(place.position):
                deleted = changes > _INSERTED
                yield from self._contents(place.group, keys[deleted], changes[deleted] - 1)

    def find(self, keys: Keys) -> Int64s:
        """Locations that distinct keys had in this process, -1 for those without a row."""
        with self._rows.structure.shared():
            self.check_open()  # another thread may have closed it since
            # In this order: the change of a key that is found was noted before.
            locations, _ = self._rows.groups[keys.group].index.find(keys.values, keys.starts)
            changed = self._changed[keys.group]
            if changed.num_keys.any():
                changes, _ = changed.find(keys.values, keys.starts)
                locations = np.where(changes < 0, locations, changes - 1)
        return locations

    def read(self, group: int, vectors: Vectors, out: Floats) -> None:
        """Write vectors to ``out``, from saved records where rows have changed since."""
        arena = self._rows.groups[group].arena
        with self._rows.records.shared():
            self.check_open()
            which, contents = self._saved_records(group, vectors.locations)
            if len(which):
                before = contents[:0, : out.shape[1]] if vectors.spare is None else vectors.spare
                locations = vectors.locations.copy()
                locations[which] = -1 - len(before) - np.arange(len(which))
                spare = np.concatenate([before, contents[:, : out.shape[1]]])
                vectors = replace(vectors, locations=locations, spare=spare)
            read_vectors(arena, vectors, out, self._rows.pieces)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the snapshot, see `EmbeddingDatabase.save`."""
        self.check_open()
        settings = self._rows.settings
        with CheckpointWriter(path) as writer:
            writer.facts = facts_of(settings, self.step)
            write_tables(writer, self, settings)

    def close(self) -> None:
        """Free the snapshot's memory; it cannot be used any more."""
        with self._rows.structure.exclusive(), self._rows.records.exclusive():
            self.is_open = False
            self._changed, self._saved = [], []
        self._lease.end()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Refuse use after `close`."""
        if not self.is_open:
            raise ConfigError("the snapshot is closed; take another one")

    def note_inserted(self, keys: Keys) -> None:
        """Note keys that are about to be inserted; only the first change of a key counts."""
        self._note(keys, np.full(len(keys.values), _INSERTED, np.int64))

    def note_deleted(self, keys: Keys, records: Int64s) -> None:
        """Note keys that are about to be deleted, and their records."""
        self._note(keys, 1 + records)

    def save_records(self, group: int, records: Int64s) -> None:
        """Save distinct records that are about to change, unless they were saved before."""
        arena, saved = self._rows.groups[group].arena, self._saved[group]

        def allocate(absent: Int64s) -> Int64s:
            copies = saved.arena.allocate(len(absent))
            saved.arena.write(copies, arena.read(records[absent]))
            return copies

        saved.index.find_or_insert(records, np.array([0, len(records)]), allocate, saved.arena.release)

    def _note(self, keys: Keys, changes: Int64s) -> None:
        self._changed[keys.group].find_or_insert(
            keys.values, keys.starts, lambda absent: changes[absent], lambda records: None
        )

    def _saved_records(self, group: int, records: Int64s) -> tuple[Int64s, Floats]:
        """Which of the records have changed since, and their contents before."""
        saved = self._saved[group]
        copies, _ = saved.index.find(records, np.array([0, len(records)]))
        which = np.flatnonzero(copies >= 0)
        return which, saved.arena.read(copies[which])

    def _contents(self, group: int, keys: Int64s, records: Int64s) -> Iterator[tuple[Int64s, Floats]]:
        for first in range(0, len(keys), _BLOCK_ROWS):
            some = records[first : first + _BLOCK_ROWS]
            with self._rows.records.shared():
                self.check_open()
                contents = self._rows.groups[group].arena.read(some)
                which, saved = self._saved_records(group, some)
            contents[which] = saved
            yield keys[first : first + _BLOCK_ROWS], contents


def check_on_unknown(on_unknown: str) -> None:
    """Refuse an unknown way of reading unknown keys."""
    if on_unknown not in ON_UNKNOWN:
        raise ConfigError(f"on_unknown must be one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}")
