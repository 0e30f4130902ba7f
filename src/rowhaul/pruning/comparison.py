"""How far apart two pruned models are: which chunks there are, what is in them, how useful they were.

A cluster has read some batches ahead, whose new rows have chunks already: rows that nobody has trained yet,
and that the other side does not know, must be as they begin, and are no difference then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.row_files import FACT, Arrays
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.verify.comparison import Comparison, Difference, Trained, compare_rest

Keys = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class PrunedRows:
    """The rows of one pruned table, ordered by key."""

    keys: Keys
    present: npt.NDArray[np.bool_]  # rows x chunks
    values: Numbers  # rows x chunks x values of the largest chunk; zeros where there are none
    state: Numbers  # rows x chunks x its state; zeros where there is none
    utilities: npt.NDArray[np.float32]  # rows x chunks


def put_together(
    layout: ChunkLayout,
    table: int,
    keys: Keys,
    present: npt.NDArray[np.bool_],
    utilities: npt.NDArray[np.float32],
    read: Callable[[int, Keys], Numbers],
) -> PrunedRows:
    """Rows in any order, given what reads the records of a place's chunks."""
    order = np.argsort(keys)
    keys, present = keys[order], present[order]
    sizes = np.diff(layout.starts)
    width = max(int(size + layout.optimizer.state_width(int(size))) for size in sizes)
    shape = len(keys), layout.num_chunks
    values = np.zeros((*shape, int(sizes.max())), layout.dtype)
    state = np.zeros((*shape, width), layout.dtype)
    for place, size in enumerate(sizes.tolist()):
        there = np.flatnonzero(present[:, place])
        records = read(place, keys[there])
        values[there, place, :size] = records[:, :size]
        end = size + layout.optimizer.state_width(size)
        state[there, place, : end - size] = records[:, size:end]
    return PrunedRows(keys, present, values, state, utilities[order])


def rows_of(layout: ChunkLayout, parts_of: Callable[[str], Iterable[Arrays]]) -> list[PrunedRows]:
    """All rows, table by table, from parts as checkpoints have them (`rowhaul.pruning.row_files`)."""
    found = []
    for number, spec in enumerate(layout.rows):
        parts = list(parts_of(spec.name))
        none = np.empty((0, layout.num_chunks))
        keys = np.concatenate([np.empty(0, np.int64), *(one["keys"] for one in parts)])
        present = np.concatenate([none.astype(np.bool_), *(one["present"] for one in parts)])
        utilities = np.concatenate([none.astype(np.float32), *(one["utilities"] for one in parts)])
        rows, places = np.nonzero(present)
        chunks = np.concatenate([one["chunks"] for one in parts]) if parts else np.empty((0, 1))
        by_place = [
            (keys[rows[places == place]], chunks[places == place]) for place in range(layout.num_chunks)
        ]

        def read(place: int, wanted: Keys, held: Any = by_place) -> Numbers:
            there, records = held[place]
            order = np.argsort(there)
            found: Numbers = records[order[np.searchsorted(there[order], wanted)]]
            return found

        found.append(put_together(layout, number, keys, present, utilities, read))
    return found


def layout_as_saved(reader: CheckpointReader, layout: ChunkLayout) -> ChunkLayout:
    """The tables with the columns that a checkpoint keeps."""
    columns = reader.arrays(reader.facts[FACT]["file"])["0.columns"]
    return layout.narrowed(columns) if columns.shape[1] < layout.rows[0].dim else layout


@dataclass(frozen=True)
class PrunedTrained(Trained):
    """What training has left of pruned rows; ``rows`` has none."""

    layout: ChunkLayout  # with the columns that are kept
    pruned: list[PrunedRows]  # by table


@dataclass
class PrunedComparison(Comparison):
    """The differences between pruned models; numbers are those of chunks that both have."""

    chunks: Difference = field(default_factory=Difference)  # 1 where one side alone has one
    utilities: Difference = field(default_factory=Difference)
    num_same: int = 0  # chunks that both have
    num_other: int = 0  # that one side alone has
    columns_differ: bool = False  # rows keep other columns, so that nothing of them can be compared

    def kinds(self) -> dict[str, Difference]:
        """All differences, by what they are of."""
        return {"chunks that there are": self.chunks, **super().kinds(), "utilities": self.utilities}

    @property
    def is_equal(self) -> bool:
        """Whether not a number differs, and rows keep the same columns."""
        return not self.columns_differ and all(one.is_none for one in self.kinds().values())


def compare_pruned(found: PrunedTrained, expected: PrunedTrained) -> PrunedComparison:
    """Compare two trainings of one pruned model, number by number."""
    comparison, layout = PrunedComparison(), found.layout
    if not np.array_equal(layout.column_matrix, expected.layout.column_matrix):
        comparison.columns_differ = True
        compare_rest(comparison, found, expected)
        return comparison
    fresh = RowMemory(layout)
    for number, spec in enumerate(layout.rows):
        one = found.pruned[number]
        other = _with_untrained(expected.pruned[number], one, layout, number, fresh)
        keys = np.union1d(one.keys, other.keys)
        here, there = _spread(one, keys), _spread(other, keys)
        name = partial(_name_of_row, spec.name, keys)
        comparison.chunks.add(here.present.astype(np.float64), there.present.astype(np.float64), name)
        both = here.present & there.present
        comparison.num_same += int(both.sum())
        comparison.num_other += int((here.present ^ there.present).sum())
        for kind, mine, theirs in (
            (comparison.rows, here.values, there.values),
            (comparison.state, here.state, there.state),
        ):
            flat = np.where(both[:, :, None], mine, 0).reshape(len(keys), -1)
            kind.add(flat, np.where(both[:, :, None], theirs, 0).reshape(len(keys), -1), name)
        comparison.utilities.add(here.utilities, there.utilities, name)
        comparison.only_found += int(np.setdiff1d(one.keys, other.keys).size)
        comparison.only_expected += int(np.setdiff1d(other.keys, one.keys).size)
    compare_rest(comparison, found, expected)
    return comparison


def _with_untrained(
    rows: PrunedRows, others: PrunedRows, layout: ChunkLayout, table: int, fresh: RowMemory
) -> PrunedRows:
    """Rows, and beside them those of the others that they lack and that nobody has trained: as they begin."""
    more = np.flatnonzero(~np.isin(others.keys, rows.keys) & ~others.utilities.any(axis=1))
    if not len(more):
        return rows

    def read(place: int, keys: Keys) -> Numbers:
        number, position = fresh.place_of(table * layout.num_chunks + place)
        made = fresh.groups[number].make_fresh(np.full(len(keys), position), keys)
        records: Numbers = fresh.groups[number].arena.read(made)
        return records

    added = put_together(layout, table, others.keys[more], others.present[more], others.utilities[more], read)
    keys = np.concatenate([rows.keys, added.keys])
    order = np.argsort(keys)
    parts = {
        name: np.concatenate([getattr(rows, name), getattr(added, name)])[order]
        for name in ("present", "values", "state", "utilities")
    }
    return PrunedRows(keys[order], **parts)


def _spread(rows: PrunedRows, keys: Keys) -> PrunedRows:
    """The same rows among all keys, nothing where there is none."""
    places = np.searchsorted(keys, rows.keys)

    def spread(array: Numbers) -> Numbers:
        every = np.zeros((len(keys), *array.shape[1:]), array.dtype)
        every[places] = array
        return every

    return PrunedRows(
        keys, spread(rows.present), spread(rows.values), spread(rows.state), spread(rows.utilities)
    )


def _name_of_row(table: str, keys: Keys, place: int) -> str:
    return f"key {int(keys[place])} of table {table}"
