"""What commands print: lines of text, numbers as people read them, plain tables."""

from __future__ import annotations

import shlex

from rich.console import Console, JustifyMethod
from rich.table import Table

from rowhaul._quantities import bytes_text as bytes_text

console = Console(emoji=False)  # esd:1:... is a name, not an emoji


def say(text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks of our own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def typed(what: object) -> str:
    """Format a path, pattern or address as one word of a shell's command, in quotes where it needs them."""
    return shlex.quote(str(what))


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
