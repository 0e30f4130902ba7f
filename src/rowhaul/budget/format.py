"""Rows within a budget: blocks of whole rows, or rows in fewer bits, whose ``keys`` are names of rows.

A name is a slot, or ``-1 - j`` for shared row ``j`` of the table; a file beside the rows has the maps, which
say what row an id reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from rowhaul.budget import saved
from rowhaul.budget.export import READING, SlotFile, explain, exported, lay_out
from rowhaul.budget.room import BUCKET
from rowhaul.budget.rows import BudgetedRows
from rowhaul.budget.sizing import SlotEstimate
from rowhaul.errors import CheckpointError
from rowhaul.store.packed_rows import PackedRows
from rowhaul.store.packing import RowPacking
from rowhaul.store.row_parts import Arrays, FoundRow, Int64s, RowShape
from rowhaul.store.served_rows import ServedRows
from rowhaul.store.whole_rows import WholeRows


def budgeted_rows(collection: Any) -> BudgetedRows:
    """Return the rows of a collection that has a budget in this process."""
    return cast("BudgetedRows", collection.source)


class SlotRows(WholeRows):
    """Slots and shared rows, in the type that they are computed in."""

    name = "slots"
    keyed_by_id = False
    has_snapshots = False
    row_dtype = ""  # how many rows there are follows from their bytes, so they cannot be converted
    reading: ClassVar[dict[str, str]] = READING
    cluster_rows = "rowhaul.budget.cluster.checkpoint:SlotClusterRows"

    @property
    def exported_as(self) -> str:
        """The format of exported rows: numbers, not packed."""
        return SlotRows.name

    def row_names(self, reader: Any, table: str, ids: Int64s) -> Int64s:
        """Return the names of the rows that ids read."""
        return saved.names_of_ids(reader, table, ids)

    def find(self, file: Any, place: int, dim: int) -> FoundRow:
        """Read one row."""
        found, name = super().find(file, place, dim), int(file.get_slice("keys")[place : place + 1][0])
        what = f"its own, slot {name}" if name >= 0 else f"shared row {-1 - name} of the table"
        return replace(found, details={**found.details, "row": name}, notes={**found.notes, "row   ": what})

    def note(self, facts: Mapping[str, Any]) -> str:
        """Say how large the budget is."""
        within = f"within {saved.budget_text(saved.settings_of(facts[saved.FACT]))}"
        return ", ".join(filter(None, (within, super().note(facts))))

    def check_mergeable(self, sources: Sequence[Any]) -> None:
        """Refuse several checkpoints: each has given the same slots to other ids."""
        if len(sources) > 1:
            paths = " and ".join(str(one.path) for one in sources[:2])
            raise CheckpointError(
                f"{paths} cannot be merged: their rows have a budget, and each has given its rows to the ids "
                "that it has read most; train on with one of them instead"
            )

    def merging(self, sources: Sequence[Any], tables: Mapping[str, Any]) -> Any:
        """Keep the maps of the only checkpoint."""
        return _OneSource(sources[0])

    def check_loadable(self, reader: Any, collection: Any) -> None:
        """Refuse rows of another budget."""
        saved.check_same(reader.path, reader.facts[saved.FACT], collection.row_settings, collection.seed)

    def blocks(self, collection: Any, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table."""
        rows = budgeted_rows(collection)
        dim = rows.find_table(table)[0].dim
        return (self.encode(names, stored, dim) for names, stored in rows.stored_rows(table))

    def save(self, writer: Any, collection: Any) -> None:
        """Write the maps and all tables into a checkpoint."""
        maps = budgeted_rows(collection).maps
        writer.facts[saved.FACT] = saved.fact_of(maps, writer.arrays(saved.FILE, maps.state()))
        super().save(writer, collection)

    def load(self, reader: Any, collection: Any) -> None:
        """Replace every row, and who has it, by a checkpoint's."""
        rows = budgeted_rows(collection)
        rows.restore(reader.arrays(reader.facts[saved.FACT]["file"]))
        for name in reader.tables:
            tables, position = rows.find_table(name)
            for block in reader.blocks(name):
                tables.load_stored(position, block["keys"], self.stored(block, tables.dim))

    def load_export(self, reader: Any, collection: Any) -> None:
        """Fill a collection that serves: an export knows who has rows, not how often they are read."""
        rows = budgeted_rows(collection)
        known = {name: np.zeros_like(array) for name, array in rows.maps.state().items()}
        for number, one in enumerate(rows.maps.maps):
            for position, table in enumerate(one.names):
                self._place_exported(reader, table, one.seeds[position], known, number, position)
        rows.restore(known)
        for name in reader.tables:
            tables, position = rows.find_table(name)
            for keys, values in reader.rows(name):
                state = (len(keys), tables.width - tables.dim)
                fresh = np.full(state, tables.optimizer.initial_state, values.dtype)
                tables.load(position, keys, np.concatenate([values, fresh], axis=1))

    def _place_exported(
        self, reader: Any, table: str, seed: Any, known: Arrays, number: int, position: int
    ) -> None:
        """Note who has slots of a table."""
        file, marks = reader.tables[table].file_layout(), known[f"{number}.marks"]
        if not isinstance(file, SlotFile) or file.places[:2] != (int(seed), len(marks) // BUCKET):
            raise CheckpointError(
                f"{reader.path}: rows of table {table!r} were exported with another seed or budget than the "
                "configuration beside them says; export again"
            )
        known[f"{number}.shared_sizes"][position] = file.places[2]
        for block in reader.blocks(table):
            own = block["keys"] >= 0
            marks[block["keys"][own]] = block["prints"][own]
            known[f"{number}.owners"][block["keys"][own]] = position

    def export_file(self, reader: Any, table: str, with_state: bool) -> Any:
        """Lay out the export of a checkpoint's table."""
        return lay_out(self, reader, table, with_state)

    def exported_file(self, table: Any) -> Any:
        """Return the layout of an exported table."""
        return exported(self, table)

    def served_rows(self, reader: Any, table: str) -> ServedRows:
        """Return a checkpoint's table as a file to serve from takes it, with what finds the rows of ids."""
        return replace(super().served_rows(reader, table), slots=saved.places_of(reader, table))

    def export_note(self, tables: Sequence[Any]) -> str:
        """Explain names of rows."""
        return explain(tables)

    def estimate(self, shape: RowShape, rows: Mapping[str, int], ids_per_batch: float, settings: Any) -> Any:
        """Estimate what rows take."""
        width = shape.optimizer.state_width(shape.dim)
        values, _ = self.wire_bytes(shape.dim, width, shape.dtype)
        return SlotEstimate.of(shape, rows, ids_per_batch, settings, values)


class _OneSource:
    """What a checkpoint that is copied into fewer files keeps beside its rows."""

    num_dropped = 0

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def take(self, table: str, source: int, block: Arrays) -> Arrays:
        """Keep every row."""
        return block

    def files(self) -> dict[str, Arrays]:
        """Return the maps."""
        return {saved.FILE: self._reader.arrays(self._reader.facts[saved.FACT]["file"])}

    def left_out(self, num_rows: int) -> str:
        """Nothing is left out."""
        return ""


class _PackedSlots(SlotRows, PackedRows):
    """Slots and shared rows in fewer bits."""

    held_in: ClassVar[str]

    def packing(self, dim: int, state_width: int) -> RowPacking:
        """Return how rows of a size are packed."""
        return RowPacking(self.held_in, dim, state_width)


class BFloat16Slots(_PackedSlots):
    """Values in bfloat16."""

    name, held_in = "slots-bfloat16", "bfloat16"


class Float16Slots(_PackedSlots):
    """Values in float16."""

    name, held_in = "slots-float16", "float16"


class Int8Slots(_PackedSlots):
    """Values in int8."""

    name, held_in = "slots-int8", "int8"
