"""ESD's figures 7 to 10, redone: one setting after the other is changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from figures import plots
from figures.esd import DEFAULT, FAST, SLOW, THREE, Workload, reduction, speed_up
from figures.lab import JOINT, LAIA, Lab, Setting, esd
from figures.published import ESD
from figures.sections import Section, Table, percent, span, times


def _sweep(
    lab: Lab,
    workloads: Sequence[Workload],
    settings: dict[str, Setting],
    key: str,
    title: str,
    out: Path,
    kind: Literal["bars", "lines"] = "lines",
) -> tuple[Table, str, dict[tuple[str, str, str], tuple[float, float]]]:
    """Speed-up and cost below LAIA under several settings: a table, a plot, the values."""
    values: dict[tuple[str, str, str], tuple[float, float]] = {}
    rows, panels = [], []
    for workload in workloads:
        for place, what, show in ((0, "speed-up", times), (1, "cost below LAIA", percent)):
            lines: dict[str, list[float]] = {}
            for mechanism in (*THREE, JOINT):
                for name, setting in settings.items():
                    laia = lab.run(workload.trace, LAIA, setting)
                    result = lab.run(workload.trace, mechanism, setting)
                    values[workload.label, mechanism.name, name] = (
                        speed_up(result, laia),
                        reduction(result, laia),
                    )
                lines[mechanism.name] = [
                    values[workload.label, mechanism.name, name][place] for name in settings
                ]
                rows.append(
                    [f"{workload.label}, {mechanism.name}, {what}", *map(show, lines[mechanism.name])]
                )
            panels.append(
                plots.Panel(f"{title}: {workload.label}", list(settings), lines, ylabel=what, kind=kind)
            )
    return Table(["", *settings], rows), plots.save(out / f"{key}.png", panels), values


def figure_7(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    settings = {f"m = {m}": DEFAULT.but(per_worker=m) for m in (64, 128, 256, 512)}
    table, plot, values = _sweep(lab, workloads, settings, "esd-07", "ESD, figure 7", out)
    s2, best = workloads[0].label, esd(1).name
    at = {name: values[s2, best, name] for name in settings}
    return Section(
        "esd-07",
        "ESD, figure 7: batch size per worker",
        "As figure 4, the same samples in larger batches.",
        [table],
        [
            (ESD["batch best"], ", ".join(f"{name[4:]}: {times(at[name][0])}" for name in settings)),
            (
                ESD["batch 512"],
                f"{percent(at['m = 256'][1])} to {percent(at['m = 512'][1])}, "
                f"{times(at['m = 256'][0])} to {times(at['m = 512'][0])}",
            ),
        ],
        plots=[plot],
    )


def figure_8(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    settings = {f"{share} %": DEFAULT.but(cache=share / 100) for share in (4, 6, 8, 10)}
    table, plot, values = _sweep(lab, workloads, settings, "esd-08", "ESD, figure 8", out)
    s2 = workloads[0].label
    spans = [
        f"{one.name} {span([values[s2, one.name, name][0] for name in settings], times)}" for one in THREE
    ]
    return Section(
        "esd-08",
        "ESD, figure 8: cache ratio",
        "As figure 4, with 4 to 10 % of the rows cached on every worker.",
        [table],
        [(ESD["cache"], "; ".join(spans))],
        plots=[plot],
    )


def figure_9(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    settings = {f"dim {dim}": DEFAULT.but(dim=dim) for dim in (128, 256, 512, 1024)}
    table, plot, values = _sweep(lab, workloads, settings, "esd-09", "ESD, figure 9", out)
    at = [values[workloads[0].label, esd(1).name, name] for name in settings]
    return Section(
        "esd-09",
        "ESD, figure 9: embedding size",
        "As figure 4. Computing is taken to last equally long at every size.",
        [table],
        [
            (ESD["dim speed-up"], " ".join(times(one[0]) for one in at)),
            (ESD["dim cost"], span([one[1] for one in at])),
        ],
        plots=[plot],
    )


def figure_10(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    settings = {
        "2 fast + 2 slow": DEFAULT.but(links_gbit=(FAST,) * 2 + (SLOW,) * 2),
        "4 fast": DEFAULT.but(links_gbit=(FAST,) * 4),
    }
    table, plot, values = _sweep(lab, workloads, settings, "esd-10", "ESD, figure 10", out, "bars")
    statements = []
    for key, name in (("mixed", "2 fast + 2 slow"), ("equal", "4 fast")):
        found = [values[w.label, one.name, name] for w in workloads if w.in_paper for one in THREE]
        statements.append((ESD[f"four {key} speed-up"], span([one[0] for one in found], times)))
        statements.append((ESD[f"four {key} cost"], span([one[1] for one in found])))
    return Section(
        "esd-10",
        "ESD, figure 10: four workers",
        "As figure 4 with four workers: two fast and two slow links, then four fast ones.",
        [table],
        statements,
        plots=[plot],
    )
