"""Which column of a delimited file is which: by the header line, or by their number without one."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rowhaul.data.columns import check_present
from rowhaul.data.formats.source import TextInput
from rowhaul.data.text.blocks import TextFile, first_line
from rowhaul.data.text.layout import Field, TextLayout
from rowhaul.data.text.reader import Place
from rowhaul.errors import DataError


def without_header(file: TextFile, layout: TextLayout) -> TextInput:
    """A file whose first line is a record already."""
    return TextInput(file, layout, Place(first_line(file).start, 1))


def with_header(
    file: TextFile,
    fields: Mapping[str, Field],
    names: Sequence[str] | None = None,
    *,
    delimiter: str = ",",
    missing: str = "",
    positive_from: float | None = None,
) -> TextInput:
    """A file whose first line, or ``names``, names its columns; those not in ``fields`` are skipped."""
    line = first_line(file)
    found = split_header(line.text, delimiter, file) if names is None else names
    if names is None and len(found) == 1 < len(fields):
        _check_delimiter(found[0], delimiter, file)
    for name in fields:
        check_present(name, found, file if names is None else "csv: `columns`")
    layout = TextLayout(
        fields=tuple(fields.get(name, Field(name, "skip")) for name in found),
        delimiter=delimiter,
        quoting=True,
        missing=missing,
        positive_from=positive_from,
    )
    return TextInput(file, layout, Place(line.next_start, 2) if names is None else Place(line.start, 1))


def _check_delimiter(only: str, delimiter: str, file: TextFile) -> None:
    """Refuse a header of one name that another delimiter would cut into several."""
    for other in (",", ";", "\t", "|"):
        if other != delimiter and other in only:
            raise DataError(
                f"{file}: its first line has no {delimiter!r} but has {other!r}; say so in the schema "
                f"(csv: {{delimiter: {json.dumps(other)}}})"
            )


def split_header(line: bytes, delimiter: str, file: TextFile) -> list[str]:
    """Cut a file's header line; spaces around a name do not belong to it."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{file}, line 1: the names of the columns are not valid {file.encoding}; name the encoding in "
            "the schema (csv: encoding: ...)"
        ) from None
    one = delimiter
    if len(delimiter) > 1:  # Python's reader takes one character: one of private use stands for it
        one = next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)
    reader = csv.reader([text.replace(delimiter, one), ""], delimiter=one)
    try:
        names = next(reader)
    except csv.Error as error:
        raise DataError(
            f"{file}: the first line does not name columns: {error}; is this the right file?"
        ) from None
    if reader.line_num > 1:
        raise DataError(
            f'{file}, line 1: a quote (") is opened and not closed; the names of the columns must be in the '
            "first line and have no line break in them"
        )
    return [name.replace(one, delimiter).strip() for name in names]


def one_path(inputs: Sequence[Path], name: str, what: str) -> Path:
    """The single input of a format that takes a folder or an archive."""
    if len(inputs) != 1:
        raise DataError(f"format {name} takes one input, {what}; got {len(inputs)}")
    if not inputs[0].exists():
        raise DataError(f"{inputs[0]}: no such file or folder (working directory: {Path.cwd()})")
    return inputs[0]
