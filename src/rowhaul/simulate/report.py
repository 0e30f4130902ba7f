"""One self-contained page about a comparison: settings, numbers, plots, and what the numbers rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from rowhaul._page import drawn, page
from rowhaul.simulate import plots
from rowhaul.simulate.advice import advice, without_repeats
from rowhaul.simulate.results import Results
from rowhaul.simulate.table import footnotes, is_comparison, label, moves_columns, time_columns

_STYLE = """
th:first-child, td:first-child { text-align: left; }
.compared { color: var(--soft); } .compared td:first-child { padding-left: 1.8rem; }
.settings td:first-child { color: var(--soft); white-space: normal; }
.settings .wrap { min-width: 0; overflow-wrap: anywhere; }
"""

_PLOTS = (
    (
        "Cost by mechanism",
        plots.cost_by_mechanism,
        "Paler bars are the same mechanism with equal shares, on all workers or on the subset of them that "
        "is best for it.",
    ),
    (
        "What moves over which link",
        plots.composition,
        "Rows that an average worker of each link class moves in an iteration. Pulls are counted where they "
        "arrive, all else where it is sent.",
    ),
    (
        "Cost over time",
        plots.cost_over_time,
        "Total cost of each iteration, a running mean where there are many. Caches begin empty.",
    ),
    (
        "Time to decide",
        plots.decision_time,
        "Measured on the machine that ran the simulation, one core. A decision is made beside the iteration "
        "before, so it costs nothing while it stays left of the modelled iteration.",
    ),
)


def render(results: Results) -> str:
    """Return the page as HTML text."""
    sentence = advice(results)
    results = replace(results, outcomes=without_repeats(results.outcomes, results.reference))
    names = ", ".join(outcome.name for outcome in results.outcomes if not is_comparison(outcome))
    body = [
        "<h1>What scheduling costs on these links</h1>",
        f"<p><strong>{escape(sentence)}</strong></p>",
        "<details><summary>Settings</summary>",
        _settings(results.settings),
        "</details>",
        f'<div class="scroll">{_numbers(results)}</div>',
        *(f'<p class="note">{escape(line)}</p>' for line in footnotes(results)),
    ]
    for title, plot, explanation in _PLOTS:
        body += [f"<h2>{title}</h2>", f'<p class="note">{explanation}</p>', drawn(plot, results)]
    body += ["<footer><details><summary>What the model assumes</summary><ul>"]
    body += [f"<li>{escape(assumption)}</li>" for assumption in results.assumptions]
    return page(f"Rowhaul simulation: {names}", [*body, "</ul></details></footer>"], _STYLE)


def _numbers(results: Results) -> str:
    columns = [*moves_columns(results), *time_columns(results)]
    titles = "".join(f"<th>{'<br>'.join(map(escape, column.title))}</th>" for column in columns)
    rows = []
    for number, outcome in enumerate(results.outcomes):
        cells = "".join(f"<td>{escape(column.cells[number])}</td>" for column in columns)
        kind = ' class="compared"' if is_comparison(outcome) else ""
        rows.append(f"<tr{kind}><td>{escape(label(outcome))}</td>{cells}</tr>")
    return f"<table><thead><tr><th>mechanism</th>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _settings(settings: Mapping[str, Any]) -> str:
    rows = (
        f'<tr><td>{escape(name.replace("_", " "))}</td><td class="wrap">{escape(_shown(value))}</td></tr>'
        for name, value in settings.items()
        if value is not None
    )
    return f'<table class="settings">{"".join(rows)}</table>'


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
