"""One self-contained page about a run: words first, then plots, then tables. It needs no network."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from rowhaul import __version__
from rowhaul._page import drawn, page
from rowhaul.explain.findings import Findings
from rowhaul.report import plots, tables, timeline
from rowhaul.report.reading import RunRecord
from rowhaul.report.style import STYLE
from rowhaul.report.tables import marked
from rowhaul.report.words import missing, sentences, tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTS: tuple[tuple[str, Callable[[RunRecord], Figure | None]], ...] = (
    ("Where an iteration's time goes", plots.composition),
    ("Measured by the log", plots.measured_parts),
    ("Bytes over time", plots.bytes_over_time),
    ("Hit ratio", plots.hit_ratio),
    ("Shares", plots.shares),
    ("Loss", plots.loss),
    ("Metrics", plots.metrics),
    ("Speed", plots.speed),
)
_AVERAGE = "Numbers are of an average iteration."
_TABLES: tuple[tuple[str, str, Callable[[Findings], str], bool], ...] = (
    (
        "The five tables that cost most",
        f"{_AVERAGE} Seconds are what ranks waited for rows on each link, divided by the bytes on it; much "
        "of it lies beside training.",
        tables.costly_tables,
        False,
    ),
    ("What would help", "Estimates, that which saves most first.", tables.advice, False),
    (
        "Who waited for whom",
        "Mean time of each worker's training thread an iteration. Columns up to the rest add up to the "
        "iteration; those after it divide the wait for rows by the rank that sends them.",
        tables.waits,
        False,
    ),
    (
        "Links",
        f"{_AVERAGE} The dense sum carries dense gradients and those of hot rows; control is agreement on "
        "plans and everything that evaluations and checkpoints exchange. Local moves cross no link and are "
        "not counted.",
        tables.links_in_all,
        False,
    ),
    (
        "Why rows move",
        f"{_AVERAGE} A pull brings a row to the worker that trains it, a push takes it home; a split row "
        "was trained by several workers in one iteration.",
        tables.by_reason,
        False,
    ),
    ("By link, kind and reason", _AVERAGE, tables.by_link, True),
    ("By table, kind and reason", _AVERAGE, tables.by_table, True),
)


def render(run: RunRecord) -> str:
    """Return the page as HTML text."""
    title = f"Rowhaul: {run.folder.resolve().name}"
    said = "".join(f"<li>{marked(one)}</li>" for one in sentences(run))
    numbers = "".join(
        f"<div><b>{escape(one)}</b><span>{escape(name)}</span></div>" for one, name in tiles(run)
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="warning">{marked(one)}</p>' for one in missing(run)),
        f'<div class="words"><ul>{said}</ul></div>',
        f'<div class="tiles">{numbers}</div>',
        *_timeline(run),
        "<h2>Over time</h2>",
        f'<div class="plots">{"".join(_plots(run))}</div>',
    ]
    if run.findings is not None:
        for heading, note, make, folded in _TABLES:
            table = make(run.findings)
            shown = f"<details><summary>show the table</summary>{table}</details>" if folded else table
            body.append(f'<section><h2>{heading}</h2><p class="note">{marked(note)}</p>{shown}</section>')
    body += ["<details><summary>Settings</summary>", _settings(run.config), "</details>"]
    body.append(f"<footer><p>Written by rowhaul {escape(__version__)}.</p></footer>")
    return page(title, body, STYLE)


def _timeline(run: RunRecord) -> list[str]:
    if run.timeline is None:
        return []
    left_out = len(run.timeline["roles"]) - len(timeline.chosen_ranks(run.timeline))
    rest = f" Of the others, {left_out:,} ranks that wait less are left out." if left_out else ""
    note = (
        "What every thread of the ranks did; point at a bar for its name. Rows of the next iteration move "
        f"early, beside training.{rest} `rowhaul report --trace` writes this and the iterations before it "
        "for ui.perfetto.dev."
    )
    return [
        "<h2>One iteration</h2>",
        f'<p class="note">{marked(note)}</p>',
        f'<div class="scroll">{timeline.draw(run.timeline)}</div>',
    ]


def _plots(run: RunRecord) -> list[str]:
    figures = []
    for title, make in _PLOTS:
        if make is plots.measured_parts and run.intervals:
            continue  # the first plot says more
        if drawing := drawn(make, run):
            figures.append(f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>")
    return figures


def _settings(config: dict[str, Any]) -> str:
    lines = "".join(
        f'<tr><td class="text">{escape(name)}</td><td class="wrap">{escape(text)}</td></tr>'
        for name, text in _flat(config)
    )
    return f'<div class="scroll"><table>{lines}</table></div>'


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", str(value)))
    return found
