"""Herald's figures 11 and 16 and table 2: what its scheduling saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import plots
from figures.esd import speed_up
from figures.lab import HET, JOINT, RANDOM, VANILLA, Lab, Mechanism, Result, Setting, esd
from figures.published import (
    BREAKDOWN,
    HERALD,
    HERALD_CACHE,
    HERALD_TRANSFER_SHARE,
    HERALD_WORKERS,
)
from figures.sections import Section, Table, percent, span, times
from figures.traces import Trace

LINK = 100.0  # Gbit/s, all equal
DEFAULT = Setting((LINK,) * HERALD_WORKERS, per_worker=128, dim=512, cache=HERALD_CACHE)
HERALD_ITSELF = Mechanism("Herald", "laia")


def saved(result: Result, vanilla: Result) -> tuple[float, float, float]:
    """Shares of vanilla's pulls, pushes and both that are not made."""
    both = (result.pulls + result.pushes) / (vanilla.pulls + vanilla.pushes)
    return 1 - result.pulls / vanilla.pulls, 1 - result.pushes / vanilla.pushes, 1 - both


def figure_11(lab: Lab, traces: Sequence[Trace], out: Path) -> Section:
    """Rows moved, relative to random dispatch with full synchronisation."""
    rows = []
    shares: dict[str, list[tuple[float, float, float]]] = {}
    kindest = DEFAULT.but(cache=1.0, first_touch=True)
    for trace in traces:
        for mechanism in (HERALD_ITSELF, esd(1), JOINT):
            result = lab.run(trace, mechanism, DEFAULT)
            mine = saved(result, lab.run(trace, VANILLA, DEFAULT))
            shares.setdefault(mechanism.name, []).append(mine)
            at_best = saved(lab.run(trace, mechanism, kindest), lab.run(trace, VANILLA, kindest))[-1]
            name = f"{trace.name}, {mechanism.name}"
            rows.append([name, *map(percent, mine), percent(at_best), percent(result.hit_ratio)])
    bars = {
        f"{name}, {way}": [1 - one[place] for one in values]
        for place, way in enumerate(("pulls", "pushes"))
        for name, values in shares.items()
    }
    names = [trace.name for trace in traces]
    panel = plots.Panel("Herald, figure 11: rows moved, vanilla = 1", names, bars, ylabel="of vanilla's")
    pulls, pushes, both = zip(*shares[HERALD_ITSELF.name], strict=True)
    return Section(
        "herald-11",
        "Herald, figure 11: transmissions saved",
        "Eight workers with equal links, 128 samples a worker, 10 % of the rows cached, LRU. Vanilla is a "
        'random partition with full synchronisation. A row never seen before is pulled too; not so "at the '
        'kindest", where new rows are free and nothing is ever evicted.',
        [Table(["below vanilla", "pulls", "pushes", "all", "all, at the kindest", "hits"], rows)],
        [
            (HERALD["transmissions"], span(both)),
            (HERALD["pulls"], span(pulls)),
            (HERALD["pushes"], span(pushes)),
        ],
        plots=[plots.save(out / "herald-11.png", [panel])],
    )


def table_2(lab: Lab, traces: Sequence[Trace]) -> Section:
    """What dispatch and on-demand synchronisation save, alone and together."""
    mechanisms = {
        "LAIA alone": Mechanism("LAIA alone", "laia", "full"),
        "on-demand alone": RANDOM,
        "Herald": HERALD_ITSELF,
    }
    rows = []
    for name, mechanism in mechanisms.items():
        rows.append([f"{name}, paper (Criteo)", *map(percent, BREAKDOWN[name])])
        for trace in traces:
            here = saved(lab.run(trace, mechanism, DEFAULT), lab.run(trace, VANILLA, DEFAULT))
            rows.append([f"{name}, {trace.name}", *map(percent, here)])
    return Section(
        "herald-table-2",
        "Herald, table 2: what each part saves",
        "As figure 11.",
        [Table(["below vanilla", "pulls", "pushes", "all"], rows)],
    )


def figure_16(lab: Lab, traces: Sequence[Trace], out: Path) -> Section:
    """Speed-up over HET with smaller caches."""
    shares = (0.04, 0.06, 0.08, 0.10)
    testbed = DEFAULT.but(per_worker=256)
    lines, rows = {}, []
    first = traces[0]
    vanilla = lab.run(first, HET, testbed.but(compute_seconds=0.0))
    share = HERALD_TRANSFER_SHARE
    compute = vanilla.iteration_seconds * (1 - share) / share / testbed.per_worker
    for trace in traces:
        settings = [testbed.but(cache=cache, compute_seconds=compute) for cache in shares]
        for mechanism in (HERALD_ITSELF, JOINT):
            pairs = [
                (lab.run(trace, HET, setting), lab.run(trace, mechanism, setting)) for setting in settings
            ]
            name = f"{trace.name}, {mechanism.name}"
            lines[name] = [speed_up(ours, het) for het, ours in pairs]
            rows.append([name, *map(times, lines[name])])
    panel = plots.Panel(
        "Herald, figure 16: speed-up over HET",
        [percent(share, 0) for share in shares],
        lines,
        "rows cached",
        "times as fast",
        (1.97, 2.15),
        "lines",
    )
    return Section(
        "herald-16",
        "Herald, figure 16: smaller caches",
        f"Eight workers with equal links, 256 samples a worker. Computing takes {1e6 * compute:.2f} µs a "
        f"sample beside 100 Gbps links, so that transfer is {percent(share, 0)} of HET's iteration on "
        f"{first.name} with 10 % cached, the paper's highest share.",
        [Table(["speed-up over HET, rows cached", *(percent(share, 0) for share in shares)], rows)],
        [(HERALD["cache"], span(lines[f"{first.name}, {HERALD_ITSELF.name}"], times))],
        plots=[plots.save(out / "herald-16.png", [panel])],
    )
