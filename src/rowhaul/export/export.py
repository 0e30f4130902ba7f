"""A trained model in files that other tools read: keys and vectors by table, dense weights, what is what.

::

    exported/
      export.json               every table and tensor with its file, rows, sizes and checksums
      README.md                 the same for people
      tables/user.parquet       key (int64), values (a list of `dim` numbers), if asked for: state;
                                pruned tables have stored chunks only, see `rowhaul.pruning.export`
      dense.safetensors         dense weights by name
      config.yaml  schema.yaml  of the run, where there is one: what computes with them

Rows are streamed: memory does not depend on the size of a table. Every table is read back and compared with
the checkpoint, bit by bit, before the folder appears under its name. `ExportReader` reads it, and
`load_trained` makes a model of it that serves; both are in `rowhaul.train`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rowhaul._files import check_new_folder, temporary_beside, whole
from rowhaul._id_kinds import KINDS_FACT, ORIGINS_FACT, UNRECORDED, kinds_in
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter, Progress
from rowhaul.data.schema import SCHEMA_FILE
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.files import FILE_KINDS, FileKind
from rowhaul.export.manifest import (
    DENSE_FILE,
    FORMAT,
    MANIFEST_FILE,
    README_FILE,
    TABLES_FOLDER,
    VERSION,
    Digest,
    ExportedTable,
)
from rowhaul.export.readme import readme
from rowhaul.store.row_parts import ExportFile
from rowhaul.store.whole_rows import decoded_file
from rowhaul.train.run_folder import CONFIG_FILE, saved_settings

_DENSE_GROUP = "model"  # of a checkpoint: the dense weights
# Of a checkpoint, kept in the export.
_FACTS = ("model", "step", "samples", "row_optimizer", KINDS_FACT, ORIGINS_FACT)


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
    whole_rows: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tables (all, or the named ones) and the dense weights of a checkpoint into a new folder.

    Rows are written as they are stored, or with ``whole_rows`` as whole vectors, pruned values as zeros.

    Raises:
        ConfigError: an unknown kind of file or table, or a folder that exists.
        CheckpointError: a damaged file, or one that reads back otherwise; nothing is kept.
    """
    path, chosen = Path(to), chosen_tables(reader, tables)
    if format not in FILE_KINDS:
        raise ConfigError(f"format {format!r} is not known; choose {', '.join(FILE_KINDS)}")
    check_new_folder(path, "the export")
    layouts = {name: _layout(reader, name, with_state, whole_rows) for name in chosen}
    ids, kind = ids_of_tables(reader), FILE_KINDS[format]
    count = Counter(2 * sum(reader.tables[name].num_rows for name in chosen), progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(path), ignore_errors=True)  # what a killed export left
    with whole(path) as folder:
        (folder / TABLES_FOLDER).mkdir(parents=True)
        made = []
        for (name, layout), stem in zip(layouts.items(), _file_names(chosen), strict=True):
            file = f"{TABLES_FOLDER}/{stem}{kind.suffix}"
            checksums = _write(reader, name, layout, kind, folder / file, count)
            size = (folder / file).stat().st_size
            sizes = (layout.num_rows, layout.dim, layout.state_width, layout.dtype)
            kept = (layout.format, layout.details())
            made.append(ExportedTable(name, file, *sizes, ids[name], size, checksums, *kept))
        dense = _write_tensors(reader, folder / DENSE_FILE) if _DENSE_GROUP in reader.groups else {}
        _describe(reader, folder, format, made, dense)
    return Exported(path, tuple(made), dense)


def _layout(reader: CheckpointReader, table: str, with_state: bool, whole_rows: bool) -> ExportFile:
    format = reader.format(table)
    if whole_rows and not format.keyed_by_id:
        raise ConfigError(
            f"rows of table {table!r} have a budget and are shared by ids: there is no row for every id to "
            "be written whole. Leave out the option; the export says how to find the row of an id"
        )
    make = partial(decoded_file, format) if whole_rows else format.export_file
    return make(reader, table, with_state)


def ids_of_tables(reader: CheckpointReader) -> dict[str, tuple[str, ...]]:
    """Return what ids each table was trained on, see `rowhaul._id_kinds`; empty where it is not known.

    A checkpoint knows it of features; which table they read is in the schema of its run, and without one a
    table is taken for that of the feature of its name.
    """
    of_features = {name: kind for name, kind in kinds_in(reader.facts).items() if kind != UNRECORDED}
    features: dict[str, tuple[str, ...]] = {name: (name,) for name in reader.tables}
    if (settings := saved_settings(reader)) is not None:
        features |= settings[1].tables
    return {
        table: tuple(sorted({of_features[one] for one in features[table] if one in of_features}))
        for table in reader.tables
    }


def _write(
    reader: CheckpointReader, table: str, layout: ExportFile, kind: FileKind, path: Path, count: Counter
) -> str:
    """Write a table, read it back, and refuse it unless it is the same; returns its checksums."""
    written, found = Digest(layout), Digest(layout)
    kind.write(path, layout, count.over(written.over(layout.blocks(reader.blocks(table)))))
    for _ in count.over(found.over(kind.read(path, layout))):
        pass
    if (found.value, found.num_rows) != (written.value, layout.num_rows):
        raise CheckpointError(
            f"table {table!r} reads back from {path.name} otherwise than it is in {reader.path} "
            f"({found.num_rows:,} rows, {layout.num_rows:,} in the checkpoint); nothing was kept"
        )
    count.add(2 * (reader.tables[table].num_rows - layout.num_rows))  # rows that the format leaves out
    return found.value


def _write_tensors(reader: CheckpointReader, path: Path) -> dict[str, list[int]]:
    """Write the dense weights as one safetensors file, read it back, and return the shapes."""
    tensors = reader.tensors(_DENSE_GROUP)
    safetensors.torch.save_file(tensors, path)
    again: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    if again.keys() != tensors.keys() or not all(_same_bits(again[name], tensors[name]) for name in tensors):
        raise CheckpointError(
            f"{path.name} reads back otherwise than {_DENSE_GROUP!r} in {reader.path}; use another disk"
        )
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _describe(
    reader: CheckpointReader,
    folder: Path,
    format: str,
    tables: Sequence[ExportedTable],
    dense: dict[str, list[int]],
) -> None:
    """Write what is what, for programs and for people; and how the run was configured."""
    settings = saved_settings(reader)
    if settings is not None:
        settings[0].write(folder / CONFIG_FILE)
        settings[1].write(folder / SCHEMA_FILE)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "table_format": format,
        **{name: reader.facts.get(name) for name in _FACTS},
        "tables": [table.to_dict() for table in tables],
        "dense": {"file": DENSE_FILE, "shapes": dense} if dense else None,
        "settings": [CONFIG_FILE, SCHEMA_FILE] if settings is not None else [],
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / README_FILE).write_text(readme(manifest, tables), encoding="utf-8")


def chosen_tables(reader: CheckpointReader, tables: Sequence[str]) -> list[str]:
    """Return the named tables, or all if none is named; refuse unknown names."""
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
        while name.lower() in {other.lower() for other in names}:  # some file systems ignore case
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names
