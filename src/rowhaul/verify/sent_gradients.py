"""The rounding of gradients on their way, for replays: rows in few bits are sent in few bits.

Of a row that several workers train, each sends its part to where the row is stepped, rounded by its rank. A
process that replays the parts rounds them alike. Rows of one worker alone and hot rows are not rounded: their
gradients are not sent, or are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.nn import TableCollection
from rowhaul.nn.local_rows import Pending, names_of
from rowhaul.schedule import HotRows
from rowhaul.store import TableGroup


class SentGradients:
    """Rounds the parts of a batch that workers trained; set ``workers`` before each batch.

    Args:
        groups: the tables of each group of features.
        tables: names, in the order in which plans number them.
        hot: rows that all workers hold.
    """

    def __init__(self, groups: Sequence[TableGroup], tables: Sequence[str], hot: HotRows | None) -> None:
        self.workers: npt.NDArray[np.int64] = np.empty(0, np.int64)  # who trained each part
        self._groups, self._hot = groups, hot
        self._number = {name: number for number, name in enumerate(tables)}

    @classmethod
    def of(cls, collection: TableCollection, hot: HotRows | None) -> SentGradients | None:
        """Round the gradients of a collection from now on; None where they are sent as they are."""
        source: Any = collection.source
        groups = getattr(source, "group_tables", [])
        if all(one.packing is None for one in groups):
            return None
        sent = cls(groups, [one.name for one in collection.table_configs()], hot)
        source.round_parts = sent.rounded
        if hasattr(source, "on_hand_over"):
            source.on_hand_over = sent.leave
        return sent

    def leave(self, tables: TableGroup, change: Any) -> None:
        """Treat rows of a budget that change hands as no longer held by all workers."""
        if self._hot is None:
            return
        numbers = np.array([self._number[spec.name] for spec in tables.tables])
        for positions, keys in ((change.tables, change.rows), (change.gone_tables, change.gone_rows)):
            self._hot = self._hot.without(HotRows(numbers[positions], keys))

    def rounded(self, number: int, parts: Sequence[Pending], step: int) -> list[Pending]:
        """Return the gradients of a group's parts, as they arrive."""
        group = self._groups[number]
        names = [names_of(lookup) for lookup, _ in parts]
        rows = np.concatenate([np.stack([one.tables, one.keys]) for one in names], axis=1)
        _, where, counts = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
        travels = (counts[where.reshape(-1)] > 1) & ~self._is_hot(number, *rows)
        found, first = [], 0
        for worker, name, (lookup, gradients) in zip(self.workers.tolist(), names, parts, strict=True):
            some = travels[first : first + len(name.keys), None]
            first += len(name.keys)
            arrived = group.unpack_gradients(group.pack_gradients(gradients, name, step, worker))
            found.append((lookup, np.where(some, arrived, gradients)))
        return found

    def _is_hot(
        self, number: int, positions: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(keys), np.bool_)
        if self._hot is not None:
            for position, spec in enumerate(self._groups[number].tables):
                here = positions == position
                of_table = self._hot.keys[self._hot.tables == self._number[spec.name]]
                found[here] = np.isin(keys[here], of_table)
        return found
