"""Which rows have changed since a step: what a published delta consists of.

Rows are noted by table and key with the step that changed them last, in epochs: a snapshot ends one, and sees
those until then, while training notes later changes in the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.store.index import Int64s
from rowhaul.store.keyed import KeyedVectors, locate_or_add

_MOST_EPOCHS = 4  # that are kept apart, so that `forget` frees the older ones


class _Epoch:
    """Changes between two snapshots; once a snapshot has ended it, nothing is added."""

    def __init__(self, num_tables: int) -> None:
        self.rows, self.last_step = KeyedVectors(num_tables, 1, np.int64), 0

    def note(self, step: int, tables: Int64s, keys: Int64s) -> None:
        self._write(tables, keys, np.full((len(keys), 1), step))
        self.last_step = max(self.last_step, step)

    def add(self, later: _Epoch) -> None:
        """Note the changes of an epoch after this one."""
        for table in range(self.rows.index.num_tables):
            for keys, locations in later.rows.index.blocks(table):
                self._write(np.full(len(keys), table), keys, later.rows.arena.read(locations))
        self.last_step = max(self.last_step, later.last_step)

    def _write(self, tables: Int64s, keys: Int64s, steps: Int64s) -> None:
        locations, _ = locate_or_add(self.rows, tables, keys)
        self.rows.arena.write(locations, steps)

    def since(self, step: int, table: int) -> Iterator[Int64s]:
        for keys, locations in self.rows.index.blocks(table):
            yield keys[self.rows.arena.read(locations)[:, 0] > step]


class Changes:
    """The changes up to a snapshot."""

    def __init__(self, epochs: Sequence[_Epoch], num_tables: int) -> None:
        self._epochs, self._num_tables = epochs, num_tables

    def since(self, step: int) -> Iterator[tuple[int, Int64s]]:
        """Yield the rows that changed after ``step`` as (table, keys), each once, in order.

        Rows that were dropped are among them: the snapshot does not have these.
        """
        for table in range(self._num_tables):
            later = (epoch for epoch in self._epochs if epoch.last_step > step)
            parts = [keys for epoch in later for keys in epoch.since(step, table)]
            if any(map(len, parts)):
                yield table, np.unique(np.concatenate(parts))


class ChangedRows:
    """Notes which rows of some tables change; about 40 bytes for each row changed since the last `forget`.

    A row takes them once for each epoch that has it, of which there are a few at most.
    """

    def __init__(self, num_tables: int) -> None:
        self._num_tables = num_tables
        self._epochs: list[_Epoch] = []
        self._current = _Epoch(num_tables)
        self._lock = threading.Lock()  # groups of tables are stepped in several threads

    def note(self, step: int, tables: npt.NDArray[np.int64], keys: Int64s) -> None:
        """Note rows, each once, that step number ``step`` (counted from 1) changes or drops."""
        if len(keys):
            with self._lock:
                self._current.note(step, tables, keys)

    def seal(self) -> Changes:
        """Return all changes so far; for a snapshot."""
        with self._lock:
            if self._current.last_step:  # not empty
                self._epochs.append(self._current)
                self._current = _Epoch(self._num_tables)
            if len(self._epochs) > _MOST_EPOCHS:  # nothing could be published for long
                merged = _Epoch(self._num_tables)
                for epoch in self._epochs:
                    merged.add(epoch)
                self._epochs = [merged]  # snapshots keep those that they have
            return Changes(tuple(self._epochs), self._num_tables)

    def forget(self, step: int) -> None:
        """Free epochs without a change after ``step``: nobody will ask for earlier ones."""
        with self._lock:
            self._epochs = [epoch for epoch in self._epochs if epoch.last_step > step]
