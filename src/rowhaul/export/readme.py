"""The page that an exported folder explains itself with."""

from __future__ import annotations

from typing import Any

_READING = {
    "parquet": """import pyarrow.parquet as pq

table = pq.read_table("{file}")
keys = table["key"].to_numpy()
values = table["values"].combine_chunks().flatten().to_numpy().reshape(len(keys), -1)""",
    "safetensors": """from safetensors.numpy import load_file

table = load_file("{file}")
keys, values = table["keys"], table["values"]""",
    "npz": """import numpy as np

table = np.load("{file}")
keys, values = table["keys"], table["values"]""",
}
_READING_PRUNED = {
    "parquet": """import json

import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("{file}")
cut = json.loads(table.schema.metadata[b"rowhaul"])
starts, columns, dim = cut["starts"], cut["columns"], cut["dim"]
keys = table["key"].to_numpy()
present = table["present"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
present = present.reshape(len(keys), len(starts) - 1)
values = table["values"].combine_chunks().flatten().to_numpy()""",
    "safetensors": """import numpy as np
from safetensors.numpy import load_file

table, dim = load_file("{file}"), {dim}
keys, values, starts, columns = (table[name] for name in ("keys", "values", "starts", "columns"))
present = np.unpackbits(table["masks"], axis=1, count=len(starts) - 1, bitorder="little").astype(bool)""",
    "npz": """import numpy as np

table, dim = np.load("{file}"), {dim}
keys, values, starts, columns = (table[name] for name in ("keys", "values", "starts", "columns"))
present = np.unpackbits(table["masks"], axis=1, count=len(starts) - 1, bitorder="little").astype(bool)""",
}
_WHOLE_ROWS = """
stored = np.zeros((len(keys), len(columns)), values.dtype)
stored[np.repeat(present, np.diff(starts), axis=1)] = values
rows = np.zeros((len(keys), dim), values.dtype)  # whole rows, zeros where pruned
rows[:, columns] = stored"""
_TEXT_KEYS = """Keys of text ids are XXH64 of their UTF-8 bytes, seed 0, read as a signed 64-bit number:

```python
import xxhash

key = xxhash.xxh64_intdigest("some id".encode())
key = key - 2**64 if key >= 2**63 else key
```
"""


def readme(manifest: dict[str, Any]) -> str:
    """Markdown on what each file holds and how it is read."""
    tables = manifest["tables"]
    lines = [
        "# Exported embedding tables",
        "",
        f"Model: {manifest['model'] or 'not known'}; trained for "
        f"{_number(manifest['step'])} steps on {_number(manifest['samples'])} samples; "
        f"rows by {manifest['row_optimizer'] or 'an optimizer not known'}.",
        "Every table was read back and equals the checkpoint bit by bit. `export.json` says all this to",
        "programs.",
        "",
        "| table | file | rows | dim | type | ids |",
        "|---|---|---|---|---|---|",
    ]
    for table in tables:
        ids = " and ".join(table["ids"]) or "not known"
        cells = [
            table["name"],
            f"`{table['file']}`",
            f"{table['num_rows']:,}",
            table["dim"],
            table["dtype"],
            ids,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if tables:
        lines += ["", "```python", _reading(tables[0], manifest["table_format"]), "```", ""]
    lines.append("A row is one key and its values; rows come in no particular order.")
    if any(table["pruned"] for table in tables):
        lines += ["", _pruned(tables)]
    if any(table["state_width"] for table in tables):
        lines.append("`state` is the row optimizer's, as training left it; serving does not need it.")
    if any("text" in table["ids"] for table in tables):
        lines += ["", _TEXT_KEYS.rstrip()]
    if manifest["dense"]:
        lines += ["", f"`{manifest['dense']['file']}` holds the dense weights by name (safetensors)."]
    if manifest["settings"]:
        named = " and ".join(f"`{name}`" for name in manifest["settings"])
        lines += ["", f"{named}: the model, and which feature reads which table."]
    return "\n".join(lines) + "\n"


def _reading(table: dict[str, Any], table_format: str) -> str:
    """Lines of Python that read a table."""
    if table["pruned"] is None:
        return _READING[table_format].format(file=table["file"])
    read = _READING_PRUNED[table_format].replace("{file}", table["file"]).replace("{dim}", str(table["dim"]))
    return read + _WHOLE_ROWS


def _pruned(tables: list[dict[str, Any]]) -> str:
    """What is special about rows of which only a part is there."""
    parts = [table["pruned"] for table in tables if table["pruned"]]
    held = sum(part["num_values"] for part in parts)
    left_out = sum(part["rows_left_out"] for part in parts)
    rows = sum(table["num_rows"] for table in tables)
    whole = sum((table["num_rows"] + table["pruned"]["rows_left_out"]) * table["dim"] for table in tables)
    num_chunks, name = len(parts[0]["starts"]) - 1, tables[0]["name"]
    return f"""Rows were pruned while they were trained. They are cut into {num_chunks} chunks, and only those
that are there were written: {held:,} values in {rows:,} rows, {held / max(whole, 1):.1%} of what
{rows + left_out:,} whole rows would have. Chunk `k` of a row is `columns[starts[k]:starts[k + 1]]` of it;
`values` has those of the chunks that are present, one after the other, row by row. What was pruned reads as
zeros, and so does every key that is not here.

Rowhaul reads it as well: `rowhaul.train.ExportReader(".").rows({name!r})` gives blocks of keys and whole
rows, and `rowhaul evaluate` and `rowhaul predict` take this folder in place of a run."""


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"
