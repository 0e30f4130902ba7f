"""The plots of a run, drawn by matplotlib without its global state; None where there is nothing to show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rowhaul._page import COLOURS, GRID
from rowhaul.explain.explain_file import Line
from rowhaul.explain.findings import KIND_TITLES, PARTS
from rowhaul.report.reading import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.8, 2.8  # inches: legible in half of a page, and on a phone
_MOST_WORKERS = 8  # lines in one plot

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def loss(run: RunRecord) -> Figure | None:
    """The training loss, a running mean where there are many lines."""
    lines = run.lines("train")
    if not lines:
        return None
    steps, values = _smoothed([line["step"] for line in lines], [_number(line, "loss") for line in lines])
    return _drawn({"loss": (steps, values)}, "loss")


def metrics(run: RunRecord) -> Figure | None:
    """AUC and log loss of the evaluations; RMSE of labels that are numbers, which have neither."""
    lines = run.lines("eval")
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    titles = {"auc": "AUC", "log_loss": "log loss", "normalised_entropy": "normalised entropy"}
    titles |= {name: f"RMSE of {name.removesuffix('/rmse')}" for name in lines[-1] if name.endswith("/rmse")}
    found = {title: [_number(line, name) for line in lines] for name, title in titles.items()}
    series = {title: (steps, values) for title, values in found.items() if not all(map(math.isnan, values))}
    return _drawn(series, "on held-out samples", marks=True) if series else None


def speed(run: RunRecord) -> Figure | None:
    """Samples a second."""
    lines = [line for line in run.lines("train") if line["samples_per_second"]]
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    return _drawn(
        {"": (steps, [line["samples_per_second"] for line in lines])}, "samples a second", zero=True
    )


def bytes_over_time(run: RunRecord) -> Figure | None:
    """Bytes an iteration, by kind of move; with `--explain` the dense sum too."""
    series: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for line in run.lines("cluster"):
        for kind, title in (*KIND_TITLES.items(), ("all_reduce", "hot rows")):
            value = line.get(f"bytes/{kind}")
            if value is not None:
                series[title][0].append(line["step"])
                series[title][1].append(value / 2**20)
    for line in run.intervals:
        if line.get("dense_bytes") and (iterations := line["ranks"][0]["iterations"]):
            series["dense sum"][0].append(line["step"])
            series["dense sum"][1].append(line["dense_bytes"] / iterations / 2**20)
    used = {name: one for name, one in series.items() if any(one[1])}
    return _drawn(used, "MiB an iteration", zero=True) if used else None


def hit_ratio(run: RunRecord) -> Figure | None:
    """The share of look-ups that found the latest version on the worker."""
    lines = run.lines("cluster")
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    return _drawn({"": (steps, [100 * line["hit_ratio"] for line in lines])}, "hit ratio, %", zero=True)


def shares(run: RunRecord) -> Figure | None:
    """The share of the samples that each worker trains."""
    lines = [line for line in run.latest_intervals if sum(line.get("samples", ()))]
    if not lines or run.findings is None:
        return None
    workers = run.findings.num_workers
    steps = [line["step"] for line in lines]
    series = {
        run.findings.roles[rank]: (
            steps,
            [100 * line["samples"][rank] / sum(line["samples"]) for line in lines],
        )
        for rank in range(min(workers, _MOST_WORKERS))
    }
    return _drawn(series, "share of the samples, %", zero=True, marks=True)


def composition(run: RunRecord) -> Figure | None:
    """Where the workers' time goes, interval by interval: parts of an average iteration, stacked."""
    workers = run.findings.num_workers if run.findings is not None else 1
    steps: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for line in run.latest_intervals:
        ranks = [one for one in line["ranks"][:workers] if one["iterations"] > 0]
        if ranks:
            steps = steps or [line["step"] - ranks[0]["iterations"]]  # where the first interval begins
            steps.append(line["step"])
            for name, values in parts.items():
                spent = [one["seconds"].get(name, 0.0) / one["iterations"] for one in ranks]
                values.append(1e3 * sum(spent) / len(spent))
    used = {PARTS[name]: values for name, values in parts.items() if any(values)}
    if not steps:
        return None

    def fill(axis: Axes) -> None:
        stacked = ([values[0], *values] for values in used.values())
        axis.stackplot(steps, *stacked, labels=list(used), colors=COLOURS, step="pre", alpha=0.9)
        axis.set_xlim(steps[0], steps[-1])
        axis.set_ylabel("ms an iteration")

    return _figure(fill, legend=True)


def measured_parts(run: RunRecord) -> Figure | None:
    """What the log measures without `--explain`: mean seconds of the workers, by what they did."""
    lines = run.lines("cluster")
    names = {
        "seconds/compute": "compute",
        "seconds/all_reduce": "waiting for the dense sum",
        "seconds/waiting": "waiting for rows and plans",
        "seconds/early": "early moves, beside training",
        "seconds/dispatch": "planning, beside training",
    }
    steps = [line["step"] for line in lines]
    series = {
        title: (steps, [1e3 * line[name] for line in lines])
        for name, title in names.items()
        if lines and all(name in line for line in lines)
    }
    return _drawn(series, "ms an iteration", zero=True) if series else None


def _number(line: Line, name: str) -> float:
    """A value of a line; NaN where it is not defined, which JSON writes as null."""
    value = line.get(name)
    return math.nan if value is None else float(value)


def _smoothed(
    steps: Sequence[float], values: Sequence[float], points: int = 200
) -> tuple[Sequence[float], Sequence[float]]:
    width = max(1, len(values) // points)
    means = [sum(values[at : at + width]) / width for at in range(0, len(values) - width + 1, width)]
    return [steps[at + width - 1] for at in range(0, len(values) - width + 1, width)], means


def _drawn(series: Series, unit: str, *, zero: bool = False, marks: bool = False) -> Figure:
    def draw(axis: Axes) -> None:
        for (title, (steps, values)), colour in zip(series.items(), COLOURS * 3, strict=False):
            mark = "o" if marks or len(values) == 1 else None
            axis.plot(steps, values, color=colour, linewidth=1.6, marker=mark, markersize=4, label=title)
        if zero:
            axis.set_ylim(bottom=0)
        axis.set_ylabel(unit)

    return _figure(draw, legend=len(series) > 1)


def _figure(draw: Callable[[Axes], None], *, legend: bool) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axis = figure.subplots()
    draw(axis)
    axis.set_xlabel("step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=GRID)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
