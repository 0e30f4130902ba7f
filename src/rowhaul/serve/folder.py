"""`ServedFolder`: what `rowhaul export --dense` wrote, checked before it is used.

::

    served/
      served.json               what is what: features, files with sizes and checksums; written last
      README.md                 the same for people
      schema.yaml               the columns of a request
      base-000001000/rows.bin   all rows, see `rowhaul.serve.row_file`
      base-000001000/dense.onnx and, if asked for, dense.pt2: pooled vectors and numbers to logits

The base has a folder of its own, named by its step, so that another one can appear beside it, and changes of
rows after it; ``served.json`` names those in use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rowhaul._manifest import checksum_agrees
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError
from rowhaul.serve.row_file import RowFile
from rowhaul.serve.rows import ServedFeature

MANIFEST_FILE = "served.json"
FORMAT, VERSION = "rowhaul-served", 1
DENSE_FILES = {"onnx": "dense.onnx", "pt2": "dense.pt2"}
ROWS_FILE = "rows.bin"
_ENTRIES = {"features", "width", "precision", "step", "key_kinds", "schema", "rows", "dense"}
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


class ServedFolder:
    """A folder to serve from.

    Args:
        path: of the folder.
        verify: read all rows and compare their checksum, too; without it only their size and header are
            checked, which takes no time.

    Raises:
        CheckpointError: no such folder; or a file is missing, cut off, damaged, or of another export.
    """

    def __init__(self, path: str | Path, *, verify: bool = False) -> None:
        self.path = Path(path)
        manifest = _read_manifest(self.path)
        try:
            self.features = tuple(
                ServedFeature(str(one["name"]), str(one["table"]), int(one["column"]))
                for one in manifest["features"]
            )
            self.width, self.step = int(manifest["width"]), int(manifest["step"])
            self.precision, self.key_kinds = str(manifest["precision"]), dict(manifest["key_kinds"])
            self.model = str(manifest.get("model"))
            self._dense = {kind: _file(one) for kind, one in manifest["dense"].items()}
            schema, rows, header = (
                _file(manifest["schema"]),
                _file(manifest["rows"]),
                manifest["rows"]["header"],
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / MANIFEST_FILE} is damaged: {type(error).__name__} {error}; {_INSTEAD}"
            ) from None
        self.schema = Schema.read(schema.path(self.path))
        if self.schema.features != tuple(one.name for one in self.features):
            raise CheckpointError(
                f"{self.path} was exported with another schema: its features are "
                f"{', '.join(one.name for one in self.features)}, those of {SCHEMA_FILE} "
                f"{', '.join(self.schema.features)}; {_INSTEAD}"
            )
        self.rows = RowFile(rows.path(self.path, verify=verify), header)

    @property
    def dense_kinds(self) -> list[str]:
        """Kinds of graphs that are there."""
        return list(self._dense)

    def dense(self, kind: str) -> Path:
        """Return the file of a graph whose checksum agrees."""
        return self._dense[kind].path(self.path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is no folder to serve from: it has no {MANIFEST_FILE}; make one with `rowhaul export "
            f"RUN --out {folder} --dense onnx`"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_INSTEAD}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a folder to serve from; {_INSTEAD}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')!r}, but this Rowhaul reads version {VERSION}; "
            f"{_INSTEAD}"
        )
    if not checksum_agrees(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum differs; {_INSTEAD}")
    if missing := sorted(_ENTRIES - manifest.keys()):
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}; {_INSTEAD}")
    return manifest


def _file(entry: Mapping[str, Any]) -> ServedFile:
    name = str(entry["file"])
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is outside of the folder")
    return ServedFile(name, int(entry["bytes"]), str(entry["xxh3"]))


def digest_of(path: Path) -> str:
    """Return XXH3 (64 bits) of a file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
