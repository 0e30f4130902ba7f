"""What commands print: lines of text, numbers as people read them, plain tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console, JustifyMethod
from rich.table import Table

from rowhaul._quantities import bytes_text as bytes_text

console = Console(emoji=False)  # esd:1:... is a name, not an emoji


def say(text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks of our own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def unwritten_output_lost(what_goes_on: str) -> Iterator[None]:
    """Go on where the console cannot be written: its pipe or terminal was closed, or its disk is full.

    By itself rich ends the program at a closed pipe, which would cost a run what it has not saved.
    """
    console.file = cast(IO[str], _LossyFile(console.file, what_goes_on))
    try:
        yield
    finally:
        console.file = cast(IO[str], None)  # whatever standard output is then


class _LossyFile:
    """A text file that drops what cannot be written, and says so once on standard error."""

    def __init__(self, file: IO[str], what_goes_on: str) -> None:
        self._file, self._what_goes_on, self._has_said = file, what_goes_on, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        """Pass on what was written, as far as that can be done."""
        try:
            self._file.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if not self._has_said:
            self._has_said = True
            with suppress(OSError):
                why = error.strerror or error
                print(f"the output cannot be written ({why}): {self._what_goes_on}", file=sys.stderr)


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
