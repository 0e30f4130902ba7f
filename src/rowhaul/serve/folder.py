"""`ServedFolder`: what `rowhaul export --dense` wrote, checked before it is used.

::

    served/
      served.json               what is what: features, files with sizes and checksums; written last
      README.md                 the same for people
      schema.yaml               the columns of a request
      base-000001000/rows.bin   all rows, see `rowhaul.serve.row_file`
      base-000001000/dense.onnx and, if asked for, dense.pt2: pooled vectors and numbers to logits
      base-000001000/dots.safetensors: of a DLRM, its weights for `rowhaul.serve.shared_dots`

The base has a folder of its own, so that another one can appear beside it, and published changes after it
(`rowhaul.serve.deltas`); ``served.json`` names those in use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowhaul._manifest import checksum_agrees
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError
from rowhaul.serve.deltas import Published
from rowhaul.serve.files import file_entry
from rowhaul.serve.row_file import RowFile
from rowhaul.serve.rows import ServedFeature

MANIFEST_FILE = "served.json"
_RUN_FILE, _EXPORT_FILE = "config.yaml", "export.json"  # of other folders; an export has both
FORMAT, VERSION = "rowhaul-served", 1
DENSE_FILES = {"onnx": "dense.onnx", "pt2": "dense.pt2", "dots": "dots.safetensors"}
ROWS_FILE = "rows.bin"
_ENTRIES = {"features", "width", "precision", "step", "key_kinds", "schema", "rows", "dense"}
_INSTEAD = "export again"


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
        self.manifest = manifest = read_served(self.path)
        try:
            self.features = tuple(
                ServedFeature(str(one["name"]), str(one["table"]), int(one["column"]))
                for one in manifest["features"]
            )
            self.width, self.step = int(manifest["width"]), int(manifest["step"])
            self.precision, self.key_kinds = str(manifest["precision"]), dict(manifest["key_kinds"])
            self.model = str(manifest.get("model"))
            self.published = published_in(self.path, manifest)
            self._dense = {kind: file_entry(one) for kind, one in manifest["dense"].items()}
            schema, rows = file_entry(manifest["schema"]), file_entry(manifest["rows"])
            header = manifest["rows"]["header"]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / MANIFEST_FILE} is damaged: {type(error).__name__} {error}; {_INSTEAD}"
            ) from None
        self.schema, self.schema_checksum = Schema.read(schema.path(self.path)), schema.xxh3
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


def published_in(folder: Path, manifest: Mapping[str, Any]) -> Published | None:
    """Return what a manifest says of published versions; None: the folder was exported once.

    Raises:
        CheckpointError: it is damaged.
    """
    if "published" not in manifest:
        return None
    try:
        return Published.read(manifest["published"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE} is damaged: published: {type(error).__name__} {error}; {_INSTEAD}"
        ) from None


def _to_export(folder: Path) -> str:
    """What to export, and where to, in place of a folder that cannot be served."""
    if (folder / _RUN_FILE).is_file() and not (folder / _EXPORT_FILE).is_file():
        return f"{folder} --out served"
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    return f"RUN --out {folder if is_new else 'served'}"


def read_served(folder: Path) -> dict[str, Any]:
    """Read the manifest of a served folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is no folder to serve from: it has no {MANIFEST_FILE}; make one with `rowhaul export "
            f"{_to_export(folder)} --dense onnx`"
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
