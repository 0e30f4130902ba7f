"""The page that an exported folder explains itself with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rowhaul.export.manifest import ExportedTable
from rowhaul.store.row_format import row_format

_TEXT_KEYS = """Keys of text ids are XXH64 of their UTF-8 bytes, seed 0, read as a signed 64-bit number:

```python
import xxhash

key = xxhash.xxh64_intdigest("some id".encode())
key = key - 2**64 if key >= 2**63 else key
```
"""


def readme(manifest: dict[str, Any], tables: Sequence[ExportedTable]) -> str:
    """Return Markdown on what each file holds and how to read it."""
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
        ids = " and ".join(table.ids) or "not known"
        cells = [table.name, f"`{table.file}`", f"{table.num_rows:,}", table.dim, table.dtype, ids]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if tables:
        reading = row_format(tables[0].format).reading[manifest["table_format"]]
        reading = reading.replace("{file}", tables[0].file).replace("{dim}", str(tables[0].dim))
        lines += ["", "```python", reading, "```", ""]
    lines.append("A row is one key and its values; rows come in no particular order.")
    for name in dict.fromkeys(table.format for table in tables):
        if note := row_format(name).export_note([table for table in tables if table.format == name]):
            lines += ["", note]
    if any(table.state_width for table in tables):
        lines.append("`state` is the row optimizer's, as training left it; serving does not need it.")
    if any("text" in table.ids for table in tables):
        lines += ["", _TEXT_KEYS.rstrip()]
    if manifest["dense"]:
        lines += ["", f"`{manifest['dense']['file']}` holds the dense weights by name (safetensors)."]
    if manifest["settings"]:
        named = " and ".join(f"`{name}`" for name in manifest["settings"])
        lines += ["", f"{named}: the model, and which feature reads which table."]
    return "\n".join(lines) + "\n"


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"
