"""The frontier: AUC against the share of all bytes, a panel a log, few lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from memory_study.contenders import OURS, TITLES
from memory_study.judging import Study
from pruning_methods.logs import SOURCES

# Families of one idea share a line: more of them could not be told apart.
LINES = {
    "smaller rows": (("uniform",), "#555555"),
    "hashing": (("hashing",), "#d95f02"),
    "mixed dimensions": (("mixed",), "#a6761d"),
    "AdaEmbed, FIITED": (("adaembed", "fiited", "fiited-2d"), "#1b9e77"),
    TITLES[OURS]: ((OURS,), "#7570b3"),
}
FINE = [0.02 * 1.05**step for step in range(81)]  # shares from 2 % to 99 %, and all
LOWEST = -4.0  # points; what loses more is of no use, and would flatten the rest
LEAST_RANGE = 1.0  # points that a panel shows at least: less would make much of chance
_COLUMNS = 3


def draw(studies: Sequence[Study], path: Path) -> Path:
    """Draw all logs and write the picture."""
    num_columns = min(_COLUMNS, len(studies))
    num_rows = -(-len(studies) // num_columns)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(5.2 * num_columns, 4.0 * num_rows), squeeze=False
    )
    places = list(grid.flat)
    for place, study in zip(places, studies, strict=False):
        _draw_log(place, study)
    # The names beside the panels where one is free, and in the first one otherwise.
    free, handles = places[len(studies) :], places[0].get_legend_handles_labels()
    for place in free:
        place.set_axis_off()
    where = {"loc": "center", "fontsize": 13} if free else {"loc": "lower right", "fontsize": 9}
    (free[0] if free else places[0]).legend(*handles, frameon=False, **where)
    figure.suptitle("AUC for all bytes from a raw key to its row (higher and further left is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_log(place: Axes, study: Study) -> None:
    changes_shown = [0.0]
    for name, (families, color) in LINES.items():
        cases = [case for family in families for case in study.cases(family)]
        is_ours = OURS in families
        # Of a contender, the best with at most as many bytes; of a budget, what it gives.
        points = study.points(cases) if is_ours else study.frontier(cases, [*FINE, 1.0])
        line = [(100 * share, 100 * change) for share, change in points]
        shown = [point for point in line if point[1] >= LOWEST]
        if not shown:
            continue
        shares, changes = zip(*shown, strict=True)
        further = [] if is_ours else [(100, changes[-1])]
        place.plot(
            *zip(*shown, *further, strict=True),
            markevery=range(len(shares)),
            color=color,
            label=name,
            marker="o",
            markersize=5 if is_ours else 3,
            linewidth=2.6 if is_ours else 1.4,
            zorder=3 if is_ours else 2,
        )
        changes_shown += changes
    place.axhline(0, color="black", linewidth=0.8)
    place.set_xscale("log")
    place.set_xlim(1.7, 110)
    low, high = min(*changes_shown, -LEAST_RANGE), max(changes_shown)
    room = 0.1 * max(high - low, 0.2)
    place.set_ylim(low - room, high + 2 * room)
    place.set_xticks([2, 5, 10, 25, 50, 100], ["2 %", "5 %", "10 %", "25 %", "50 %", "100 %"])
    place.minorticks_off()
    place.set_title(SOURCES[study.data].title)
    place.set_xlabel("share of the unpruned bytes")
    place.set_ylabel("AUC minus unpruned, points")
    place.grid(alpha=0.25)
