"""A trained model in files that other tools read: keys and vectors by table, dense weights, what is what.

::

    exported/
      export.json               every table and tensor with its file, rows, sizes and checksums
      README.md                 the same for people
      tables/user.parquet       key (int64), values (a list of `dim` numbers), if asked for: state;
                                of pruned rows the chunks that there are, see `exporting_pruned`
      dense.safetensors         dense weights by name
      config.yaml  schema.yaml  of the run, where there is one: what computes with them

Rows are streamed, so that memory does not depend on the size of a table. Every table is read back and
compared with the checkpoint, bit by bit, before the folder appears under its name. `ExportReader` reads it
again, and `load_trained` makes a model of it that serves; both are in `rowhaul.train`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rowhaul._files import sync, temporary_beside, whole
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.opening import run_of
from rowhaul.checkpoint.plain_files import BLOCK_ROWS, RowLayout, write_tensors
from rowhaul.checkpoint.shard import Block
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.formats import FORMATS
from rowhaul.export.manifest import (
    DENSE_FILE,
    FORMAT,
    MANIFEST_FILE,
    README_FILE,
    TABLES_FOLDER,
    VERSION,
    Digest,
    ExportedTable,
    PrunedPart,
    Rows,
)
from rowhaul.export.readme import readme
from rowhaul.pruning.export import (
    PRUNED_FORMATS,
    is_pruned_checkpoint,
    pruned_blocks,
    pruned_layout,
)
from rowhaul.train.run_folder import CONFIG_FILE

_DENSE_GROUP = "model"  # of a checkpoint: the dense weights
_FACTS = ("model", "step", "samples", "row_optimizer", "key_kinds")  # of a checkpoint, kept in the export

Progress = Callable[[int, int], None]
"""Called with how many rows are done, and of how many; each counts when written and when read back."""


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

    Of pruned tables only what there is is written, unless ``whole_rows`` asks for rows with zeros in them,
    which have no state.

    Raises:
        ConfigError: an unknown format or table, or a folder that is there already.
        CheckpointError: a damaged file, or one that reads back otherwise; nothing is kept.
    """
    path, chosen = Path(to), _chosen(reader, tables)
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; choose {', '.join(FORMATS)}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty; choose another folder for the export")
    is_pruned = is_pruned_checkpoint(reader)
    if whole_rows and with_state and is_pruned:
        raise ConfigError(
            "the state of pruned rows is that of their chunks: whole rows have none. Leave out one of the two"
        )
    ids = ids_of_tables(reader)
    told = _Told(2 * sum(reader.tables[name].num_rows for name in chosen), progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(path), ignore_errors=True)  # what a killed export left
    with whole(path) as folder:
        (folder / TABLES_FOLDER).mkdir(parents=True)
        made = []
        for name, stem in zip(chosen, _file_names(chosen), strict=True):
            file = f"{TABLES_FOLDER}/{stem}{FORMATS[format].suffix}"
            writing = _Writing(reader, name, folder, file, format, told)
            write = writing.pruned if is_pruned and not whole_rows else writing.whole
            made.append(write(ids[name], with_state))
        has_dense = _DENSE_GROUP in reader.groups
        dense = write_tensors(reader, _DENSE_GROUP, folder / DENSE_FILE) if has_dense else {}
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

    def over(self, blocks: Iterable[Rows]) -> Iterator[Rows]:
        for block in blocks:
            yield block
            self.add(len(block[0]))

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


class _Writing:
    """One table on its way into a file, from which it is read again."""

    def __init__(
        self, reader: CheckpointReader, table: str, folder: Path, file: str, format: str, told: _Told
    ) -> None:
        self._reader, self._table, self._folder, self._file = reader, table, folder, file
        self._format, self._told = format, told

    def whole(self, ids: tuple[str, ...], with_state: bool) -> ExportedTable:
        """Write whole rows."""
        entry, kind = self._reader.tables[self._table], FORMATS[self._format]
        layout = RowLayout(entry.num_rows, entry.dim, entry.state_width if with_state else 0, entry.dtype)
        written, found = Digest(layout), Digest(layout)
        path = self._folder / self._file
        kind.write(path, layout, self._told.over(written.over(_blocks(self._reader, self._table))))
        self._check(written, found, self._told.over(found.over(kind.read(path, layout))), layout.num_rows)
        return ExportedTable(
            self._table, self._file, **asdict(layout), ids=ids, bytes=path.stat().st_size, xxh3=found.value
        )

    def pruned(self, ids: tuple[str, ...], with_state: bool) -> ExportedTable:
        """Write the chunks that there are."""
        layout, left_out = pruned_layout(self._reader, self._table, with_state)
        kind, path = PRUNED_FORMATS[self._format], self._folder / self._file
        written, found = Digest(layout), Digest(layout)
        blocks = pruned_blocks(self._reader, self._table, layout)
        kind.write(path, layout, self._told.over(written.over(blocks)))
        self._check(written, found, self._told.over(found.over(kind.read(path, layout))), layout.num_rows)
        self._told.add(2 * left_out)
        return ExportedTable(
            name=self._table,
            file=self._file,
            num_rows=layout.num_rows,
            dim=layout.dim,
            state_width=sum(layout.state_widths),
            dtype=layout.dtype,
            ids=ids,
            bytes=path.stat().st_size,
            xxh3=found.value,
            pruned=PrunedPart(
                layout.starts,
                layout.columns,
                layout.state_widths,
                layout.num_values,
                layout.num_state,
                left_out,
            ),
        )

    def _check(self, written: Digest, found: Digest, blocks: Iterable[object], num_rows: int) -> None:
        """Read a file back, and refuse it if it is not what was written."""
        sync(self._folder / self._file)
        for _ in blocks:
            pass
        if (found.value, found.num_rows) != (written.value, num_rows):
            raise CheckpointError(
                f"table {self._table!r} reads back from {Path(self._file).name} otherwise than it is in "
                f"{self._reader.path} ({found.num_rows:,} rows, {num_rows:,} in the checkpoint); nothing was "
                "kept"
            )


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
        "format": FORMAT,
        "version": VERSION,
        "table_format": format,
        **{name: reader.facts.get(name) for name in _FACTS},
        "tables": [asdict(table) for table in tables],
        "dense": {"file": DENSE_FILE, "shapes": dense} if dense else None,
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
