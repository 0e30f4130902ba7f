"""Draws the two pictures of docs/what-moves-and-why.md: ``python docs/pictures/what_moves.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent
INK, QUIET = "#22303c", "#5b6b78"
BLUE, GREEN, AMBER, RED, GREY = "#cfe3f7", "#d3ecd5", "#fbe6b9", "#f6d0cc", "#e8ecef"


def box(axes: Axes, left: float, bottom: float, width: float, height: float, text: str, colour: str) -> None:
    """A rounded box with words in it."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, boxstyle=style, fc=colour, ec=INK, lw=1.0, zorder=2)
    )
    axes.text(
        left + width / 2,
        bottom + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=9.5,
        color=INK,
        zorder=3,
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str,
    at: tuple[float, float],
    bend: float = 0.0,
    align: str = "center",
) -> None:
    """An arrow, and what it means beside it."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=style,
            arrowstyle="-|>",
            mutation_scale=13,
            color=INK,
            lw=1.2,
            zorder=1,
        )
    )
    axes.text(*at, text, ha=align, va="center", fontsize=9, color=QUIET, linespacing=1.25)


def canvas(width: float, height: float) -> Axes:
    """Axes in inches, with nothing on them."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return axes


def draw_states() -> None:
    """Where the latest version of a row is, and what changes that."""
    axes = canvas(10.6, 6.3)
    box(axes, 0.2, 3.0, 2.0, 1.0, "FRESH\nnever trained:\nanyone can make it", GREY)
    box(
        axes,
        3.9,
        4.7,
        2.6,
        1.0,
        "OWNED by worker w\nw trained it last, alone;\nlatest is in w's cache",
        GREEN,
    )
    box(
        axes, 3.9, 1.3, 2.6, 1.0, "SPLIT\nseveral trained it at once;\neach has a part of the gradient", AMBER
    )
    box(axes, 8.4, 3.0, 2.0, 1.0, "HOME\nlatest is\nat its store", BLUE)

    arrow(axes, (1.6, 4.05), (3.85, 5.2), "one worker trains it:\nnothing moves", (2.45, 5.0), align="right")
    arrow(axes, (1.6, 2.95), (3.85, 1.8), "several train it:\nnothing moves", (2.45, 2.0), align="right")
    arrow(
        axes, (4.6, 4.65), (4.6, 2.35), "several need it:\nw pushes,\nothers pull", (4.5, 3.5), align="right"
    )
    arrow(
        axes, (5.6, 2.35), (5.6, 4.65),
        "w needs it: gradients\nare pushed, the store\nsteps, w pulls", (5.7, 3.5), align="left",
    )  # fmt: skip
    arrow(axes, (6.55, 5.45), (9.7, 4.05), "evicted: pushed", (8.2, 5.05), align="left")
    arrow(axes, (8.9, 4.05), (6.55, 5.05), "w pulls\nvalues + state", (7.45, 4.3), align="right")
    arrow(axes, (8.9, 2.95), (6.55, 1.95), "several pull\nthe values", (7.45, 2.7), align="right")
    arrow(
        axes, (6.55, 1.55), (9.7, 2.95),
        "evicted: gradients are pushed;\nthe store adds up, and steps", (7.9, 1.75), align="left",
    )  # fmt: skip
    arrow(
        axes,
        (4.75, 5.75),
        (5.65, 5.75),
        "w trains it again: nothing moves.\nAnother worker: w pushes, it pulls",
        (5.85, 5.95),
        -0.7,
        "left",
    )
    axes.text(
        0.2, 0.5,
        "Beside these: REPLICATED rows are on every worker and are all-reduced; NOT_ADMITTED rows read their "
        "initial value\nand learn nothing yet. Peer to peer, rows and gradients go from worker to worker.",
        ha="left", va="center", fontsize=9, color=INK, linespacing=1.35,
    )  # fmt: skip
    axes.figure.savefig(FOLDER / "row-states.png", dpi=130)


def draw_phases() -> None:
    """Who does what while iteration t is trained."""
    axes = canvas(10.6, 4.9)
    lanes = {
        "training": (3.75, "a worker trains"),
        "dense": (3.05, "workers sum"),
        "moves": (2.35, "a worker's rows move"),
        "store": (1.65, "a store"),
        "control": (0.95, "all ranks agree"),
        "plan": (0.25, "one planner a host"),
    }
    for bottom, name in lanes.values():
        axes.axhspan(bottom - 0.06, bottom + 0.56, 0.165, 0.995, color="#f5f7f8", zorder=0)
        axes.text(0.1, bottom + 0.25, name, ha="left", va="center", fontsize=9.5, color=INK)

    def put(lane: str, left: float, right: float, text: str, colour: str) -> None:
        box(axes, left, lanes[lane][0], right - left, 0.5, text, colour)

    put("training", 1.85, 4.95, "iteration t: forward, backward, own rows step", GREEN)
    put("training", 8.85, 10.5, "t + 1 …", GREEN)
    put("dense", 4.05, 8.6, "dense gradients of t", GREY)
    put("moves", 1.85, 4.15, "early t + 1: rows that rest", BLUE)
    put("moves", 5.0, 5.65, "after t", AMBER)
    put("moves", 5.7, 6.85, "late t + 1\npush", RED)
    put("moves", 6.9, 8.05, "late t + 1\npull", RED)
    put("moves", 8.1, 10.5, "early t + 2", BLUE)
    put("store", 1.85, 4.15, "take in, step split rows, send", BLUE)
    put("store", 5.0, 5.65, "take in", AMBER)
    put("store", 5.7, 6.85, "take in, step", RED)
    put("store", 6.9, 8.05, "send", RED)
    put("store", 8.1, 10.5, "…", BLUE)
    put("control", 5.7, 6.7, "plan of t + 4", GREY)
    put("plan", 6.75, 8.6, "decide t + 5", GREY)

    for place, text in ((4.975, "rows of t may move"), (8.725, "t is trained")):
        axes.plot([place, place], [0.15, 4.42], color=QUIET, lw=1.0, ls=(0, (4, 3)), zorder=1)
        axes.text(place, 4.55, text, ha="center", va="center", fontsize=9, color=QUIET)
    axes.annotate(
        "", xy=(10.5, 4.72), xytext=(9.3, 4.72), arrowprops={"arrowstyle": "-|>", "color": QUIET, "lw": 1.0}
    )
    axes.text(9.25, 4.72, "time", ha="right", va="center", fontsize=9, color=QUIET)
    axes.figure.savefig(FOLDER / "phases.png", dpi=130)


if __name__ == "__main__":
    draw_states()
    draw_phases()
