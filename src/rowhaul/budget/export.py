"""Exported files of rows within a budget: values by the name of a row, and what finds the row of an id.

A file has ``keys``, the names of rows: slots, and ``-1 - j`` for shared row ``j``; ``prints`` of the ids that
have a slot, 0 for shared rows; ``values`` in the type that rows are computed in, if asked for ``state``; and
``places``: the seed of the table's hash, the number of buckets, and that of shared rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.room import BUCKET
from rowhaul.budget.saved import saved_map
from rowhaul.store import row_parts
from rowhaul.store.row_format import RowFormat
from rowhaul.store.row_parts import Arrays, Parts
from rowhaul.store.whole_rows import WholeFile

_FIND = """
order = np.argsort(keys)
keys, prints, values = keys[order], prints[order], values[order]

def mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

def vectors(ids):
    hashed = mix(np.asarray(ids, np.int64).view(np.uint64) ^ np.uint64(seed))
    mark = np.maximum(hashed & np.uint64(0xFFFF), np.uint64(1))
    rest, most = (hashed >> np.uint64(16)).astype(np.int64), (1 << (num_shared - 1).bit_length()) - 1
    rows = -1 - np.where(rest & most < num_shared, rest & most, rest & most >> 1)
    for one in (mix(hashed ^ np.uint64(0x9E3779B97F4A7C15)), hashed):  # the second bucket, the first
        bucket = ((one >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)
        for place in range(8):
            slot = bucket.astype(np.int64) * 8 + place
            at = np.minimum(np.searchsorted(keys, slot), len(keys) - 1)
            rows = np.where((keys[at] == slot) & (prints[at] == mark), slot, rows)
    return values[np.searchsorted(keys, rows)]"""
_ARRAYS = """
keys, prints, values = (table[name] for name in ("keys", "prints", "values"))
seed, num_buckets, num_shared = table["places"].tolist()"""
READING = {
    "parquet": """import json

import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("{file}")
seed, num_buckets, num_shared = json.loads(table.schema.metadata[b"rowhaul"])["places"]
keys, prints = table["key"].to_numpy(), table["prints"].to_numpy()
values = table["values"].combine_chunks().flatten().to_numpy().reshape(len(keys), -1)"""
    + _FIND,
    "safetensors": f"""import numpy as np
from safetensors.numpy import load_file

table = load_file("{{file}}"){_ARRAYS}{_FIND}""",
    "npz": f"""import numpy as np

table = np.load("{{file}}"){_ARRAYS}{_FIND}""",
}


@dataclass(frozen=True)
class SlotFile(WholeFile):
    """An exported file of rows within a budget.

    Args:
        places: seed of the table's hash, buckets, shared rows.
        source: the format of the checkpoint that it is made from.
        marks: the print of each slot there; empty where a file is read.
    """

    places: tuple[int, int, int]
    source: RowFormat
    marks: npt.NDArray[np.uint16]

    def parts(self) -> Parts:
        """Type and shape of each array."""
        rows = super().parts()
        prints = {"prints": (np.dtype(np.uint16), (self.num_rows,))}
        return {"keys": rows.pop("keys"), **prints, **rows, "places": (np.dtype(np.uint64), (3,))}

    def blocks(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Decode the blocks of a checkpoint, and add the prints."""
        for block in blocks:
            keys, records = block["keys"], self.source.decode(block, self.dim)
            prints = np.where(keys >= 0, self.marks[np.maximum(keys, 0)], np.uint16(0))
            parts = {"keys": keys, "prints": prints, "values": records[:, : self.dim]}
            if self.state_width:
                parts["state"] = records[:, self.dim :]
            for first in range(0, len(keys), row_parts.BLOCK_ROWS):
                some = slice(first, first + row_parts.BLOCK_ROWS)
                yield {name: np.ascontiguousarray(array[some]) for name, array in parts.items()}

    def constants(self) -> Arrays:
        """Return what finds rows."""
        return {"places": np.array(self.places, np.uint64)}

    def metadata(self) -> dict[str, Any]:
        """Return the same for a Parquet file."""
        return {"places": list(self.places)}

    def details(self) -> dict[str, Any]:
        """Return the same for the manifest."""
        return self.metadata()


def lay_out(format: RowFormat, reader: Any, table: str, with_state: bool) -> SlotFile:
    """Lay out the export of a checkpoint's table."""
    entry, (found, position) = reader.tables[table], saved_map(reader, table)
    arrays = found.state()
    places = int(found.seeds[position]), len(arrays["marks"]) // BUCKET, int(found.shared_sizes[position])
    return _file(entry, entry.state_width if with_state else 0, places, format, arrays["marks"])


def exported(format: RowFormat, table: Any) -> SlotFile:
    """Return the layout of an exported table."""
    places = tuple(table.details["places"])
    return _file(table, table.state_width, places, format, np.empty(0, np.uint16))


def _file(table: Any, state_width: int, places: Any, source: RowFormat, marks: Any) -> SlotFile:
    sizes = table.num_rows, table.dim, state_width, table.dtype, np.dtype(table.dtype)
    return SlotFile("slots", *sizes, places, source, marks)


def explain(tables: Sequence[Any]) -> str:
    """Say what is special about rows that ids share."""
    shared = sum(table.details["places"][2] for table in tables)
    own = sum(table.num_rows for table in tables) - shared
    return f"""Rows had a budget of memory while they were trained: {own:,} ids, those read most, have a row
of their own, and all others share {shared:,}. `keys` are names of rows, not ids; `vectors` above returns the
values of the rows that ids read.

Rowhaul reads it as well: `rowhaul evaluate` and `rowhaul predict` take this folder in place of a run."""
