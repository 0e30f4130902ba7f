"""Histories of a raw log: what a user did before each event, built in one pass in the order of time.

An event's history holds events of *earlier* times alone, never one of the same second or a later one, however
the file is sorted: it is what a model could have known. Each user's last ids are kept, so memory grows with
users and the length of histories, not with the log: (length + 16) x 8 bytes a user and history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.folder.writer import Chunk
from rowhaul.data.formats.history_kernels import recall
from rowhaul.data.formats.source import Histories
from rowhaul.data.formats.time_order import TimeOrdered
from rowhaul.data.schema import IdColumn, Schema
from rowhaul.data.text.reader import BadLines
from rowhaul.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]

EVENTS = ("all", "positive")
SAME_TIME = 16  # events of one user in one second that a full history survives


@dataclass(frozen=True)
class HistoryOptions:
    """What a user may choose of histories.

    Args:
        length: ids in a history, at most; the newest are kept.
        events: which events enter histories: ``all``, or ``positive`` ones, with label 1.
    """

    length: int
    events: str = "all"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"history is {self.length}; a length of at least 1 is needed")
        if self.events not in EVENTS:
            raise ConfigError(f"history_of is {self.events!r}; one of {', '.join(EVENTS)} is needed")


@dataclass(frozen=True)
class WithHistories:
    """The chunks of a sorted source with a history beside each event.

    A resumed command goes through the events again and skips the rows already written.
    """

    ordered: TimeOrdered
    histories: Histories
    options: HistoryOptions

    @property
    def schema(self) -> Schema:
        """Of the chunks: every history reads the table of its items."""
        schema = self.ordered.source.schema
        columns = {column.name: column for column in schema.ids}
        new = tuple(
            IdColumn(name, columns[item].table, columns[item].type, max_length=self.options.length)
            for name, item in self.histories.items.items()
        )
        return replace(schema, ids=(*schema.ids, *new))

    def chunks(self, position: dict[str, Any] | None, bad_lines: BadLines, seed: int = 0) -> Iterator[Chunk]:
        """See `Source`."""
        done = position["rows"] if position else 0
        users, rows = RecentItems(list(self.histories.items), self.options.length), 0
        for chunk in self.ordered.chunks(None, bad_lines, seed):
            batch = self._with_histories(chunk.batch, users)
            rows += batch.num_rows
            fresh = batch.slice(max(0, batch.num_rows - max(0, rows - done)))
            yield Chunk(fresh, {**chunk.position, "rows": max(rows, done)}, chunk.share)

    def _with_histories(self, batch: pa.RecordBatch, recent: RecentItems) -> pa.RecordBatch:
        histories, time = self.histories, self.ordered.time
        columns = {name: batch[item] for name, item in histories.items.items()}
        for name in (histories.user, *histories.items.values()):
            if batch[name].null_count:
                raise DataError(
                    f"column {name!r} has missing values; histories need a user and an item a row"
                )
        entering = np.ones(batch.num_rows, np.bool_)
        label = self.ordered.source.schema.label
        if self.options.events == "positive" and label is not None:
            entering = batch[label.name].to_numpy() == 1
        made = recent.see(
            batch[histories.user].to_numpy(), batch[time].to_numpy(),
            {name: column.to_numpy() for name, column in columns.items()}, entering,
        )  # fmt: skip
        events = {name: batch[name] for name in batch.schema.names if name != time}
        lists = {
            name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
            for name, (offsets, values) in made.items()
        }
        return pa.RecordBatch.from_pydict(events | lists)


@dataclass
class RecentItems:
    """The last items of every user, in rings; ``names`` are the histories."""

    names: list[str]
    length: int
    _slots: dict[int, int] = field(default_factory=dict)  # of users

    def __post_init__(self) -> None:
        self._capacity = self.length + SAME_TIME
        self._rings = {name: np.empty((0, self._capacity), np.int64) for name in self.names}
        self._state = np.empty((0, 3), np.int64)  # events, those before the time of the last, that time

    def see(
        self, users: Int64s, times: Int64s, items: Mapping[str, Int64s], entering: npt.NDArray[np.bool_]
    ) -> dict[str, tuple[npt.NDArray[np.int32], Int64s]]:
        """Return offsets and ids of the histories of some events, which come after all seen before."""
        slots = self._slots_of(users)
        lengths, found = np.zeros(len(users), np.int64), {}
        for number, name in enumerate(self.names):
            values = np.empty(len(users) * self.length, np.int64)
            # The events of all histories are the same: the last one moves the counts on.
            state = self._state if number == len(self.names) - 1 else self._state.copy()
            total = recall(
                slots, times, items[name], entering, self._rings[name], state, self.length, lengths, values
            )
            found[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values[:total].copy()
        return found

    def _slots_of(self, users: Int64s) -> Int64s:
        distinct, inverse = np.unique(users, return_inverse=True)
        slots = self._slots
        numbers = np.array([slots.setdefault(user, len(slots)) for user in distinct.tolist()], np.int64)
        if len(slots) > len(self._state):
            more = max(len(slots), len(self._state) * 3 // 2) - len(self._state)
            never = np.array([[0, 0, np.iinfo(np.int64).min]])
            self._state = np.concatenate([self._state, np.repeat(never, more, axis=0)])
            for name, ring in self._rings.items():
                self._rings[name] = np.concatenate([ring, np.zeros((more, self._capacity), np.int64)])
        return numbers[inverse.reshape(-1)]
