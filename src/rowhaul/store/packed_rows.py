"""Row formats whose values take fewer bits: ``keys``, ``values``, ``scales`` of int8, ``state`` in float32.

Files hold exactly what memory does. In them bfloat16 values are the upper halves of float32 numbers, as
uint16. Exports are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.store.packing import Parts, RowPacking
from rowhaul.store.row_parts import Arrays, FoundRow, Int64s, RowShape
from rowhaul.store.whole_rows import WholeEstimate, WholeFile, WholeRows, decoded_file


class PackedRows(WholeRows):
    """Values in few bits, then the optimizer's state."""

    name: ClassVar[str]
    replays = True

    @property
    def exported_as(self) -> str:
        """The format of exported rows: numbers, not packed."""
        return "whole"

    def packing(self, dim: int, state_width: int) -> RowPacking:
        """Return how rows of a size are packed."""
        return RowPacking(self.name, dim, state_width)

    def wire_bytes(self, dim: int, state_width: int, dtype: str) -> tuple[int, int]:
        """Return the bytes of a record's values, and of its optimizer state, as they are sent."""
        return self.packing(dim, state_width).value_bytes, 4 * state_width

    def encode(self, keys: Int64s, records: npt.NDArray[Any], dim: int) -> Arrays:
        """Divide stored records into values, scales and state."""
        width = (records.shape[1] - self.packing(dim, 0).value_bytes) // 4
        parts = self.packing(dim, width).split(records)
        scales = {} if parts.scales is None else {"scales": parts.scales}
        state = {"state": parts.state} if width else {}
        return {"keys": keys, "values": parts.values, **scales, **state}

    def stored(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Invert `encode`."""
        none = np.empty((len(block["keys"]), 0), np.float32)
        parts = Parts(block["values"], block.get("scales"), block.get("state", none))
        return self.packing(dim, parts.state.shape[1]).join(parts)

    def decode(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Return values and state as numbers."""
        width = block["state"].shape[1] if "state" in block else 0
        return self.packing(dim, width).readable(self.stored(block, dim))

    def find(self, file: Any, place: int, dim: int) -> FoundRow:
        """Read one row."""
        names = [name for name in file.keys() if name != "keys"]  # noqa: SIM118  # no mapping
        block = {name: file.get_slice(name)[place : place + 1] for name in names}
        record = self.decode({"keys": np.zeros(1, np.int64), **block}, dim)[0]
        scale = {} if "scales" not in block else {"scale": float(block["scales"][0])}
        notes = {name: f"{value:.6g}" for name, value in scale.items()}
        return FoundRow(record[:dim], record[dim:], np.ones(dim, np.bool_), scale, notes)

    def note(self, facts: Mapping[str, Any]) -> str:
        """Return a few words on how a checkpoint's rows are kept."""
        return f"values in {self.name}"

    def blocks(self, collection: Any, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table."""
        dim = next(one.embedding_dim for one in collection.table_configs() if one.name == table)
        return (self.encode(keys, stored, dim) for keys, stored in collection.stored_rows(table))

    def load(self, reader: Any, collection: Any) -> None:
        """Replace every row by a checkpoint's."""
        collection.clear()
        for name, table in reader.tables.items():
            for block in reader.blocks(name):
                collection.load_stored(name, block["keys"], self.stored(block, table.dim))

    def export_file(self, reader: Any, table: str, with_state: bool) -> WholeFile:
        """Lay out the export of a checkpoint's table: float32 values."""
        return decoded_file(self, reader, table, with_state)

    def served_type(self, dtype: str) -> str:
        """Name the type of the values in a file to serve from."""
        return self.packing(2, 0).row_dtype

    def served_values(self, block: Arrays, dim: int) -> npt.NDArray[Any]:
        """Return packed values, with their scale where they have one."""
        none = np.empty((len(block["keys"]), 0), np.float32)
        return self.packing(dim, 0).join(Parts(block["values"], block.get("scales"), none))

    def empty(self, layout: Any, table: str) -> Arrays:
        """Return a block without rows."""
        dim = next(spec.dim for spec in layout.specs if spec.name == table)
        packing = self.packing(dim, layout.optimizer.state_width(dim))
        return self.encode(np.empty(0, np.int64), np.empty((0, packing.record_bytes), np.uint8), dim)

    def why_inexact(self, layout: Any) -> str:
        """Say why a cluster and one process may train different models."""
        return (
            f"rows are held as {self.name}: where partial sums differ in the last digit, a value is rounded "
            "up by one and down by the other, and the gradients of rows that several workers train are "
            "rounded on the way; only losses can be compared"
        )

    def estimate(
        self, shape: RowShape, rows: Mapping[str, int], ids_per_batch: float, settings: Any
    ) -> WholeEstimate:
        """Estimate what rows take."""
        packing = self.packing(shape.dim, shape.optimizer.state_width(shape.dim))
        return WholeEstimate(dict(rows), packing.value_bytes, packing.record_bytes)

    def cells(self, tables: Sequence[Any]) -> dict[str, str]:
        """List how values are held, beside the numbers of state in a row."""
        return {**super().cells(tables), "values in": self.name}


class BFloat16Rows(PackedRows):
    """Values in bfloat16."""

    name = row_dtype = "bfloat16"


class Float16Rows(PackedRows):
    """Values in float16."""

    name = row_dtype = "float16"


class Int8Rows(PackedRows):
    """Values in int8, as shares of a scale for each row."""

    name = row_dtype = "int8"
