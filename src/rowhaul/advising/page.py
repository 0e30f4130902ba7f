"""The page of `rowhaul plan --out`: advice, plots, a table and what they rest on; self-contained."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING

from rowhaul._page import COLOURS, GRID, drawn, page
from rowhaul.advising.predict import SPEEDS, Prediction
from rowhaul.advising.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = "th:nth-child(2), td:nth-child(2) { text-align: left; }"


def render(results: Results) -> str:
    """Return the page as HTML text."""
    links = ", ".join(dict.fromkeys(str(link) for link in results.machines.links))
    body = [
        f"<h1>{html.escape(results.headline)}</h1>",
        f"<p>{results.batch_size:,} samples a step over all machines; links of {html.escape(links)}.</p>",
        "<h2>Samples per second, by machines</h2>",
        drawn(_by_machines, results),
        "<h2>Samples per second, by the speed of the links</h2>",
        drawn(_by_speed, results),
        f'<h2>A step</h2><div class="scroll">{_table(results)}</div>',
        "<h2>What this rests on</h2><ul>",
        *(f"<li>{html.escape(note)}</li>" for note in results.notes),
        "</ul>",
    ]
    return page("Rowhaul: how many machines?", body, _STYLE)


def _table(results: Results) -> str:
    titles = (
        "machines", "how", "samples/s", "x one", "ms", "compute", "rows", "dense", "planning", "MB",
        "GiB each",
    )  # fmt: skip
    alone = results.predictions[0].seconds
    lines = []
    for one in results.predictions:
        parts = (one.seconds, one.compute, one.rows, one.dense, one.planning)
        cells = (
            str(one.machines),
            html.escape(one.name),
            f"{results.samples_per_second(one):,.0f}",
            f"{alone / one.seconds:.2f}",
            *(f"{part * 1e3:.1f}" for part in parts),
            f"{(one.row_bytes + one.dense_bytes) / 1e6:.2f}",
            f"{results.memory(one) / 2**30:.2f}",
        )
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"


def _by_machines(results: Results) -> Figure:
    alone = results.predictions[0]
    ways: defaultdict[str, list[Prediction]] = defaultdict(lambda: [alone])
    for one in results.predictions[1:]:
        ways[one.name].append(one)

    def draw(axis: Axes) -> None:
        for (name, points), colour in zip(ways.items(), cycle(COLOURS), strict=False):
            speeds = [results.samples_per_second(one) for one in points]
            axis.plot([one.machines for one in points], speeds, marker="o", color=colour, label=name)
        axis.set_xticks(sorted({one.machines for one in results.predictions}))

    return _figure(results, draw, "machines")


def _by_speed(results: Results) -> Figure:
    speeds_given = {link.bytes_per_second * 8 / 1e6 for link in results.machines.links}
    # Machines are taken from the front: of links that differ, each number has another slowest one.
    given = speeds_given.pop() if len(speeds_given) == 1 else 1.0
    across = "speed of the links, times that given" if speeds_given else "Mbit/s of the links"
    ways: defaultdict[int, list[tuple[float, ...]]] = defaultdict(list)
    for one in results.predictions:
        if one.machines > 1:
            ways[one.machines].append(one.at_speed)

    def draw(axis: Axes) -> None:
        for (machines, seconds), colour in zip(ways.items(), cycle(COLOURS), strict=False):
            # As the advice does: on links of other speeds another dispatcher may be the quickest.
            speeds = [results.batch_size / min(some) for some in zip(*seconds, strict=True)]
            name = f"{machines} machines, at their quickest"
            axis.plot([given * speed for speed in SPEEDS], speeds, color=colour, label=name)
        axis.axvline(given, color=GRID, linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:,g}")

    return _figure(results, draw, across)


def _figure(results: Results, draw: Callable[[Axes], None], across: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axis = figure.subplots()
    draw(axis)
    alone = results.samples_per_second(results.predictions[0])
    axis.axhline(alone, color="#777777", linestyle="--", label="one machine")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(across)
    axis.set_ylabel("samples/s")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure
