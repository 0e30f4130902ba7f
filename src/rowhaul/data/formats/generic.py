"""Any CSV file that a schema describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from rowhaul.data.formats.guessing import guess_integers
from rowhaul.data.formats.header import with_header
from rowhaul.data.formats.refused import bad_rows, refused_targets
from rowhaul.data.formats.source import BadRows, Options, TextInput, TextSource, written_schema
from rowhaul.data.schema import CsvLayout, Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import Field
from rowhaul.errors import DataError


def open_csv(inputs: Sequence[Path], options: Options) -> TextSource:
    """CSV files with the columns of ``options.schema``; others are skipped."""
    schema = options.schema
    assert schema is not None  # the registry asks for it
    opened = tuple(_input(path, schema, _fields(schema)) for path in inputs)
    integers = guess_integers(opened)
    guessed = {
        column.name: "integer" if column.name in integers else "string"
        for column in schema.stored_ids
        if column.type == "auto"
    }
    written = written_schema(schema, guessed)
    return TextSource(
        tuple(_with_types(one, guessed) for one in opened),
        written,
        make_derive=lambda seed: lambda columns: (columns, _refused(columns, written)),
        guessed_types=guessed,
    )


def _refused(columns: dict[str, pa.Array], schema: Schema) -> BadRows | None:
    return bad_rows(columns, refused_targets(columns, schema), schema)


def _fields(schema: Schema) -> dict[str, Field]:
    """The fields to read; a column whose type is open is one of plain integers, until it is known better."""
    is_binary = schema.label is not None and schema.label.kind == "binary"
    fields = [Field(column.name, "label" if is_binary else "number") for column in schema.tasks]
    fields += [Field(schema.weight, "number")] if schema.weight else []
    fields += [Field(column.name, "number") for column in schema.dense]
    for column in schema.stored_ids:
        kind = "plain" if column.type == "auto" else column.type
        fields.append(Field(column.name, kind, column.separator or ""))
    return {field.name: field for field in fields}


def _with_types(one: TextInput, guessed: Mapping[str, str]) -> TextInput:
    fields = tuple(
        replace(field, kind="string") if guessed.get(field.name) == "string" else field
        for field in one.layout.fields
    )
    return replace(one, layout=replace(one.layout, fields=fields))


def _input(path: Path, schema: Schema, fields: dict[str, Field]) -> TextInput:
    csv = schema.csv or CsvLayout()
    file = TextFile(path, encoding=csv.encoding)
    positive_from = schema.label.positive_from if schema.label else None
    if not 1 <= len(csv.delimiter.encode()) <= 8 or '"' in csv.delimiter or "\n" in csv.delimiter:
        raise DataError(f"csv: the delimiter must be 1 to 8 bytes without quotes, got {csv.delimiter!r}")
    names = None if csv.header else csv.columns
    return with_header(file, fields, names, delimiter=csv.delimiter, positive_from=positive_from)
