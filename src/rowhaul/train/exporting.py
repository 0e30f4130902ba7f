"""A trained model in files that other tools read: keys and vectors by table, dense weights, what is what.

::

    exported/
      export.json               every table and tensor with its file, rows, sizes and checksums
      README.md                 the same for people
      tables/user.parquet       key (int64), values (a list of `dim` numbers), if asked for: state
      dense.safetensors         dense weights by name
      config.yaml  schema.yaml  of the run, where there is one: what computes with them

Rows are streamed, so that memory does not depend on the size of a table. Every table is read back and
compared with the checkpoint, bit by bit, before the folder appears under its name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from rowhaul._files import sync, temporary_beside, whole
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.opening import run_of
from rowhaul.checkpoint.plain_files import BLOCK_ROWS, RowLayout, write_tensors
from rowhaul.checkpoint.shard import Block
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train.exporting_formats import FORMATS, Format
from rowhaul.train.exporting_readme import readme
from rowhaul.train.run import CONFIG_FILE

MANIFEST_FILE, README_FILE, TABLES_FOLDER = "export.json", "README.md", "tables"
_DENSE_FILE = "dense.safetensors"
_DENSE_GROUP = "model"  # of a checkpoint: the dense weights

Progress = Callable[[int, int], None]
"""Called with how many rows are done, and of how many; each counts when written and when read back."""


@dataclass(frozen=True)
class ExportedTable:
    """A table, and the file that it is in now."""

    name: str
    file: str
    num_rows: int
    dim: int
    state_width: int  # numbers of optimizer state a row in the file; 0 where it was not asked for
    dtype: str
    ids: tuple[str, ...]  # what its keys stand for: "integer", "text" or both; empty: not known
    bytes: int
    xxh3: str  # of the keys, the values and the state: three checksums over all rows


@dataclass(frozen=True)
class Exported:
    """What an export made."""

    path: Path
    tables: tuple[ExportedTable, ...]
    dense: dict[str, list[int]]  # shapes by name


def export(
    reader: CheckpointReader,
    to: str | Path,
    *,
    format: str = "parquet",
    tables: Sequence[str] = (),
    with_state: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tables (all, or the named ones) and the dense weights of a checkpoint into a new folder.

    Raises:
        ConfigError: an unknown format or table, or a folder that is there already.
        CheckpointError: a damaged file, or one that reads back otherwise; nothing is kept.
    """
    path, chosen = Path(to), _chosen(reader, tables)
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; choose {', '.join(FORMATS)}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty; choose another folder for the export")
    kind, ids = FORMATS[format], ids_of_tables(reader)
    told = _Told(2 * sum(reader.tables[name].num_rows for name in chosen), progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(path), ignore_errors=True)  # what a killed export left
    with whole(path) as folder:
        (folder / TABLES_FOLDER).mkdir(parents=True)
        made = []
        for name, stem in zip(chosen, _file_names(chosen), strict=True):
            entry, file = reader.tables[name], f"{TABLES_FOLDER}/{stem}{kind.suffix}"
            state_width = entry.state_width if with_state else 0
            layout = RowLayout(entry.num_rows, entry.dim, state_width, entry.dtype)
            checksums = _write_table(reader, name, folder / file, kind, layout, told)
            size = (folder / file).stat().st_size
            made.append(
                ExportedTable(name, file, **asdict(layout), ids=ids[name], bytes=size, xxh3=checksums)
            )
        has_dense = _DENSE_GROUP in reader.groups
        dense = write_tensors(reader, _DENSE_GROUP, folder / _DENSE_FILE) if has_dense else {}
        _describe(reader, folder, format, made, dense)
        sync(folder / TABLES_FOLDER)
    return Exported(path, tuple(made), dense)


def ids_of_tables(reader: CheckpointReader) -> dict[str, tuple[str, ...]]:
    """What ids each table was trained on, "integer", "text" or both; empty where it is not known.

    A checkpoint knows it of features; which table they read is in the schema of its run, and without one a
    table is taken for that of the feature of its name.
    """
    of_features: dict[str, str] = reader.facts.get("key_kinds", {})
    features: dict[str, tuple[str, ...]] = {name: (name,) for name in reader.tables}
    run = run_of(reader)
    if run is not None and (run / SCHEMA_FILE).is_file():
        features |= Schema.read(run / SCHEMA_FILE).tables
    return {
        table: tuple(sorted({of_features[one] for one in features[table] if one in of_features}))
        for table in reader.tables
    }


class _Told:
    """Counts rows as they pass."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def over(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            yield block
            self._done += len(block[0])
            self._progress(self._done, self._total)


class _Digest:
    """Checksums of keys, values and state as they pass, whatever blocks they come in."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._parts = {name: xxhash.xxh3_64() for name in layout.parts()}
        self.num_rows = 0

    @property
    def value(self) -> str:
        return " ".join(part.hexdigest() for part in self._parts.values())

    def over(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            for name, array in self._layout.split(block).items():
                self._parts[name].update(array.data)
            self.num_rows += len(block[0])
            yield block


def _write_table(
    reader: CheckpointReader, name: str, path: Path, kind: Format, layout: RowLayout, told: _Told
) -> str:
    """Write one table and read it back; returns its checksums."""
    written, found = _Digest(layout), _Digest(layout)
    kind.write(path, layout, told.over(written.over(_blocks(reader, name))))
    sync(path)
    for _ in told.over(found.over(kind.read(path, layout))):
        pass
    if (found.value, found.num_rows) != (written.value, layout.num_rows):
        raise CheckpointError(
            f"table {name!r} reads back from {path.name} otherwise than it is in {reader.path} "
            f"({found.num_rows:,} rows, {layout.num_rows:,} in the checkpoint); nothing was kept"
        )
    return found.value


def _blocks(reader: CheckpointReader, table: str) -> Iterator[Block]:
    for keys, records in reader.rows(table):
        for first in range(0, len(keys), BLOCK_ROWS):
            some = slice(first, first + BLOCK_ROWS)
            yield keys[some], records[some]


def _describe(
    reader: CheckpointReader,
    folder: Path,
    format: str,
    tables: Sequence[ExportedTable],
    dense: dict[str, list[int]],
) -> None:
    """Write what is what, for programs and for people; and how the run was configured."""
    run = run_of(reader)
    copied = [name for name in (CONFIG_FILE, SCHEMA_FILE) if run is not None and (run / name).is_file()]
    for name in copied:
        assert run is not None
        shutil.copyfile(run / name, folder / name)
    manifest: dict[str, Any] = {
        "format": "rowhaul-export",
        "version": 1,
        "table_format": format,
        **{name: reader.facts.get(name) for name in ("model", "step", "samples", "row_optimizer")},
        "tables": [asdict(table) for table in tables],
        "dense": {"file": _DENSE_FILE, "shapes": dense} if dense else None,
        "settings": copied,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / README_FILE).write_text(readme(manifest), encoding="utf-8")


def _chosen(reader: CheckpointReader, tables: Sequence[str]) -> list[str]:
    for name in tables:
        if name not in reader.tables:
            known = ", ".join(reader.tables)
            raise ConfigError(f"{reader.path} has no table {name!r}; its tables are {known}")
    return [name for name in reader.tables if not tables or name in tables]


def _file_names(tables: Sequence[str]) -> list[str]:
    """A file name for each table: its own where that is one, and none twice."""
    names: list[str] = []
    for table in tables:
        plain = re.sub(r"[^\w.-]", "_", table).lstrip(".") or "table"
        name, number = plain, 1
        while name.lower() in {other.lower() for other in names}:  # some disks do not tell them apart
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names
