"""Numbers of bytes as people read them, and the plain tables that commands print."""

from __future__ import annotations

from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """``count`` bytes in the largest unit that leaves a number of at least one."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} B" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def counted(count: int, one: str, several: str = "") -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def plain_table(first: str, *others: str) -> Table:
    """A table without lines: a column of names, then columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
    return table
