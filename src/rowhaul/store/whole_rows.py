"""Rows kept whole: ``keys``, ``values`` (rows x dim) and, where there is any, ``state`` (rows x its width).

A format that only stores the values in another type derives from `WholeRows` and says which: see
`WholeRows.value_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.store import row_parts
from rowhaul.store.footprint import index_bytes, records_bytes
from rowhaul.store.row_format import RowFormat
from rowhaul.store.row_parts import Arrays, ExportFile, FoundRow, Int64s, Lines, Parts, RowEstimate, RowShape
from rowhaul.store.served_rows import RecordBlock, ServedRows, equal_records


class WholeRows(RowFormat):
    """All values of a row, then its optimizer state."""

    name = "whole"
    row_dtype = "float32"
    has_snapshots = True
    reading: ClassVar[dict[str, str]] = {
        "parquet": """import pyarrow.parquet as pq

table = pq.read_table("{file}")
keys = table["key"].to_numpy()
values = table["values"].combine_chunks().flatten().to_numpy().reshape(-1, {dim})""",
        "safetensors": """from safetensors.numpy import load_file

table = load_file("{file}")
keys, values = table["keys"], table["values"]""",
        "npz": """import numpy as np

table = np.load("{file}")
keys, values = table["keys"], table["values"]""",
    }

    def value_dtype(self, dtype: str) -> np.dtype[Any]:
        """Type that values are stored in, where rows are trained in ``dtype``."""
        return np.dtype(dtype)

    def wire_bytes(self, dim: int, state_width: int, dtype: str) -> tuple[int, int]:
        """Return the bytes of a record's values, and of its optimizer state, as they are sent."""
        return dim * self.value_dtype(dtype).itemsize, state_width * np.dtype(dtype).itemsize

    def encode(self, keys: Int64s, records: npt.NDArray[Any], dim: int) -> Arrays:
        """Split records into values and state."""
        values = records[:, :dim].astype(self.value_dtype(str(records.dtype)), copy=False)
        state = {"state": records[:, dim:]} if records.shape[1] > dim else {}
        return {"keys": keys, "values": values, **state}

    def decode(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Join values and state."""
        if "state" not in block:
            return block["values"]
        dtype = block["state"].dtype
        return np.concatenate([block["values"].astype(dtype, copy=False), block["state"]], axis=1)

    def stored(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Join values and state to records as memory holds them; the inverse of `encode`."""
        return self.decode(block, dim)

    def find(self, file: Any, place: int, dim: int) -> FoundRow:
        """Read one row."""
        values = file.get_slice("values")[place : place + 1][0]
        state = file.get_slice("state")[place : place + 1][0] if "state" in file.keys() else values[:0]  # noqa: SIM118  # no mapping
        return FoundRow(values, state, np.ones(dim, np.bool_))

    def cells(self, tables: Sequence[Any]) -> dict[str, str]:
        """List the numbers of state in a row."""
        return {"state": str(tables[0].state_width) if len(tables) == 1 else ""}

    def blocks(self, collection: Any, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table."""
        dim = next(one.embedding_dim for one in collection.table_configs() if one.name == table)
        return (self.encode(keys, records, dim) for keys, records in collection.rows(table))

    def save(self, writer: Any, collection: Any) -> None:
        """Write all tables into a checkpoint."""
        for config in collection.table_configs():
            width = collection.optimizer.state_width(config.embedding_dim)
            dtype = str(config.data_type).removeprefix("torch.")
            blocks = self.blocks(collection, config.name)
            writer.blocks(config.name, blocks, config.embedding_dim, width, dtype, self.name)

    def load(self, reader: Any, collection: Any) -> None:
        """Replace every row by a checkpoint's."""
        collection.clear()
        for name in reader.tables:
            for keys, records in reader.rows(name):
                collection.load_rows(name, keys, records)

    def load_export(self, reader: Any, collection: Any) -> None:
        """Load values; optimizer state, which serving does not read, is as it begins."""
        rule = collection.optimizer
        for name, table in reader.tables.items():
            for keys, values in reader.rows(name):
                values = values.astype(table.dtype, copy=False)
                state = np.full((len(keys), rule.state_width(table.dim)), rule.initial_state, values.dtype)
                collection.load_rows(name, keys, np.concatenate([values, state], axis=1))

    def export_file(self, reader: Any, table: str, with_state: bool) -> WholeFile:
        """Lay out the export of a checkpoint's table."""
        entry = reader.tables[table]
        return self._file(entry, entry.state_width if with_state else 0)

    def exported_file(self, table: Any) -> WholeFile:
        """Return the layout of an exported table."""
        return self._file(table, table.state_width)

    def served_rows(self, reader: Any, table: str) -> ServedRows:
        """Return a checkpoint's table as a file to serve from takes it: its values, without state."""
        entry = reader.tables[table]

        def records() -> Iterator[RecordBlock]:
            blocks = reader.blocks(table)
            return (equal_records(block["keys"], self.served_values(block, entry.dim)) for block in blocks)

        size, _ = self.wire_bytes(entry.dim, 0, entry.dtype)
        keys = partial(reader.keys, table)
        return ServedRows(entry.dim, self.served_type(entry.dtype), entry.num_rows, size, keys, records)

    def served_type(self, dtype: str) -> str:
        """Name the type of the values in a file to serve from, where rows are trained in ``dtype``."""
        return str(self.value_dtype(dtype))

    def served_values(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Return what a file to serve from has of each row of a block."""
        return block["values"]

    def _file(self, table: Any, state_width: int) -> WholeFile:
        dtype = self.value_dtype(table.dtype)
        return WholeFile(self.name, table.num_rows, table.dim, state_width, table.dtype, dtype)

    def empty(self, layout: Any, table: str) -> Arrays:
        """Return a block without rows."""
        dim = next(spec.dim for spec in layout.specs if spec.name == table)
        records = np.empty((0, dim + layout.optimizer.state_width(dim)), layout.dtype)
        return self.encode(np.empty(0, np.int64), records, dim)

    def align(self, layout: Any, table: str, found: Arrays, expected: Arrays) -> Iterator[Lines]:
        """Compare values and state. A row that one side lacks counts as just created.

        That is what a reader would get: an untrained hot row is no difference, a lost one is.
        """
        spec = next(one for one in layout.specs if one.name == table)
        keys = np.union1d(found["keys"], expected["keys"])
        group = next(one for one in layout.groups() if spec in one.tables)
        position = group.tables.index(spec)

        def filled(block: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
            lacking = ~np.isin(keys, block["keys"])
            made = group.arena.read(group.make_fresh(np.full(int(lacking.sum()), position), keys[lacking]))
            fresh = self.decode(self.encode(keys[lacking], made, spec.dim), spec.dim)
            records = np.empty((len(keys), fresh.shape[1]), fresh.dtype)
            records[lacking] = fresh
            records[np.searchsorted(keys, block["keys"])] = self.decode(block, spec.dim)
            return records, lacking

        (here, found_lacks), (there, expected_lacks) = filled(found), filled(expected)
        lacking = found_lacks, expected_lacks
        name = row_names(spec.name, keys)
        yield Lines("rows", here[:, : spec.dim], there[:, : spec.dim], name, lacking)
        yield Lines("optimizer state", here[:, spec.dim :], there[:, spec.dim :], name, lacking)

    def estimate(
        self, shape: RowShape, rows: Mapping[str, int], ids_per_batch: float, settings: Any
    ) -> WholeEstimate:
        """Estimate what rows take."""
        values = shape.dim * self.value_dtype(shape.dtype).itemsize
        state = shape.optimizer.state_width(shape.dim) * np.dtype(shape.dtype).itemsize
        return WholeEstimate(dict(rows), values, values + state)


def row_names(table: str, keys: Int64s) -> Any:
    """Return what names the row at a place among keys."""
    return lambda place: f"key {int(keys[place])} of table {table}"


@dataclass(frozen=True)
class WholeFile(ExportFile):
    """An exported file of whole rows."""

    format: str
    num_rows: int
    dim: int
    state_width: int  # 0: without state
    dtype: str
    value_dtype: np.dtype[Any]

    def parts(self) -> Parts:
        """Type and shape of each array."""
        parts: Parts = {
            "keys": (np.dtype(np.int64), (self.num_rows,)),
            "values": (self.value_dtype, (self.num_rows, self.dim)),
        }
        if self.state_width:
            parts["state"] = (np.dtype(self.dtype), (self.num_rows, self.state_width))
        return parts

    def blocks(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Cut the blocks of a checkpoint, and leave out the state unless it is exported."""
        names = list(self.parts())
        for block in blocks:
            for first in range(0, len(block["keys"]), row_parts.BLOCK_ROWS):
                some = slice(first, first + row_parts.BLOCK_ROWS)
                yield {name: np.ascontiguousarray(block[name][some]) for name in names}

    def vectors(self, block: Arrays) -> npt.NDArray[Any]:
        """Return the values."""
        return block["values"]


@dataclass(frozen=True)
class DecodedFile(WholeFile):
    """An exported file of the whole vectors of rows in another format."""

    source: RowFormat

    def blocks(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Decode the blocks of a checkpoint."""
        encode = WholeRows().encode
        return super().blocks(
            encode(block["keys"], self.source.decode(block, self.dim), self.dim) for block in blocks
        )


def decoded_file(source: RowFormat, reader: Any, table: str, with_state: bool) -> DecodedFile:
    """Lay out the export of a checkpoint's table as whole vectors."""
    if with_state and not source.state_by_row:
        raise ConfigError(
            f"rows of table {table!r} are {source.name}, and their state is that of their parts: whole rows "
            "have none. Export the state, or whole rows"
        )
    entry = reader.tables[table]
    width = entry.state_width if with_state else 0
    return DecodedFile("whole", entry.num_rows, entry.dim, width, entry.dtype, np.dtype(entry.dtype), source)


@dataclass(frozen=True)
class WholeEstimate(RowEstimate):
    """Bytes of whole rows; a record is a row."""

    rows: dict[str, int]
    record_values: int
    record_bytes: int
    records_per_row: int = 1

    @property
    def num_records(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Rows of all tables."""
        return sum(self.rows.values())

    def tables(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of values, state and index by table."""
        values, state = self.record_values, self.record_bytes - self.record_values
        return {name: (num * values, num * state, index_bytes(num)) for name, num in self.rows.items()}

    def stored(self, shards: int | None, groups: Sequence[Sequence[str]]) -> dict[str, int]:
        """Bytes of records and index; each group of tables has an arena, on a store all share one."""
        rows = {name: -(-num // (shards or 1)) for name, num in self.rows.items()}
        together = groups if shards is None else [list(rows)]
        records = sum(records_bytes(sum(rows[name] for name in some), self.record_bytes) for some in together)
        return {"rows": records, "index": sum(map(index_bytes, rows.values()))}

    def largest_table(self, shards: int) -> float:
        """Bytes of the largest table's part on a store, as saved."""
        return -(-max(self.rows.values()) // shards) * (self.record_bytes + 8)

    def cached(self, num_records: int) -> int:
        """Bytes of a cache, to which tables contribute in proportion to their rows."""
        share = num_records / max(self.num_records, 1)
        index = sum(index_bytes(round(num * share)) for num in self.rows.values())
        return records_bytes(num_records, self.record_bytes) + index
