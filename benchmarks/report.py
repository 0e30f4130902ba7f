"""What every benchmark prints around its numbers: the machine, the versions, a table."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from rowhaul import __version__

console = Console(width=140)


def print_machine(*packages: str) -> None:
    """One line on the machine, one on the versions."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0))
    console.print(f"{cpu}, {cores} cores, {platform.system()}, Python {platform.python_version()}")
    versions = [f"rowhaul {__version__}"]  # which may run from its source tree
    versions += [f"{name} {version(name)}" for name in ("torch", "numpy", "numba", *packages)]
    console.print(", ".join(versions))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table with right-aligned numbers."""
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:,.3g}" for cell in row))
    console.print(table)


def interleaved_medians(
    runs: dict[str, Callable[[int], None]], repeats: int, warmup: int = 3
) -> dict[str, float]:
    """Median seconds of each callable (given the repeat's number), taking turns so that noise is shared."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(warmup + repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run(repeat)
            if repeat >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}
