"""The plots, after FIITED's figures 8, 10 and 13 to 15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pruning_methods.logs import SOURCES
from pruning_methods.methods import (
    ADAEMBED,
    FIITED,
    GROWING,
    LINEAR,
    METHODS,
    MIXED,
    TWO_DIMENSIONS,
    UNPRUNED,
)
from pruning_methods.runs import Result
from pruning_methods.tables import Estimate, Line, differences, pairs_with_adaembed

# A method has one colour and one mark in all plots.
STYLES = {
    ADAEMBED: ("tab:blue", "s"),
    FIITED: ("tab:red", "o"),
    LINEAR: ("tab:orange", "v"),
    TWO_DIMENSIONS: ("tab:purple", "D"),
    MIXED: ("tab:green", "^"),
    GROWING: ("tab:brown", "P"),
}
_TIMES = (1, 2, 4, 8, 16, 50, 100, 200, 1000)
CHUNK_COLORS = {1: "tab:blue", 2: "tab:green", 4: "tab:red", 8: "tab:purple"}


def draw_quality(lines: dict[str, Sequence[Line]], path: Path, by_bytes: bool) -> str:
    """AUC against the share that is left (figure 8), or against all bytes held; a panel for each data set."""
    figure, axes = _panels(len(lines))
    for place, (data, of_data) in zip(axes, lines.items(), strict=True):
        plain = next(line for line in of_data if line.case.method == UNPRUNED)
        auc = plain.mean(lambda one: one.auc).mean
        place.axhline(auc, color="black", linewidth=1, label="unpruned")
        place.axhline(auc - 0.001, color="grey", linewidth=0.8, linestyle=":", label="0.1 % less")
        for position, method in enumerate(METHODS[1:]):
            some = [line for line in of_data if line.case.method == method]
            if not some:
                continue
            left = [line.held_reduction if by_bytes else line.value_reduction for line in some]
            color, mark = STYLES[method]
            # Intervals are of the change from unpruned: what differs between logs is no part of them.
            changes = [line.change(lambda one: one.auc) for line in some]
            order = np.argsort(left)
            beside = 1.03 ** (position - 2.5)  # a little to the side, so that intervals can be told apart
            place.errorbar(
                np.array(left)[order] * beside,
                np.array([auc + change.mean for change in changes])[order],
                yerr=np.array([change.half for change in changes])[order],
                color=color,
                marker=mark,
                markersize=5,
                linewidth=1.2,
                elinewidth=0.7,
                capsize=2,
                label=method,
            )
        place.set_xscale("log")
        low, high = place.get_xlim()
        ticks = [tick for tick in _TIMES if low <= tick <= high]
        place.set_xticks(ticks, [f"{tick}x" for tick in ticks])
        place.minorticks_off()
        place.set_title(SOURCES[data].title)
        place.set_xlabel("fewer bytes in all" if by_bytes else "fewer bytes of values")
        place.set_ylabel("AUC")
        place.grid(alpha=0.3, which="both")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return _save(figure, path)


def draw_against(lines: dict[str, Sequence[Line]], path: Path) -> str:
    """AUC minus AdaEmbed's at the same ratio, seed by seed: the mean, its interval and every seed."""
    figure, axes = _panels(len(lines))
    for place, (data, of_data) in zip(axes, lines.items(), strict=True):
        ratios = sorted({line.case.ratio for line in of_data if line.case.method == ADAEMBED})
        for position, method in enumerate((FIITED, TWO_DIMENSIONS)):
            color, mark = STYLES[method]
            for ours, theirs in pairs_with_adaembed(of_data, method):
                of_seeds = differences(ours.results, theirs.results, lambda one: one.auc)
                estimate = Estimate.of(of_seeds)
                at = ratios.index(ours.case.ratio) + 0.3 * position - 0.15
                place.errorbar(
                    at,
                    100 * estimate.mean,
                    yerr=100 * estimate.half,
                    color=color,
                    marker=mark,
                    capsize=3,
                    label=method if ours.case.ratio == ratios[0] else None,
                )
                points = 100 * np.array(of_seeds)
                place.scatter(np.full(len(points), at + 0.1), points, color=color, s=5, alpha=0.5)
        place.axhline(0, color="black", linewidth=1)
        place.set_xticks(np.arange(len(ratios)), [f"{100 * ratio:g} %" for ratio in ratios], fontsize=8)
        place.set_title(SOURCES[data].title)
        place.set_xlabel("pruned")
        place.set_ylabel("AUC minus AdaEmbed's, in points")
        place.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def draw_times(lines: Sequence[Line], path: Path) -> str:
    """CPU time of an iteration and of scoring, relative to unpruned (figure 10)."""
    figure, axes = _panels(1)
    names = [line.name for line in lines]
    kinds: dict[str, Callable[[Result], float]] = {
        "training": lambda one: one.train_seconds,
        "scoring": lambda one: one.score_seconds,
    }
    for position, (kind, of) in enumerate(kinds.items()):
        shares = [line.mean(of).mean / line.mean_of_unpruned(of) for line in lines]
        axes[0].bar(np.arange(len(names)) + 0.4 * position - 0.2, shares, 0.38, label=kind)
    axes[0].axhline(1, color="black", linewidth=1)
    axes[0].set_xticks(np.arange(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes[0].set_ylabel("CPU time, unpruned = 1")
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def draw_moves(lines: Sequence[Line], path: Path) -> str:
    """Chunks read, evicted and allocated, and the memory of them (figures 13 to 15), by chunks of a row."""
    figure, grid = plt.subplots(3, 2, figsize=(9.6, 9.6), squeeze=False)
    kinds: dict[str, Callable[[Result], float]] = {
        "read (per id)": lambda one: one.chunks_read / max(1, one.ids_read),
        "evicted (per row)": lambda one: one.evicted / one.num_rows,
        "allocated (per row)": lambda one: one.allocated / one.num_rows,
    }
    ratios = sorted({line.case.ratio for line in lines})
    for row, (kind, of) in enumerate(kinds.items()):
        for column, of_memory in enumerate((False, True)):
            place = grid[row][column]
            for position, chunks in enumerate(CHUNK_COLORS):
                some = {line.case.ratio: line for line in lines if line.case.chunks == chunks}
                heights = [
                    some[ratio].mean(of).mean / (chunks if of_memory else 1) if ratio in some else 0
                    for ratio in ratios
                ]
                place.bar(
                    np.arange(len(ratios)) + 0.2 * position - 0.3,
                    heights,
                    0.19,
                    color=CHUNK_COLORS[chunks],
                    label=f"K = {chunks}",
                )
            place.set_xticks(np.arange(len(ratios)), [f"{ratio:.0%}" for ratio in ratios])
            place.set_title(f"{'memory' if of_memory else 'chunks'} {kind}", fontsize=10)
            place.set_xlabel("pruned")
            place.grid(alpha=0.3, axis="y")
    grid[0][0].legend(fontsize=8)
    return _save(figure, path)


def _panels(count: int) -> tuple[plt.Figure, list[Axes]]:
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.9 * columns, 3.8 * rows), squeeze=False)
    for empty in list(axes.flat)[count:]:
        empty.remove()
    return figure, list(axes.flat)[:count]


def _save(figure: plt.Figure, path: Path) -> str:
    figure.tight_layout()
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)
    return str(path)
