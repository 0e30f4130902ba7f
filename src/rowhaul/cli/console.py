"""What commands print: lines of text, numbers as people read them, plain tables."""

from __future__ import annotations

from rich.console import Console, JustifyMethod
from rich.table import Table

console = Console(emoji=False)  # esd:1:... is a name, not an emoji

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def say(text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks of our own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def bytes_text(count: float) -> str:
    """Format bytes in the largest unit that leaves a number of at least one."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} B" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def counted(count: int, one: str, several: str = "") -> str:
    """Format a count with its noun: ``1 file``, ``2 files``."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def plain_table(first: str, *others: str, justify: JustifyMethod = "right") -> Table:
    """A table without lines: a column of names, then columns of numbers or, on the left, of text."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify=justify)
    return table


def facts_table() -> Table:
    """A table without lines or header, for names and what they are."""
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
