"""Herald's figures 12, 13 and 20: how long its scheduler takes, and how good it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from figures import plots
from figures.herald import DEFAULT, HERALD_ITSELF, LINK
from figures.lab import JOINT, LAIA, RANDOM, Lab, Mechanism, esd, schedule_settings, timed_plans
from figures.published import HERALD, HERALD_BUDGET_MS, HERALD_WORKERS, WARMUP
from figures.sections import Section, Table, percent, span, times
from figures.traces import Trace
from rowhaul.schedule import Scheduler
from rowhaul.schedule.caches import Caches
from rowhaul.schedule.directory import Directory
from rowhaul.schedule.dispatch.laia import Laia
from rowhaul.schedule.dispatching import Dispatching

MEASURED_BY_FORCE = 90  # iterations, as in the paper


@contextmanager
def stopwatches(methods: dict[str, tuple[type, str]]) -> Iterator[dict[str, list[float]]]:
    """CPU milliseconds of every call of some methods, while the context lasts."""
    spent: dict[str, list[float]] = {name: [] for name in methods}

    def timed(method: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            result = method(*arguments, **named)
            into.append(1e3 * (time.thread_time() - began))
            return result

        return run

    with ExitStack() as stack:
        for name, (owner, method) in methods.items():
            stack.enter_context(patch.object(owner, method, timed(getattr(owner, method), spent[name])))
        yield spent


def figure_12(trace: Trace, out: Path) -> Section:
    """Where the time of a decision goes."""
    parts = {
        "looking the ids up": (Directory, "locate"),
        "states of the rows": (Dispatching, "task"),
        "scoring and allocation": (Laia, "assign"),
        "cache snapshots": (Caches, "step"),
    }
    scheduler = Scheduler(schedule_settings(trace, LAIA, DEFAULT), list(trace.batches(DEFAULT.batch)()))
    with stopwatches(parts) as spent:
        whole = [milliseconds for _, milliseconds in timed_plans(scheduler)]
    medians = {name: statistics.median(values[WARMUP:]) for name, values in spent.items()}
    total = statistics.median(whole[WARMUP:])
    medians["communication plan and the rest"] = total - sum(medians.values())
    panel = plots.Panel(
        "Herald, figure 12: a decision, 1 core",
        [""],
        {name: [value] for name, value in medians.items()},
        ylabel="ms",
    )
    scoring = medians["scoring and allocation"]
    return Section(
        "herald-12",
        "Herald, figure 12: the time of a decision",
        f"{trace.name}, {DEFAULT.batch:,} samples on {HERALD_WORKERS} workers, one thread, median CPU time.",
        [
            Table(
                ["", "ms", "share"],
                [[name, f"{ms:.2f}", percent(ms / total)] for name, ms in medians.items()],
            )
        ],
        [
            (HERALD["overhead"], f"{total:.2f} ms on one"),
            (HERALD["overhead parts"], f"both together {scoring:.2f} ms ({scoring / total:.0%})"),
        ],
        plots=[plots.save(out / "herald-12.png", [panel])],
    )


def figure_13(lab: Lab, trace: Trace, clusters: Sequence[int], out: Path) -> Section:
    """LAIA over the tables that matter most, in larger and larger clusters."""
    some = [k for k in (2, 4, 8, 13) if k < trace.num_tables]
    rows = []
    lines: dict[str, list[float]] = {f"{k} tables": [] for k in some}
    four = []
    static_ms = []
    for num_workers in clusters:
        setting = DEFAULT.but(links_gbit=(LINK,) * num_workers)
        static = lab.run(trace, LAIA, setting)
        static_ms.append(static.decision_ms)
        adaptive = {
            k: lab.run(trace, Mechanism(f"LAIA, {k} tables", f"laia-adaptive:{k}"), setting) for k in some
        }
        increase = {
            k: (one.pulls + one.pushes) / (static.pulls + static.pushes) for k, one in adaptive.items()
        }
        for k in some:
            lines[f"{k} tables"].append(increase[k])
        four.append(increase[4])
        rows.append(
            [str(num_workers), f"{static.decision_ms:.1f}", *(times(one) for one in increase.values())]
        )
    fits = [n for n, ms in zip(clusters, static_ms, strict=True) if ms <= HERALD_BUDGET_MS]
    panel = plots.Panel(
        "Herald, figure 13: rows moved, all tables = 1",
        clusters,
        lines,
        "workers",
        "of static LAIA's",
        (1, 1.11),
        "lines",
    )
    return Section(
        "herald-13",
        "Herald, figure 13: scoring fewer tables",
        f"As figure 11, {trace.name}, 128 samples a worker; the tables with the highest degree of "
        "infrequency, ranked anew every 20 iterations.",
        [
            Table(
                [
                    "workers",
                    f"decision with all {trace.num_tables} tables, ms",
                    *(f"rows moved with {k} of them" for k in some),
                ],
                rows,
            )
        ],
        [
            (
                HERALD["adaptive"],
                f"4 tables: {span(four, times)}; all tables fit {HERALD_BUDGET_MS} ms up to "
                f"{max(fits, default=0)} workers",
            )
        ],
        plots=[plots.save(out / "herald-13.png", [panel])],
    )


def figure_20(lab: Lab, traces: Sequence[Trace], most_workers: int, out: Path) -> Section:
    """Every dispatcher against the best of all assignments, one sample a worker."""
    clusters = range(2, most_workers + 1)
    best = Mechanism("brute force", "brute-force")
    rows, panels = [], []
    quality: dict[tuple[str, str], list[float]] = {}
    milliseconds: dict[tuple[str, str], list[float]] = {}
    for trace in traces:
        for num_workers in clusters:
            part = trace.first((WARMUP + MEASURED_BY_FORCE) * num_workers)
            setting = DEFAULT.but(links_gbit=(LINK,) * num_workers, per_worker=1)
            optimum = lab.run(part, best, setting)
            for mechanism in (RANDOM, HERALD_ITSELF, esd(1), JOINT, best):
                result, key = lab.run(part, mechanism, setting), (trace.name, mechanism.name)
                share = (optimum.pulls + optimum.pushes) / (result.pulls + result.pushes)
                quality.setdefault(key, []).append(share)
                milliseconds.setdefault(key, []).append(result.dispatch_cpu_ms)
        for title, values, kind in (("quality", quality, "lines"), ("ms to dispatch", milliseconds, "log")):
            lines = {name: line for (log, name), line in values.items() if log == trace.name}
            stated = (0.45, 0.57) if values is quality else None
            name = f"Herald, figure 20: {trace.name}"
            panels.append(plots.Panel(name, clusters, lines, "workers", title, stated, kind))
            digits = 2 if values is quality else 3
            rows += [
                [f"{trace.name}, {name}, {title}", *(f"{value:.{digits}f}" for value in line)]
                for name, line in lines.items()
                if not (values is quality and name == best.name)
            ]
    herald = [key for key in quality if key[1] == HERALD_ITSELF.name]
    return Section(
        "herald-20",
        "Herald, figure 20: against brute force",
        f"One sample a worker, equal links, {MEASURED_BY_FORCE} iterations after {WARMUP}, caches of "
        f"{percent(DEFAULT.cache, 0)} of the rows of the log. Quality: rows moved by brute force "
        "over rows moved. Brute force minimises the rows of the one iteration that it decides on.",
        [Table(["workers", *map(str, clusters)], rows)],
        [
            (HERALD["brute force"], span([one for key in herald for one in quality[key]], "{:.2f}".format)),
            (
                HERALD["brute force time"],
                f"Herald {span([one for key in herald for one in milliseconds[key]], '{:.3f}'.format)} ms, "
                f"brute force {milliseconds[traces[0].name, best.name][-1]:,.1f} ms with {most_workers}",
            ),
        ],
        plots=[plots.save(out / "herald-20.png", panels)],
    )
