"""What is shown of samples that are set aside."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

SHOWN = 2000  # characters of a message
BRIEFLY = 60  # characters of a value


def as_text(given: bytes) -> str:
    """Return bytes as text, whatever they are."""
    return given.decode(errors="replace")


def short(value: Any) -> str:
    """Return the beginning of a value."""
    return repr(value)[:BRIEFLY]


def row_text(table: pa.Table, row: int) -> str:
    """Return a row for messages."""
    values = (
        f"{name!r}: {value_text(one[row])}"
        for name, one in zip(table.column_names, table.columns, strict=True)
    )
    return f"{{{', '.join(values)}}}"[:SHOWN]


def value_text(value: pa.Scalar) -> str:
    """Return a value for messages, which Python may not have: a time in the year 100,000, say."""
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        return f"a {value.type} that cannot be shown"
