"""Herald's figures about the data alone: rows of an iteration (3) and degrees of infrequency (6, 10)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from figures import plots
from figures.published import HERALD, HERALD_CACHE, HERALD_WORKERS
from figures.sections import Section, Table, percent, span, times
from figures.traces import Trace

BATCHES_PER_WORKER = (64, 96, 128, 160, 192, 224, 256)
CLUSTERS = (4, 8, 16, 32, 64)
MOST_BATCHES = 40  # of each size; their mean settles long before


def figure_3(traces: Sequence[Trace], out: Path) -> Section:
    """Distinct rows of an iteration against the batch size."""
    growth = {}
    for trace in traces:
        rows = [distinct_rows(trace, HERALD_WORKERS * per_worker) for per_worker in BATCHES_PER_WORKER]
        growth[trace.name] = [count / rows[0] for count in rows]
    panel = plots.Panel(
        "Herald, figure 3: distinct rows of an iteration",
        BATCHES_PER_WORKER,
        growth,
        "batch per worker",
        "relative to 64 a worker",
        kind="lines",
    )
    return Section(
        "herald-03",
        "Herald, figure 3: rows of an iteration",
        f"{HERALD_WORKERS} workers; mean of at most {MOST_BATCHES} batches, relative to 64 samples a worker.",
        [
            Table(
                ["batch per worker", *map(str, BATCHES_PER_WORKER)],
                [[name, *map(times, ratios)] for name, ratios in growth.items()],
            )
        ],
        [(HERALD["growth"], span([ratios[-1] for ratios in growth.values()], times))],
        plots=[plots.save(out / "herald-03.png", [panel])],
    )


def distinct_rows(trace: Trace, batch: int) -> float:
    """Mean number of distinct rows in a global batch."""
    starts = range(0, min(len(trace), MOST_BATCHES * batch) - batch + 1, batch)
    counts = [
        len(np.unique(keys[start : start + batch][has[start : start + batch]]))
        for keys, has in zip(trace.keys, trace.present, strict=True)
        for start in starts
    ]
    return sum(counts) / len(starts)


def figures_6_and_10(traces: Sequence[Trace], out: Path) -> Section:
    """Share of the cached rows that are rarer than the samples of one worker: overall and by table."""
    overall: dict[str, list[float]] = {}
    panels, extremes = [], []
    for trace in traces:
        per_table = cached_popularity(trace, HERALD_CACHE)
        every = np.concatenate(per_table)
        overall[trace.name] = [infrequency(every, len(trace), n) for n in CLUSTERS]
        lines = {
            name: [infrequency(counts, len(trace), n) for n in CLUSTERS]
            for name, counts in zip(trace.columns, per_table, strict=True)
            if len(counts)
        }
        high = sum(min(line) > 0.99 for line in lines.values())
        lowest = min(min(line) for line in lines.values())
        extremes.append([trace.name, str(len(lines)), str(high), percent(lowest)])
        panels.append(
            plots.Panel(
                f"Herald, figure 10: {trace.name}, a line a table",
                CLUSTERS,
                lines,
                "workers",
                "degree of infrequency",
                kind="lines",
                share=True,
            )
        )
    first = plots.Panel(
        "Herald, figure 6: all tables",
        CLUSTERS,
        overall,
        "workers",
        "degree of infrequency",
        (0.99, 1),
        "lines",
    )
    samples = ", ".join(f"{trace.name} {len(trace):,}" for trace in traces)
    return Section(
        "herald-06",
        "Herald, figures 6 and 10: degree of infrequency",
        f"The {percent(HERALD_CACHE, 0)} most popular rows of a log are taken as cached. Samples: {samples}.",
        [
            Table(
                ["workers", *map(str, CLUSTERS)],
                [[name, *(percent(share, 2) for share in line)] for name, line in overall.items()],
            ),
            Table(["by table", "tables with cached rows", "> 99 % at every size", "lowest"], extremes),
        ],
        [
            (
                HERALD["infrequency"],
                span([share for line in overall.values() for share in line], lambda share: percent(share, 2)),
            ),
            (
                HERALD["infrequency tables"],
                "; ".join(f"{row[0]} {row[2]} of {row[1]}, lowest {row[3]}" for row in extremes),
            ),
        ],
        plots=[
            plots.save(out / "herald-06.png", [first]),
            plots.save(out / "herald-10.png", panels),
        ],
    )


def cached_popularity(trace: Trace, share: float) -> list[npt.NDArray[np.int64]]:
    """How often each cached row appears, by table, if the most popular rows of all tables are cached."""
    counts = [
        np.unique(keys[has], return_counts=True)[1]
        for keys, has in zip(trace.keys, trace.present, strict=True)
    ]
    together = np.concatenate(counts)
    table = np.repeat(np.arange(len(counts)), [len(one) for one in counts])
    cached = np.argsort(-together, kind="stable")[: int(share * len(together))]
    return [together[cached[table[cached] == number]] for number in range(len(counts))]


def infrequency(popularity: npt.NDArray[np.int64], samples: int, workers: int) -> float:
    return float(np.mean(popularity < samples / workers))
