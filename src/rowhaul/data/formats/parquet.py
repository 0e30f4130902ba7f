"""Any Parquet file that a schema describes: strings become keys, labels 0 or 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul._id_kinds import TEXT
from rowhaul.data.columns import (
    check_columns,
    decode_ids,
    dense_numbers,
    id_kind,
    is_list,
    label_numbers,
)
from rowhaul.data.folder.writer import Chunk
from rowhaul.data.formats.refused import bad_rows, refused_targets
from rowhaul.data.formats.source import Options, written_schema
from rowhaul.data.origins import TYPE_OF_KIND, Origins
from rowhaul.data.parquet import naming
from rowhaul.data.schema import IdColumn, Schema
from rowhaul.data.targets import known_labels
from rowhaul.data.text.layout import nullable
from rowhaul.data.text.reader import ROWS_AT_ONCE, BadLines
from rowhaul.errors import DataError


def open_parquet(inputs: Sequence[Path], options: Options) -> ParquetSource:
    """Parquet files with the columns of ``options.schema``; others are skipped."""
    schema = options.schema
    assert schema is not None  # the registry asks for it
    kinds: dict[str, tuple[str, Path]] = {}
    origins, is_text, in_lists = Origins(), set[str](), set[str]()
    for path in inputs:
        with naming(path), pq.ParquetFile(path) as file:
            found, num_rows = file.schema_arrow, file.metadata.num_rows
        if num_rows == 0:
            raise DataError(f"{path} holds no rows")
        check_columns(found, schema, bool(schema.tasks), path, kinds, origins.of(found, path))
        is_text |= {name for name in schema.stored_features if id_kind(found.field(name).type) == TEXT}
        in_lists |= {name for name in schema.stored_features if is_list(found.field(name).type)}
    types = {name: TYPE_OF_KIND[kind] for name, (kind, _) in kinds.items() if kind in TYPE_OF_KIND}
    for column in schema.stored_ids:
        _check_type(column, types, inputs[0])
    strings = tuple(name for name in schema.stored_features if name in is_text)
    return ParquetSource(tuple(inputs), schema, written_schema(schema, types), strings, frozenset(in_lists))


def _check_type(column: IdColumn, types: dict[str, str], path: Path) -> None:
    """Refuse a type that text would have been read as and this column is not; integers may be of hex ids."""
    found = types.get(column.name, column.type)
    if column.type == "hex" and found == "integer":
        types[column.name] = "hex"
    elif column.type not in ("auto", found):
        raise DataError(
            f"{path}: the schema says `type: {column.type}` of id column {column.name!r}, which holds "
            f"{found} ids, so its keys would not be those of a CSV file read with this schema; leave out "
            "`type`, or write the column with that type"
        )


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files read one after the other.

    ``in_lists`` are the features that have a list in any file: in all chunks they are lists.
    """

    files: tuple[Path, ...]
    described_by: Schema
    schema: Schema
    string_features: tuple[str, ...]
    in_lists: frozenset[str]

    @property
    def guessed_types(self) -> Mapping[str, str]:
        """See `Source`."""
        return {}

    def chunks(self, position: dict[str, Any] | None, bad_lines: BadLines, seed: int = 0) -> Iterator[Chunk]:
        """See `Source`."""
        at = position or {"file": 0, "row": 0}
        names = self.described_by.column_names()
        for number in range(at["file"], len(self.files)):
            path = self.files[number]
            skip = at["row"] if number == at["file"] else 0
            with naming(path), pq.ParquetFile(path, buffer_size=1 << 20) as file:
                row = 0
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                    row += batch.num_rows
                    fresh = batch.slice(max(0, batch.num_rows - max(0, row - skip)))
                    if fresh.num_rows:
                        decoded = self._decode(fresh, path, row - fresh.num_rows, bad_lines, seed)
                        share = (number + row / file.metadata.num_rows) / len(self.files)
                        yield Chunk(decoded, {"file": number, "row": row, **bad_lines.to_dict()}, share)

    def _decode(
        self, batch: pa.RecordBatch, path: Path, first_row: int, bad_lines: BadLines, seed: int
    ) -> pa.RecordBatch:
        schema = self.described_by
        arrays: dict[str, pa.Array] = {}
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        refused = refused_targets(columns, schema)
        if schema.label and schema.label.kind == "binary":
            labels, _ = label_numbers(batch[schema.label.name], schema.label)
            arrays[schema.label.name] = pa.array(labels.astype(np.int8))
        several = {label.name for label in schema.labels}
        for name in self._number_columns():
            column = columns[name]
            numbers, finite = dense_numbers(column)
            # Of several labels NaN says what null does: that one is missing.
            known = known_labels(column) if name in several else column.is_valid().to_numpy(False)
            arrays[name] = nullable(numbers, known)
            refused[name] = refused.get(name, False) | (known & ~finite)
        for feature in schema.stored_features:
            arrays[feature] = _keys(batch[feature], seed, feature in self.in_lists)
        decoded = pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
        bad = bad_rows(columns, refused, schema)
        if bad is None:
            return decoded
        for row in np.flatnonzero(bad.mask):
            bad_lines.add(str(path), first_row + int(row) + 1, bad.reason(int(row)))
        return decoded.filter(pa.array(~bad.mask))

    def _number_columns(self) -> list[str]:
        """Columns that are kept as they are: labels that may be missing, the weight, dense numbers."""
        schema = self.described_by
        labels = [one.name for one in schema.tasks if schema.labels or one.kind == "number"]
        weight = [schema.weight] if schema.weight else []
        return [*labels, *weight, *(one.name for one in schema.dense)]


def _keys(column: pa.Array, seed: int, in_lists: bool) -> pa.Array:
    ids = decode_ids(column, seed)
    if in_lists:
        offsets = ids.offsets if ids.offsets is not None else np.arange(len(column) + 1)
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids.values))
    if ids.offsets is None:
        return pa.array(ids.values)
    valid = np.diff(ids.offsets).astype(np.bool_)
    keys = np.zeros(len(column), np.int64)
    keys[valid] = ids.values
    return nullable(keys, valid)
