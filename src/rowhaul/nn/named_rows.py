"""Rows by the name of their table, wherever they are: reading and setting them, a ``state_dict``'s arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn.row_source import Arrays, Floats, Int64s


class TablesByName:
    """Finds tables by name; ``tables`` are groups of those of one row size."""

    tables: list[Any]

    def find_table(self, name: str) -> tuple[Any, int]:
        """The group that holds a table, and the table's position in it."""
        for tables in self.tables:
            for position, spec in enumerate(tables.tables):
                if spec.name == name:
                    return tables, position
        known = ", ".join(spec.name for tables in self.tables for spec in tables.tables)
        raise ConfigError(f"no table {name!r}; the tables are {known}")

    def table_names(self) -> list[str]:
        """Names of all tables, group by group."""
        return [spec.name for tables in self.tables for spec in tables.tables]


class NamedRows(TablesByName, ABC):
    """What sources share that hold all rows whole, in `rowhaul.store.TableGroup` or the same on a card."""

    @abstractmethod
    def clear(self) -> None:
        """Drop every row and every gradient."""

    def copied_into(self, other: Any) -> Any:
        """Copy all rows into a source of the same tables, which is returned."""
        for name in self.table_names():
            for keys, stored in self.stored_rows(name):
                other.load_stored(name, keys, stored)
        return other

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, records); a record is values, then state."""
        tables, _ = self.find_table(table)
        return ((keys, tables.readable(stored)) for keys, stored in self.stored_rows(table))

    def stored_rows(self, table: str) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """Yield the same as they are stored: packed rows as bytes."""
        tables, position = self.find_table(table)
        blocks: Iterator[tuple[Int64s, npt.NDArray[Any]]] = tables.blocks(position)
        return blocks

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Set rows of a table, creating those it lacks; the inverse of `rows`, but for rounding."""
        tables, position = self.find_table(table)
        keys, records = np.asarray(keys), np.asarray(records)
        self._check_records(table, keys, records, tables.width)
        tables.load(position, np.ascontiguousarray(keys), records)

    def load_stored(self, table: str, keys: Int64s, stored: npt.NDArray[Any]) -> None:
        """Set rows of a table, creating those it lacks; the inverse of `stored_rows`."""
        tables, position = self.find_table(table)
        self._check_records(table, keys, stored, tables.arena.width)
        tables.load_stored(position, np.ascontiguousarray(keys), stored)

    def state_names(self) -> list[str]:
        """Name the arrays of `state`."""
        return [f"{name}.{part}" for name in self.table_names() for part in ("keys", "records")]

    def state(self) -> Arrays:
        """Return the keys and records of every table."""
        arrays: Arrays = {}
        for name in self.table_names():
            tables, _ = self.find_table(name)
            blocks = list(self.stored_rows(name))
            empty = np.empty((0, tables.arena.width), tables.arena.dtype)
            arrays[f"{name}.keys"] = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
            arrays[f"{name}.records"] = np.concatenate([empty, *(records for _, records in blocks)])
        return arrays

    def load_state(self, arrays: Arrays) -> None:
        """Replace all rows."""
        for name in self.table_names():
            keys, stored, (tables, _) = (
                arrays[f"{name}.keys"],
                arrays[f"{name}.records"],
                self.find_table(name),
            )
            if tables.packing is not None and stored.dtype != np.uint8:
                raise CheckpointError(
                    f"table {name!r}: the rows given are {stored.dtype}, those of this model "
                    f"{tables.row_dtype} with their state, packed into bytes; load them into a model of the "
                    "same row_dtype"
                )
            self._check_records(name, keys, stored, tables.arena.width)
        self.clear()
        for name in self.table_names():
            self.load_stored(name, arrays[f"{name}.keys"], arrays[f"{name}.records"])

    def _check_records(
        self, table: str, keys: npt.NDArray[Any], records: npt.NDArray[Any], width: int
    ) -> None:
        if keys.dtype != np.int64 or keys.ndim != 1 or len(np.unique(keys)) != len(keys):
            raise CheckpointError(
                f"table {table!r}: keys must be different int64 numbers in one dimension, "
                f"got {keys.dtype} of shape {keys.shape}"
            )
        tables, _ = self.find_table(table)
        if records.shape != (len(keys), width):
            held = "" if tables.packing is None else f", held as {tables.row_dtype}"
            raise CheckpointError(
                f"table {table!r}: {len(keys)} keys with records of shape {records.shape}; this model "
                f"needs {width} elements a record (dim {tables.dim}, {tables.optimizer.name}{held})"
            )
