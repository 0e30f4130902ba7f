"""Finds the data files, their order, and the schema that describes them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rowhaul.data.folder.writer import check_complete
from rowhaul.data.schema import SCHEMA_FILE, IdColumn, LabelColumn, Schema
from rowhaul.errors import ConfigError, DataError

Files = str | Path | Sequence[str | Path]


def expand_files(files: Files) -> tuple[Path, ...]:
    """The Parquet files that ``files`` names: paths, folders, globs, or a list of those.

    Items of a list keep their order; the files of one folder or glob come in natural order
    (``part-2`` before ``part-10``, ``part`` before ``part2``). A folder means the Parquet files directly
    in it. An unfinished data folder is refused.
    """
    items = [files] if isinstance(files, str | Path) else list(files)
    if not items:
        raise DataError("no data files were given; give a Parquet file, a folder or a glob")
    found = [path for item in items for path in _expand(item)]
    seen: set[Path] = set()
    for path in found:
        resolved = path.resolve()
        if resolved in seen:
            raise DataError(f"{path} is named more than once in the data files; name each file once")
        seen.add(resolved)
    for folder in {path.parent for path in found}:
        check_complete(folder)
    return tuple(found)


def find_schema(
    files: Files,
    schema_path: str | Path | None = None,
    features: Sequence[str] | None = None,
    label: str | None = None,
    *,
    require_label: bool = True,
) -> Schema:
    """The schema of ``files``: what is passed, else ``schema.yaml`` beside them or one folder up.

    ``schema_path`` names a schema file; ``features`` (id columns) and ``label`` describe data without
    one. Either takes precedence over files, and both together are refused, as is a label that the schema
    does not name. Without ``require_label``, the error about a missing schema does not ask for a label.
    """
    if schema_path is not None and features:
        raise ConfigError(
            f"--schema {schema_path} and --features {','.join(features)} both say what the columns are; "
            "leave out one"
        )
    if schema_path is not None:
        return with_label(Schema.read(schema_path), label, schema_path)
    if features:
        return Schema(
            label=LabelColumn(label) if label else None,
            dense=(),
            ids=tuple(IdColumn(name) for name in features),
        )
    by_path = schemas_beside(files)
    if not by_path:
        folder = min(path.parent for path in expand_files(files))
        columns = (
            "columns and the label (--features a,b --label y)"
            if require_label
            else "columns (--features a,b)"
        )
        raise DataError(
            f"no {SCHEMA_FILE} in {folder} or in the folder above it; write one, name one "
            f"(--schema), or name the id {columns}"
        )
    first, *others = by_path
    for other in others:
        if by_path[other].as_parquet() != by_path[first].as_parquet():
            raise DataError(
                f"the data files have different schemas: {first} and {other}; pass the path of the one to use"
            )
    return with_label(by_path[first], label, first)


def schemas_beside(files: Files) -> dict[Path, Schema]:
    """The schemas in the folders of some files, or one folder up, by their paths."""
    folders = sorted({path.parent for path in expand_files(files)})
    return {path: Schema.read(path) for path in map(schema_beside, folders) if path is not None}


def with_label(schema: Schema, label: str | None, source: object) -> Schema:
    """Return a schema, unless a label is asked for that it does not name; ``source`` is where it is from."""
    names = [one.name for one in schema.tasks]
    if label and names != [label]:
        raise ConfigError(
            f"--label {label} is for data without a schema, but {source} is one, and its label is "
            f"{', '.join(names) or 'none'}; change it there, or leave out --label"
        )
    return schema


def _expand(item: str | Path) -> list[Path]:
    path = Path(item).expanduser()
    check_complete(path)
    if path.is_dir():
        inside = [
            one for one in path.glob("*.parquet") if one.is_file() and not one.name.startswith((".", "_"))
        ]
        if not inside:
            raise DataError(
                f"the folder {path} holds no *.parquet file; name the folder the Parquet files are in"
            )
        return in_natural_order(inside)
    if path.exists():
        return [path]
    if not glob.has_magic(str(item)):
        raise DataError(f"no such file: {item}{_why_absent(path)} (working directory: {Path.cwd()})")
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    matched_files = in_natural_order(match for match in matches if match.is_file())
    if not matched_files:
        raise DataError(f"the glob {str(item)!r} matches no file (working directory: {Path.cwd()})")
    return matched_files


def _why_absent(path: Path) -> str:
    """Name a link that leads nowhere, or a file that is taken for a folder; the usual reason is a typo."""
    for one in (path, *path.parents):
        if one.is_symlink() and not one.exists():
            return f"; {one} is a link to {one.readlink()}, which is not there"
        if one.is_file():
            return f"; {one} is a file, not a folder"
    return ""


def in_natural_order(paths: Iterable[Path]) -> list[Path]:
    """Sort by `natural_order`, but ``clicks`` before ``clicks2``: a second file comes after the first.

    Only that changes. Other names keep their order, by which a run that resumes knows its files.
    """
    ordered = sorted(paths, key=natural_order)
    first: dict[tuple[Path, str, str], Path] = {}  # of the numbered files, by what is before the number
    for path in ordered:
        if (base := path.stem.rstrip("0123456789")) != path.stem and path.suffix:
            first.setdefault((path.parent, base, path.suffix), path)
    moved = {first[key]: path for path in ordered if (key := (path.parent, path.stem, path.suffix)) in first}
    early = set(moved.values())
    stay = [path for path in ordered if path not in early]
    return [one for path in stay for one in ((moved[path], path) if path in moved else (path,))]


def natural_order(path: Path) -> list[str | int]:
    """Return a sort key under which runs of digits compare as numbers."""
    parts = re.split(r"([0-9]+)", str(path))  # in turn text and digits
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def schema_beside(folder: Path) -> Path | None:
    """The schema file in a folder, or in the one above it."""
    for candidate in (folder, folder.resolve().parent):
        if (candidate / SCHEMA_FILE).is_file():
            return candidate / SCHEMA_FILE
    return None
