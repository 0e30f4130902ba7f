"""Which columns of a text file hold integers, as its first rows say.

A column whose ids are all integers, written as numbers are (no leading zeros, no plus sign, 64 bits), is one
of integers, so that its keys are those of an int64 column in Parquet. Any other is text: 007 and 7 stay
different ids. Only the first rows of each file are looked at. The rest is read as guessed, and where it
contradicts, reading ends with an error: no key ever depends on how much was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rowhaul.data.formats.source import TextInput
from rowhaul.data.text.reader import BadLines, NotPlainError, read_text


def guess_integers(inputs: Sequence[TextInput]) -> set[str]:
    """The columns, of those to be read as plain integers, that look like that in all files."""
    wanted = {field.name for one in inputs for field in one.layout.fields if field.kind == "plain"}
    for one in inputs:
        while wanted:
            try:
                _read_first_rows(one, wanted)
                break
            except NotPlainError as error:
                wanted.discard(error.column)
    return wanted


def _read_first_rows(one: TextInput, wanted: set[str]) -> None:
    fields = tuple(
        field if field.name in wanted else replace(field, kind="skip", separator="")
        for field in one.layout.fields
    )
    rows = read_text(one.file, replace(one.layout, fields=fields), one.start, BadLines(skip=True))
    next(rows, None)
    rows.close()
