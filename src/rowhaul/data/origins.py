"""What the integers in an id column of a Parquet file were made from.

`prepare` and `generate` write keys, all of them int64, whatever the ids looked like; they note in each file
what each column was: integers, text or hexadecimal. Integers in a file without such a note are integer ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rowhaul._id_kinds import HEX, INTEGER, TEXT, UNRECORDED
from rowhaul.data.schema import Schema

_NOTE = b"rowhaul.id_kinds"
_MANIFEST = "manifest.json"
KIND_OF_TYPE = {"string": TEXT, "integer": INTEGER, "hex": HEX}
TYPE_OF_KIND = {kind: name for name, kind in KIND_OF_TYPE.items()}


def with_note(found: pa.Schema, schema: Schema) -> pa.Schema:
    """Add the note about what the id columns hold, by their types in ``schema``."""
    kinds = {one.name: KIND_OF_TYPE.get(one.type, UNRECORDED) for one in schema.stored_ids}
    return found.with_metadata({**(found.metadata or {}), _NOTE: json.dumps(kinds).encode()})


class Origins:
    """The kinds of integer columns, by file."""

    def __init__(self) -> None:
        self._folders: dict[Path, _OldFolder | None] = {}

    def of(self, found: pa.Schema, path: Path) -> Mapping[str, str]:
        """What is known of the columns of a file; those left out are what their type says."""
        note = (found.metadata or {}).get(_NOTE)
        if note is not None:
            kinds: dict[str, str] = json.loads(note)
            return kinds
        for folder in (path.parent, path.parent.parent):
            if folder not in self._folders:
                self._folders[folder] = _OldFolder.find(folder)
            old = self._folders[folder]
            if old is not None and str(path.relative_to(folder)) in old.files:
                return {name: old.kinds.get(name, UNRECORDED) for name in found.names}
        return {}


class _OldFolder:
    """A data folder whose files have no note: its manifest still says how a CSV file was read."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.files = {str(one["name"]) for one in manifest["files"]}
        made_by = manifest["made_by"]
        self.kinds: dict[str, str] = {}
        if made_by.get("format") == "csv":
            ids = Schema.from_dict(made_by["schema"]).ids
            self.kinds = {one.name: KIND_OF_TYPE.get(one.type, TEXT) for one in ids}  # hashed by default

    @classmethod
    def find(cls, folder: Path) -> _OldFolder | None:
        try:
            return cls(json.loads((folder / _MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # not a folder of ours
