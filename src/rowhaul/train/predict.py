"""Scores of a trained model as a Parquet or CSV file, streamed and visible only when complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from rowhaul._files import whole
from rowhaul.checkpoint import Place
from rowhaul.data.columns import check_present
from rowhaul.data.files import expand_files
from rowhaul.data.keys import plain_type
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn.key_counts import KeyCounts
from rowhaul.train.absent_columns import FilledStream, absent_columns
from rowhaul.train.loading import load_trained
from rowhaul.train.trainer import Progress

SCORE = "score"
_WRITERS = {".parquet": pq.ParquetWriter, ".csv": pa_csv.CSVWriter}


def predict_file(
    run: str | Place,
    data: Any,
    out: str | Path,
    *,
    keep: Sequence[str] = (),
    batch_size: int = 8192,
    on_unknown: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
    keys: KeyCounts | None = None,
    fill_absent: bool = False,
) -> int:
    """Write one click probability per sample of ``data``, in order; returns how many.

    Of several labels each has a column, called ``score_`` and its name; a number is itself.

    ``out`` is a Parquet or a CSV file, by its suffix. ``keep`` names columns of the data to copy beside the
    scores; ``keys`` counts ids never trained. ``fill_absent`` reads columns that the data lacks as missing.
    """
    out = Path(out)
    _check_file(out, data, overwrite)
    if twice := sorted({name for name in keep if list(keep).count(name) > 1}):
        raise ConfigError(f"--keep names {', '.join(twice)} more than once; name each column once")
    trainer = load_trained(run, on_unknown)
    stream = _open(data, trainer.schema, batch_size, fill_absent)
    names = score_names(trainer.schema)
    for name in names:
        if name in keep:
            raise ConfigError(f"a column called {name!r} cannot be kept: that is the name of the scores")
    kept = _Columns(stream.files, list(keep))
    if out.suffix == ".csv":
        _check_flat(kept.schema)
    schema = kept.schema
    for name in names:
        schema = schema.append(pa.field(name, pa.float32(), nullable=False))
    done = 0
    with whole(out) as temporary, _WRITERS[out.suffix](temporary, schema) as writer:
        for _, logits in trainer.score(stream, progress, keys):
            scores = [pa.array(one) for one in task_scores(trainer.schema, logits)]
            columns = kept.take(len(scores[0])).columns if keep else []
            rows = pa.table([*columns, *scores], schema=schema)
            try:
                writer.write_table(rows)
            except pa.ArrowException:
                if out.suffix == ".csv":
                    _check_writable(rows)
                raise
            done += len(scores[0])
    return done


def score_names(schema: Schema) -> list[str]:
    """The names of the columns of scores: one, or one for each of several labels."""
    return [f"{SCORE}_{column.name}" for column in schema.labels] or [SCORE]


def task_scores(schema: Schema, logits: Tensor) -> list[npt.NDArray[np.float32]]:
    """Scores of each label, from logits: probabilities, or the numbers themselves."""
    by_task = logits.reshape(len(logits), -1).unbind(1)
    kinds = [column.kind for column in schema.tasks] or ["binary"]
    scores = [
        one if kind == "number" else torch.sigmoid(one) for one, kind in zip(by_task, kinds, strict=True)
    ]
    return [one.to("cpu", torch.float32).numpy() for one in scores]


def _open(data: Any, schema: Schema, batch_size: int, fill_absent: bool) -> SampleStream:
    if fill_absent:
        return FilledStream(data, schema, batch_size)
    try:
        return SampleStream(data, schema, batch_size, require_label=False)
    except DataError as error:
        if not absent_columns(data, schema):
            raise
        raise DataError(f"{error}; --fill-absent reads absent columns as missing") from None


def _check_flat(kept: pa.Schema) -> None:
    for field in kept:
        if pa.types.is_nested(field.type):
            raise ConfigError(
                f"column {field.name!r} is of type {field.type}, which a CSV file cannot hold; keep other "
                "columns, or write the scores to a .parquet file"
            )


def _check_writable(rows: pa.Table) -> None:
    """Refuse the column that Arrow cannot write as CSV; its own error names none."""
    for field in rows.schema:
        try:
            pa_csv.write_csv(rows.select([field.name]), pa.BufferOutputStream())
        except pa.ArrowException as error:
            raise DataError(
                f"column {field.name!r} is of type {field.type} and has values that a CSV file cannot hold "
                f"({error}); keep other columns, or write the scores to a .parquet file"
            ) from None


def _check_file(out: Path, data: Any, overwrite: bool) -> None:
    if out.suffix not in _WRITERS:
        raise ConfigError(f"scores are written to {' or '.join(_WRITERS)} files; got {out}")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name a file for the scores")
    if out.exists() and any(path.samefile(out) for path in expand_files(data)):
        raise DataError(f"{out} is one of the data files, which scores would replace; choose another file")
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists; choose another file, or replace it (--overwrite)")
    if out.parent.exists() and not out.parent.is_dir():
        raise DataError(f"{out.parent} is a file, not a folder to write {out.name} to; choose another")
    if not out.parent.is_dir():
        raise DataError(f"there is no folder {out.parent} to write {out.name} to; make it, or choose another")
    if not os.access(out.parent, os.W_OK):
        raise DataError(f"no files can be written to {out.parent} by this user; choose another folder")


class _Columns:
    """Some columns of some Parquet files, taken a few rows at a time in the order of the files."""

    def __init__(self, files: Sequence[Path], names: list[str]) -> None:
        self._files, self._names = files, names
        fields: dict[str, pa.Field] = {}
        for path in files if names else ():
            found = pq.read_schema(path)
            for name in names:
                check_present(name, found.names, path)
                field = found.field(name)
                fields[name] = _wider(fields.get(name), field.with_type(plain_type(field.type)))
        self.schema = pa.schema([fields[name] for name in names])
        self._batches = self._read()
        self._rows = self.schema.empty_table()

    def take(self, num_rows: int) -> pa.Table:
        """The next rows."""
        while self._rows.num_rows < num_rows:
            self._rows = pa.concat_tables([self._rows, next(self._batches)])
        taken, self._rows = self._rows.slice(0, num_rows), self._rows.slice(num_rows)
        return taken

    def _read(self) -> Iterator[pa.Table]:
        for path in self._files:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=self._names):
                    yield self._in_one_type(pa.Table.from_batches([batch]), path)

    def _in_one_type(self, rows: pa.Table, path: Path) -> pa.Table:
        rows = rows.select(self._names)
        try:
            return rows.cast(self.schema)
        except (pa.ArrowException, ValueError) as error:
            types = [
                f"{here.name!r} is {here.type}, not {wanted.type}"
                for here, wanted in zip(rows.schema, self.schema, strict=True)
                if here.type != wanted.type
            ]
            raise DataError(
                f"{path}: its columns to keep differ from those of other files ({'; '.join(types)}: "
                f"{error}); write them with one type, or keep others"
            ) from None


def _wider(first: pa.Field | None, second: pa.Field) -> pa.Field:
    """A field for both where Arrow knows one, else the first: what cannot be cast to it is refused."""
    if first is None or first.equals(second):
        return second
    try:
        return pa.unify_schemas(
            [pa.schema([first]), pa.schema([second])], promote_options="permissive"
        ).field(0)
    except pa.ArrowException:
        return first
