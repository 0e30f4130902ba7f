"""The page of `rowhaul plan --out`: advice, plots, a table and what they rest on; self-contained."""

from __future__ import annotations

import html
from collections import defaultdict
from typing import TYPE_CHECKING

from rowhaul.advising.predict import SPEEDS, Prediction
from rowhaul.advising.results import Results
from rowhaul.simulate.plots import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1b; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; white-space: nowrap; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { max-width: 100%; height: auto; background: #fff; }
li { margin: .3rem 0; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616; }
  th, td { border-color: #444; } }
"""


def page(results: Results) -> str:
    """The page as HTML."""
    advice = html.escape(results.advice.text[0].upper() + results.advice.text[1:] + ".")
    links = ", ".join(dict.fromkeys(str(link) for link in results.machines.links))
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in results.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rowhaul: how many machines?</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{advice}</h1>
<p>{results.batch_size:,} samples a step over all machines; links of {html.escape(links)}.</p>
<h2>Samples per second, by machines</h2>
{_by_machines(results)}
<h2>Samples per second, by the speed of the links</h2>
{_by_speed(results)}
<h2>A step</h2>
{_table(results)}
<h2>What this rests on</h2>
<ul>
{notes}
</ul>
</body>
</html>
"""


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


def _by_machines(results: Results) -> str:
    figure, axis = _figure()
    alone = results.predictions[0]
    ways: defaultdict[str, list[Prediction]] = defaultdict(lambda: [alone])
    for one in results.predictions[1:]:
        ways[one.name].append(one)
    for (name, points), colour in zip(ways.items(), _COLOURS, strict=False):
        speeds = [results.samples_per_second(one) for one in points]
        axis.plot([one.machines for one in points], speeds, marker="o", color=colour, label=name)
    axis.axhline(results.samples_per_second(alone), color="#777", linestyle="--", label="one machine")
    axis.set_xticks(sorted({one.machines for one in results.predictions}))
    axis.set_xlabel("machines")
    axis.set_ylabel("samples/s")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return svg(figure)


def _by_speed(results: Results) -> str:
    figure, axis = _figure()
    slowest = min(link.bytes_per_second for link in results.machines.links) * 8 / 1e6
    alone = results.predictions[0]
    best: dict[int, Prediction] = {}
    for one in results.predictions[1:]:
        if one.machines not in best or one.seconds < best[one.machines].seconds:
            best[one.machines] = one
    for one, colour in zip(best.values(), _COLOURS, strict=False):
        speeds = [results.batch_size / seconds for seconds in one.at_speed]
        axis.plot([slowest * speed for speed in SPEEDS], speeds, color=colour,
                  label=f"{one.machines} machines, {one.name}")  # fmt: skip
    axis.axhline(results.samples_per_second(alone), color="#777", linestyle="--", label="one machine")
    axis.axvline(slowest, color="#bbb", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlabel("Mbit/s of the slowest link")
    axis.set_ylabel("samples/s")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return svg(figure)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.add_subplot()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure, axis
