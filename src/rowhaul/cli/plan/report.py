"""What `rowhaul plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowhaul.cli.console import bytes_text, console, plain_table, say

if TYPE_CHECKING:
    from rowhaul.advising.results import Results


def print_report(results: Results) -> None:
    """Print the advice first, then a table, then what it rests on."""
    say(f"{results.headline}\n")
    speeds = plain_table("machines", "how", "samples/s", "x one", "MB a step", "memory of each")
    times = plain_table("machines", "how", "ms a step", "compute", "rows", "dense", "planning")
    alone = results.predictions[0].seconds
    for one in results.predictions:
        memory = bytes_text(results.memory(one))
        speeds.add_row(
            str(one.machines),
            one.name,
            f"{results.samples_per_second(one):,.0f}",
            f"{alone / one.seconds:.2f}",
            f"{(one.row_bytes + one.dense_bytes) / 1e6:.2f}",
            memory if results.memory(one) <= results.available else f"{memory}: too much",
        )
        parts = (one.seconds, one.compute, one.rows, one.dense, one.planning)
        times.add_row(str(one.machines), one.name, *(f"{part * 1e3:.1f}" for part in parts))
    for table in (speeds, times):
        console.print(table, highlight=False)
        say("")
    for note in results.notes:
        say(f"- {note}")
