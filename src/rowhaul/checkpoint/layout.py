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
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rowhaul.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = "rowhaul-checkpoint"
VERSION = 1
_UNFINISHED_SUFFIX = ".unfinished"
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


def unfinished_folder(path: Path) -> Path:
    """Where a checkpoint is built, beside its final place."""
    return path.with_name(path.name + _UNFINISHED_SUFFIX)


def finished_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    root = Path(folder)
    found = [path for path in root.iterdir() if _STEP_FOLDER.fullmatch(path.name)] if root.is_dir() else []
    return sorted(
        (path for path in found if (path / MANIFEST_FILE).is_file()), key=lambda path: int(path.name[5:])
    )


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder, if there is one."""
    found = finished_checkpoints(folder)
    return found[-1] if found else None


def remove_unfinished(folder: str | Path) -> None:
    """Remove what interrupted saves left in a folder, while none is under way."""
    for path in Path(folder).glob(f"step-*{_UNFINISHED_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(
    path: Path, version: tuple[str, int], entries: Set[str], *, of: str, hint: str, instead: str
) -> dict[str, Any]:
    """Read a manifest of a format and version that has certain entries.

    Raises:
        CheckpointError: the folder is not ``of`` this kind (``hint`` says what to name), or the manifest is
            damaged (``instead`` says what to do).
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path.parent} is no {of}: it has no {path.name}; {hint}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {instead}") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= entries | {"format", "version"}:
        raise CheckpointError(f"{path} is damaged: entries are missing; {instead}")
    if (manifest["format"], manifest["version"]) != version:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} version {manifest['version']!r}, but this Rowhaul reads "
            f"{version[0]!r} version {version[1]}; {instead}"
        )
    return manifest


def checksum(path: Path) -> str:
    """XXH3 of a file's bytes, in hex."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
