"""Any CSV file that a schema describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rowhaul.data.formats.header import with_header
from rowhaul.data.formats.source import Options, TextInput, TextSource, written_schema
from rowhaul.data.schema import CsvLayout, Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import Field
from rowhaul.errors import DataError


def open_csv(inputs: Sequence[Path], options: Options) -> TextSource:
    """CSV files with the columns of ``options.schema``; others are skipped."""
    schema = options.schema
    assert schema is not None  # the registry asks for it
    fields = _fields(schema)
    return TextSource(
        tuple(_input(TextFile(path), schema, fields) for path in inputs),
        written_schema(schema),
        string_features=tuple(column.name for column in schema.ids if column.type == "string"),
    )


def _fields(schema: Schema) -> dict[str, Field]:
    fields = [Field(schema.label.name, "label")] if schema.label else []
    fields += [Field(column.name, "number") for column in schema.dense]
    fields += [Field(column.name, column.type, column.separator or "") for column in schema.ids]
    return {field.name: field for field in fields}


def _input(file: TextFile, schema: Schema, fields: dict[str, Field]) -> TextInput:
    csv = schema.csv or CsvLayout()
    positive_from = schema.label.positive_from if schema.label else None
    if not 1 <= len(csv.delimiter.encode()) <= 8 or '"' in csv.delimiter or "\n" in csv.delimiter:
        raise DataError(f"csv: the delimiter must be 1 to 8 bytes without quotes, got {csv.delimiter!r}")
    names = None if csv.header else csv.columns
    return with_header(file, fields, names, delimiter=csv.delimiter, positive_from=positive_from)
