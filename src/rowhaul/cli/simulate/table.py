"""The simulator's numbers on a terminal: one wide table, or two if the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowhaul.simulate.results import Results
from rowhaul.simulate.table import Column, footnotes, is_comparison, label, moves_columns, time_columns


def print_results(results: Results, console: Console) -> None:
    """Print all results, then the assumptions behind them."""
    moves, times = moves_columns(results), time_columns(results)
    whole = _table(results, [*moves, *times])
    unlimited = console.options.update(max_width=10_000)
    fits = console.measure(whole, options=unlimited).maximum <= console.width
    for table in [whole] if fits else [_table(results, moves), _table(results, times)]:
        console.print(table)
        console.print()
    console.print("Assumptions: " + " ".join(results.assumptions), style="dim", highlight=False, markup=False)
    console.print()
    for line in footnotes(results):
        console.print(line, highlight=False, markup=False)


def _table(results: Results, columns: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("\nmechanism", no_wrap=True)
    for column in columns:
        table.add_column("\n".join(column.title), justify="right", no_wrap=True)
    for number, outcome in enumerate(results.outcomes):
        compared = is_comparison(outcome)
        table.add_row(
            Text("  " * compared + label(outcome)),
            *(column.cells[number] for column in columns),
            style="dim" if compared else None,
        )
    return table
