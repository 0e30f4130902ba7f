"""What a checkpoint folder holds.

::

    step-000001000/
      manifest.json                        written last: without it the folder is unfinished
      tensors-model.safetensors            named groups of tensors
      rows-0000-00000.safetensors          some rows of table 0 as their format has them: keys, values, state
      rows-0000-r0003-00000.safetensors    the same, where rank 3 of a cluster wrote them
      layout-r0003-00000.safetensors       only of a cluster: what rank 3 held where, see `rowhaul.train`
      ...

Rows are addressed by key: a reader need not know how many processes wrote them. Every
file's size and checksum (XXH3, 64 bits) are in the manifest. There is no pickle anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from rowhaul._manifest import checksum_agrees
from rowhaul.checkpoint.location import Place, as_place, storage_of
from rowhaul.errors import CheckpointError, DamagedCheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = "rowhaul-checkpoint"
VERSION = 1
LAYOUT, SCHEDULE = "layout-", "schedule."  # files that only the cluster that saved can use
_STEP_FOLDER = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True)
class TableEntry:
    """A table as the manifest describes it."""

    name: str
    dim: int
    state_width: int
    dtype: str
    num_rows: int
    files: tuple[str, ...]
    format: str = "whole"  # of its rows, see `rowhaul.store.row_format`

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], format: str = "whole") -> TableEntry:
        """Read an entry; ``format`` is that of tables whose entry names none."""
        return cls(**{"format": format, **given, "files": tuple(given["files"])})


def step_folder(step: int) -> str:
    """Name of the checkpoint taken after ``step`` steps."""
    return f"step-{step:09d}"


def unfinished_folder(path: Place) -> Place:
    """Where a checkpoint's files are written: beside its final place, or there if it cannot be renamed."""
    building: Place = storage_of(path).building(path)
    return building


def finished_checkpoints(folder: str | Place) -> list[Place]:
    """Complete checkpoints in a folder or at a URL, oldest first."""
    root = as_place(folder)
    storage = storage_of(root)
    names = [name for name in storage.folders(root) if _STEP_FOLDER.fullmatch(name)]
    found = [root / name for name in sorted(names, key=lambda name: int(name[5:]))]
    return [path for path in found if storage.is_file(path / MANIFEST_FILE)]


def latest_checkpoint(folder: str | Place) -> Place | None:
    """The newest complete checkpoint in a folder or at a URL, if there is one."""
    found = finished_checkpoints(folder)
    return found[-1] if found else None


def remove_unfinished(folder: str | Place) -> None:
    """Remove what interrupted saves left in a folder, while none is under way; damaged checkpoints, too."""
    root = as_place(folder)
    storage_of(root).remove_leftovers(root, MANIFEST_FILE)


def read_manifest(
    path: Place, version: tuple[str, int], entries: Set[str], *, of: str, hint: str, instead: str
) -> dict[str, Any]:
    """Read a manifest of a format and version that has certain entries.

    Raises:
        CheckpointError: the folder is not ``of`` this kind (``hint`` says what to name).
        DamagedCheckpointError: the manifest is damaged (``instead`` says what to do).
    """
    try:
        manifest = json.loads(storage_of(path).read(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path.parent} is no {of}: it has no {path.name}; {hint}") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is damaged: {error}; {instead}") from None
    if isinstance(manifest, dict) and manifest.get("format") != version[0]:
        raise CheckpointError(f"{path.parent} is no {of}: its {path.name} is of something else; {hint}")
    if not isinstance(manifest, dict) or not manifest.keys() >= entries | {"format", "version"}:
        raise DamagedCheckpointError(f"{path} is damaged: entries are missing; {instead}")
    if not checksum_agrees(manifest):  # older versions wrote none
        raise DamagedCheckpointError(f"{path} is damaged: its checksum differs; {instead}")
    if (manifest["format"], manifest["version"]) != version:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} version {manifest['version']!r}, but this Rowhaul reads "
            f"{version[0]!r} version {version[1]}; {instead}"
        )
    return manifest


def check_inside(name: object, manifest: Place, instead: str) -> str:
    """Return a file name of a manifest; refuse one that could leave its folder."""
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or any(part in ("", ".", "..") or not set(part).isdisjoint("\\\0") for part in parts):
        raise DamagedCheckpointError(
            f"{manifest} names a file outside of its folder, {name!r}: it is damaged or forged; {instead}"
        )
    return str(name)
