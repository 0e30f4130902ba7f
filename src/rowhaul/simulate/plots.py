"""The figures of a comparison, drawn by matplotlib without its global state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rowhaul._page import COLOURS, GRID
from rowhaul.schedule.plan import Kind
from rowhaul.simulate.results import Results
from rowhaul.simulate.table import KIND_TITLES, MEASURES, is_comparison, label, time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KIND_COLOURS = {
    Kind.MISS_PULL: "#0072b2",
    Kind.UPDATE_PUSH: "#e69f00",
    Kind.EVICT_PUSH: "#d55e00",
    Kind.PEER_SEND: "#009e73",
}
_BAR, _PALE_BAR = "#3b6ea5", "#b7cbe0"
_WIDTH = 10.0  # inches
_SMOOTHED_POINTS = 60  # what a line is averaged down to


def cost_by_mechanism(results: Results) -> Figure:
    """Bars of the three measures; comparisons are paler."""
    outcomes = results.outcomes
    figure, axes = _bars(results, len(MEASURES))
    scale, unit = time_scale(results)
    for axis, (title, measure) in zip(axes, MEASURES.items(), strict=True):
        values = [measure(outcome) * scale for outcome in outcomes]
        colours = [_PALE_BAR if is_comparison(outcome) else _BAR for outcome in outcomes]
        bars = axis.barh(range(len(outcomes)), values, color=colours, height=0.7)
        axis.bar_label(bars, fmt=lambda value: f"{value:.3g}", padding=3, fontsize=8)
        axis.set_xlim(0, max(values) * 1.2 or 1)
        per = "" if title == "iteration" else " per iteration"
        axis.set_title(f"{title}, {unit}{per}", fontsize=9)
    return figure


def composition(results: Results) -> Figure:
    """Rows moved by kind, for an average worker of each link class."""
    classes = results.links.classes()
    figure, axes = _bars(results, len(classes))
    used = [kind for kind in Kind if any(outcome.rows[kind].any() for outcome in results.outcomes)]
    for axis, (link, workers) in zip(axes, classes.items(), strict=True):
        left = np.zeros(len(results.outcomes))
        for kind in used:
            rows = np.array([outcome.rows[kind, list(workers)].mean() for outcome in results.outcomes])
            colour, title = _KIND_COLOURS[kind], KIND_TITLES[kind]
            axis.barh(range(len(rows)), rows, left=left, height=0.7, color=colour, label=title)
            left += rows
        axis.set_title(f"{len(workers)} workers at {link}: rows per worker and iteration", fontsize=9)
    most = max(axis.get_xlim()[1] for axis in axes)
    for axis in axes:
        axis.set_xlim(0, most)
    if used:
        handles, titles = axes[0].get_legend_handles_labels()
        figure.legend(handles, titles, loc="outside lower center", ncols=len(used), frameon=False)
    return figure


def cost_over_time(results: Results) -> Figure:
    """Total cost of each iteration as it went, smoothed a little; the warm-up is shaded."""
    scale, unit = time_scale(results)
    figure = _figure(3.6)
    axis = figure.subplots()
    shown = [outcome for outcome in results.outcomes if not is_comparison(outcome)]
    for number, outcome in enumerate(shown):
        series = outcome.cost_series * scale
        width = max(1, len(series) // _SMOOTHED_POINTS)
        smoothed = np.convolve(series, np.full(width, 1 / width), mode="valid")
        at = np.arange(len(smoothed)) + (width - 1) / 2
        colour = COLOURS[number % len(COLOURS)]
        style = "--" if number >= len(COLOURS) else "-"
        axis.plot(at, smoothed, style, color=colour, linewidth=1.4, label=outcome.name)
    warmup = len(shown[0].cost_series) - shown[0].iterations
    if warmup:
        axis.axvspan(0, warmup, color=GRID, label="warm-up", zorder=0)
    axis.set_xlabel("iteration")
    axis.set_ylabel(f"total cost, {unit}")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, len(shown[0].cost_series))
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def decision_time(results: Results) -> Figure:
    """How long a decision takes, from the median to the 99th percentile, and how long it may take."""
    figure, (axis,) = _bars(results, 1)
    for number, outcome in enumerate(results.outcomes):
        median, high = outcome.decision_ms
        axis.plot([median, high], [number, number], color=_BAR, linewidth=5, solid_capstyle="butt", zorder=2)
        axis.plot(median, number, "o", color=_BAR, zorder=3)
        if outcome.iteration_seconds:
            milliseconds = outcome.iteration_seconds * 1e3
            axis.plot(milliseconds, number, "|", color="#d55e00", markersize=16, mew=2.5, zorder=3)
    axis.set_xscale("log")
    axis.grid(axis="x", which="both", color=GRID)
    axis.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_title(
        "milliseconds: a decision's median (dot) to p99 (bar), and the modelled iteration (line)", fontsize=9
    )
    return figure


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _bars(results: Results, count: int) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side with a row for every outcome, the first at the top."""
    outcomes = results.outcomes
    figure = _figure(1.1 + 0.32 * len(outcomes))
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_axisbelow(True)
        axis.grid(axis="x", color=GRID)
    axes[0].set_yticks(range(len(outcomes)), [label(outcome) for outcome in outcomes])
    axes[0].set_ylim(len(outcomes) - 0.4, -0.6)
    return figure, axes
