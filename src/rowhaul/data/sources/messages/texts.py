"""Messages with a field for each column, as text, read as text files are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowhaul._id_kinds import TEXT
from rowhaul.data.schema import IdColumn
from rowhaul.data.sources.messages.showing import as_text, short

# A plain integer is written in the only way that an int64 is printed.
_PLAIN = re.compile("0|-?[1-9][0-9]{0,18}")
_WHOLE = re.compile("[-+]?[0-9]+")
_HEX = re.compile("[0-9a-fA-F]{1,16}")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Texts:
    """A message with a field for each column, as text."""

    fields: Mapping[bytes, bytes]

    def __str__(self) -> str:
        texts = {as_text(name): as_text(value) for name, value in self.fields.items()}
        return repr(texts)


def values_of(
    texts: Texts, columns: Sequence[str], ids: Mapping[str, IdColumn], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Fields of text as values; what is no number stays text, which is then refused.

    Args:
        texts: of a message.
        columns: that are needed.
        ids: those of ids.
        kinds: of the ids known before, by feature.

    Raises:
        ValueError: a field that is needed is not UTF-8.
    """
    found: dict[str, Any] = dict.fromkeys(map(as_text, texts.fields))
    for name in columns:
        given = texts.fields.get(name.encode())
        if given is None:
            continue
        try:
            text = given.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"field {name!r} is {short(given)}, which is not UTF-8 ({error})") from None
        if name in ids:
            found[name] = _ids_of_text(ids[name], text, kinds.get(name))
        else:
            text = text.strip(" ")
            found[name] = float(text) if _NUMBER.fullmatch(text) else text or None
    return found


def _ids_of_text(column: IdColumn, text: str, kind: str | None) -> Any:
    """Return the ids of a field, read as in a text file.

    Integers or strings, where nothing says so: as the first id of the feature is.
    """
    texts = _id_texts(column, text if kind == TEXT else text.strip(" "))
    if kind is None and texts and isinstance(_as_id(texts[0], "auto"), str):
        kind, texts = TEXT, _id_texts(column, text)
    ids = [_as_id(one, "string" if kind == TEXT else column.type) for one in texts]
    return ids if column.separator else ids[0] if ids else None


def _id_texts(column: IdColumn, text: str) -> list[str]:
    """Split a field into its ids."""
    return [one for one in (text.split(column.separator) if column.separator else [text]) if one]


def _as_id(text: str, type: str) -> int | str:
    """Return an id of a type, as in a schema; what is none stays text, which is then refused."""
    if type == "hex":
        number = int(text, 16) if _HEX.fullmatch(text) else None
        return text if number is None else number - (number >> 63 << 64)
    if type == "string" or not (_WHOLE if type == "integer" else _PLAIN).fullmatch(text):
        return text
    try:
        number = int(text)
    except ValueError:  # thousands of digits
        return text
    return number if -(1 << 63) <= number < 1 << 63 else text
