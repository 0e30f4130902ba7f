"""The files of a served folder: what a manifest says of one, and whether it is true."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rowhaul.errors import CheckpointError

_PIECE = 1 << 24
_INSTEAD = "export again"


class ServedFile(NamedTuple):
    """A file of a served folder."""

    file: str
    bytes: int
    xxh3: str

    @classmethod
    def of(cls, folder: Path, file: str) -> ServedFile:
        """Describe a file that was written."""
        path = folder / file
        return cls(file, path.stat().st_size, digest_of(path))

    def path(self, folder: Path, *, verify: bool = True) -> Path:
        """Return where it is, once its size and, if asked for, its checksum agree."""
        path = folder / self.file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_INSTEAD}")
        if (found := path.stat().st_size) != self.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {found:,} bytes, the manifest says {self.bytes:,}; {_INSTEAD}"
            )
        if verify and digest_of(path) != self.xxh3:
            raise CheckpointError(f"{path} is damaged: its checksum is not the manifest's; {_INSTEAD}")
        return path


def file_entry(entry: Mapping[str, Any]) -> ServedFile:
    """Read what a manifest says of a file."""
    return ServedFile(inside(entry["file"]), int(entry["bytes"]), str(entry["xxh3"]))


def digest_of(path: Path) -> str:
    """Return XXH3 (64 bits) of a file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def inside(name: Any) -> str:
    """Return a path that stays within its folder."""
    text = str(name)
    if Path(text).is_absolute() or ".." in Path(text).parts:
        raise ValueError(f"{text!r} is outside of the folder")
    return text
