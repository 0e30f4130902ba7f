"""The plots, in one look: grouped bars, stacked bars, lines; a grey band is what the paper states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Band = tuple[float, float]
# A mechanism has one colour in all plots; anything else takes the next of the cycle.
COLORS = {
    "HET": "tab:brown",
    "FAE": "tab:pink",
    "LAIA": "tab:blue",
    "Herald": "tab:blue",
    "ESD(1)": "tab:orange",
    "ESD(0.5)": "goldenrod",
    "ESD(0)": "khaki",
    "joint": "tab:red",
    "random": "tab:grey",
    "brute force": "black",
    "LAIA, fast 4 alone": "lightgrey",
}


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    ``series`` maps a name to one value per position; ``stated`` is the range that the paper's text gives.
    """

    title: str
    positions: Sequence[object]
    series: Mapping[str, Sequence[float]]
    xlabel: str = ""
    ylabel: str = ""
    stated: Band | None = None
    kind: Literal["bars", "lines", "log"] = "bars"  # log: lines over a logarithmic axis
    share: bool = False  # the values are shares of one: show the axis from 0 to 1


def save(path: Path, panels: Sequence[Panel], columns: int = 2) -> str:
    """Draw the panels side by side and return the file's name."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.8 * columns, 4.2 * rows), squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        _draw(place, panel)
    for empty in list(axes.flat)[len(panels) :]:
        empty.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return path.name


def save_compositions(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Stacked shares: panel, then bar, then part."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 4.2), squeeze=False, sharey=True)
    colors = plt.get_cmap("tab20c").colors  # families of four shades: one per class of links
    for place, (title, bars) in zip(axes.flat, panels.items(), strict=True):
        names = list(bars)
        bottom = np.zeros(len(names))
        for number, part in enumerate(next(iter(bars.values()))):
            heights = np.array([bars[name][part] for name in names])
            color = colors[4 * (number // 3) + number % 3]
            place.bar(names, heights, 0.7, bottom=bottom, color=color, label=part, edgecolor="white")
            bottom += heights
        place.set_title(title, fontsize=10)
        place.tick_params(axis="x", rotation=45, labelsize=8)
    axes[0, 0].set_ylabel("share of the moved rows")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.86, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return path.name


def _draw(axes: Axes, panel: Panel) -> None:
    where = np.arange(len(panel.positions))
    if panel.kind == "bars":
        width = 0.8 / len(panel.series)
        for number, (name, values) in enumerate(panel.series.items()):
            left = where + (number - (len(panel.series) - 1) / 2) * width
            axes.bar(left, values, width, label=name, color=COLORS.get(name))
        axes.axhline(0, color="black", linewidth=0.8)
    else:
        for name, values in panel.series.items():
            axes.plot(where, values, marker="o", markersize=4, label=name, color=COLORS.get(name))
    if panel.kind == "log":
        axes.set_yscale("log")
    if panel.stated:
        axes.axhspan(*panel.stated, color="grey", alpha=0.2, label="stated in the paper", zorder=0)
    axes.set_xticks(where, [str(position) for position in panel.positions])
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    axes.set_title(panel.title, fontsize=10)
    if panel.share:
        axes.set_ylim(0, 1.03)
    if len(panel.series) <= 12:
        axes.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    axes.grid(axis="y", alpha=0.3)
