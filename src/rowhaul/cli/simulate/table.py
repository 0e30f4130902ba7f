"""The simulator's numbers on a terminal: one wide table, or two if the terminal is narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowhaul.simulate.advice import advice, without_repeats
from rowhaul.simulate.results import Results
from rowhaul.simulate.table import Column, footnotes, is_comparison, label, moves_columns, time_columns


def print_results(results: Results, console: Console, with_assumptions: bool = False) -> None:
    """Print the settings, all numbers, notes, and one sentence of advice."""
    sentence = advice(results)
    results = replace(results, outcomes=without_repeats(results.outcomes, results.reference))
    console.print(settings_line(results.settings), style="dim", highlight=False, markup=False)
    console.print()
    moves, times = moves_columns(results), time_columns(results)
    whole = _table(results, [*moves, *times])
    unlimited = console.options.update(max_width=10_000)
    fits = console.measure(whole, options=unlimited).maximum <= console.width
    for table in [whole] if fits else [_table(results, moves), _table(results, times)]:
        console.print(table)
        console.print()
    if with_assumptions:
        console.print(
            "Assumptions: " + " ".join(results.assumptions), style="dim", highlight=False, markup=False
        )
        console.print()
    for line in footnotes(results):
        console.print(line, highlight=False, markup=False)
    console.print()
    console.print(sentence, style="bold", highlight=False, markup=False)


def settings_line(settings: Mapping[str, Any]) -> str:
    """Name what matters most for the numbers, in one line."""
    names = ("workers", "links", "batch_size", "dim", "cache", "compute", "dense_bytes", "sync")
    return ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in names if name in settings)


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
