"""`SlotMaps`: the maps of all tables, one for each row size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.room import Room, divide, least_bytes, room_for
from rowhaul.budget.settings import BudgetSettings
from rowhaul.budget.slots import Arrays, FoundRows, HandOver, Int64s, Seated, SlotMap
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableSpec
from rowhaul.store.packing import packing_of


def record_bytes(dim: int, optimizer: RowOptimizerRule, dtype: npt.DTypeLike, row_dtype: str) -> int:
    """Bytes in memory of a row of some size, with its optimizer state."""
    state_width = optimizer.state_width(dim)
    packing = packing_of(row_dtype, dim, state_width, dtype)
    if packing is not None:
        return packing.record_bytes
    return (dim + state_width) * np.dtype(dtype).itemsize


def rooms(
    specs: Sequence[TableSpec], settings: BudgetSettings, record_bytes: Callable[[int], int]
) -> dict[int, Room]:
    """What the budget buys for tables of each row size; ``record_bytes`` are those of a row of some size."""
    dims = list(dict.fromkeys(spec.dim for spec in specs))
    columns = [sum(spec.dim for spec in specs if spec.dim == dim) for dim in dims]
    counts = [sum(spec.dim == dim for spec in specs) for dim in dims]
    sizes = [(record_bytes(dim), count) for dim, count in zip(dims, counts, strict=True)]
    # Of all bytes each size gets the share of its columns, rounded down: maybe none.
    least = [least_bytes(settings, *size) for size in sizes]
    enough = max(-(-one * sum(columns) // mine) for one, mine in zip(least, columns, strict=True))
    return {
        dim: room_for(settings, divide(settings, columns, which), *sizes[which], enough)
        for which, dim in enumerate(dims)
    }


@dataclass(frozen=True)
class Batch:
    """Distinct ids of a global batch, table by table, with the rows that they read."""

    tables: Int64s  # of each distinct id
    rows: Int64s  # what each reads
    accesses: npt.NDArray[Any]
    found: tuple[FoundRows, ...]  # by map
    places: tuple[Int64s, ...]  # by map: which of the distinct ids are its
    seated: tuple[Seated, ...] = ()  # by map: slots that ids of this batch are the first to have


class SlotMaps:
    """Which ids of all tables have rows of their own.

    Args:
        specs: the tables in the order that they are numbered by.
        seed: of the run.
        settings: of the budget.
        record_bytes: bytes in memory of a row of some size, with its optimizer state.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        seed: int,
        settings: BudgetSettings,
        record_bytes: Callable[[int], int],
    ) -> None:
        self.settings, self.seed = settings, seed
        dims = rooms(specs, settings, record_bytes)
        self.tables = [np.flatnonzero([spec.dim == dim for spec in specs]) for dim in dims]  # by map
        self.maps = [
            SlotMap([specs[table].name for table in some.tolist()], seed, settings, room)
            for some, room in zip(self.tables, dims.values(), strict=True)
        ]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all maps."""
        return sum(one.allocated_bytes for one in self.maps)

    def find(self, keys: Int64s, starts: Int64s, accesses: npt.NDArray[Any], *, seat: bool = False) -> Batch:
        """Find the rows of a batch's distinct ids, given table by table.

        Before a global batch is trained on, ``seat`` those without a slot where one is empty.
        """
        found, places, seated = [], [], []
        rows = np.empty(len(keys), np.int64)
        lengths = np.diff(starts)
        of_table = np.repeat(np.arange(len(lengths)), lengths)
        for tables, one in self:
            mine = np.isin(of_table, tables) if len(self.maps) > 1 else np.ones(len(keys), np.bool_)
            here = np.flatnonzero(mine)
            own_starts = np.concatenate([[0], np.cumsum(lengths[tables])]).astype(np.int64)
            mine_found = one.find(keys[here], own_starts)
            if seat:
                seated.append(one.seat(mine_found, accesses[here]))
                if len(seated[-1].slots):
                    mine_found = one.find(keys[here], own_starts)
            found.append(mine_found)
            rows[here] = mine_found.rows
            places.append(here)
        return Batch(of_table, rows, accesses, tuple(found), tuple(places), tuple(seated))

    def count(self, batch: Batch) -> None:
        """Count the accesses of a global batch: once for each step."""
        for one, found, here in zip(self.maps, batch.found, batch.places, strict=True):
            one.count(found, np.ascontiguousarray(batch.accesses[here]))

    def change(self, now: int) -> HandOver:
        """After ``now`` steps, which is a stop: decide which rows change hands, by the tables' numbers."""
        parts = [(tables, one.change(now)) for tables, one in self]
        return HandOver(
            np.concatenate([tables[part.tables] for tables, part in parts]).astype(np.int32),
            np.concatenate([part.rows for _, part in parts]),
            np.concatenate([part.sources for _, part in parts]),
            np.concatenate([tables[part.gone_tables] for tables, part in parts]).astype(np.int32),
            np.concatenate([part.gone_rows for _, part in parts]),
        )

    def finding(self, ahead: Iterable[Batch] = ()) -> tuple[npt.NDArray[Any], ...]:
        """What `find` needs, for `find_as` elsewhere, before the batches ``ahead``."""
        unseated = self._seated(ahead)
        return tuple(
            array
            for one, seated in zip(self.maps, unseated, strict=True)
            for array in one.finding(seated).values()
        )

    def _seated(self, batches: Iterable[Batch]) -> list[list[Seated]]:
        """What ids of batches took, by map."""
        batches = list(batches)
        return [[batch.seated[number] for batch in batches] for number in range(len(self.maps))]

    def find_as(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Find what other maps find, given their `finding`."""
        rest = iter(arrays)
        for one in self.maps:
            one.find_as({name: next(rest) for name in one.finding()})

    def state(self, ahead: Iterable[Batch] = ()) -> Arrays:
        """Everything, as arrays, before the batches ``ahead``, which are read but not counted yet."""
        unseated = self._seated(ahead)
        return {
            f"{number}.{name}": array
            for number, one in enumerate(self.maps)
            for name, array in one.state(unseated[number]).items()
        }

    def load_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace everything by what `state` returned; arrays of another budget change nothing."""
        parts = [
            {
                name.partition(".")[2]: part
                for name, part in arrays.items()
                if name.partition(".")[0] == str(number)
            }
            for number in range(len(self.maps))
        ]
        for one, mine in zip(self.maps, parts, strict=True):
            one.check_state(mine)
        for one, mine in zip(self.maps, parts, strict=True):
            one.load_state(mine)

    def __iter__(self) -> Iterator[tuple[Int64s, SlotMap]]:
        return zip(self.tables, self.maps, strict=True)
