"""ESD's table 2: how long the optimal assignment takes, on costs as they occur in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from figures import plots
from figures.esd import DEFAULT
from figures.lab import Mechanism, schedule_settings
from figures.published import SOLVER_MS, WARMUP
from figures.sections import Section, Table
from figures.traces import Trace
from rowhaul.schedule import DispatchTask, Scheduler, make_dispatcher, transport
from rowhaul.schedule.dispatch.costs import expected_cost

REPEATS = 5


class CostTracker:
    """ESD's dispatcher, and the last costs that it decided on."""

    name = "esd"

    def __init__(self) -> None:
        self._inner = make_dispatcher("esd:1")
        self.cost: npt.NDArray[np.int64] | None = None

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        self.cost = expected_cost(task)
        return self._inner.assign(task)


def table_2(trace: Trace, largest_for_scipy: int, out: Path) -> Section:
    """Milliseconds to place a batch optimally: the paper's two solvers, SciPy's, and ours."""
    rows, ours, scipy = [], [], []
    for per_worker, (serial, cuda) in SOLVER_MS.items():
        cost = costs_in_training(trace, per_worker)
        capacity = np.full(cost.shape[1], per_worker, np.int64)
        worker = transport(cost, capacity)
        ours.append(median_ms(lambda cost=cost, capacity=capacity: transport(cost, capacity)))
        scipy.append(float("nan"))
        if per_worker <= largest_for_scipy:
            expanded = np.repeat(cost, per_worker, axis=1).astype(np.float64)
            began = time.thread_time()
            samples, columns = linear_sum_assignment(expanded)
            scipy[-1] = 1e3 * (time.thread_time() - began)
            optimum = int(cost[samples, columns // per_worker].sum())
            assert int(cost[np.arange(len(cost)), worker].sum()) == optimum, "not the same optimum"
        rows.append(
            [
                str(per_worker),
                f"{serial:,}",
                f"{cuda:,}",
                "-" if np.isnan(scipy[-1]) else f"{scipy[-1]:,.1f}",
                f"{ours[-1]:.2f}",
                f"{cuda / ours[-1]:,.0f}x",
            ]
        )
    names = ["paper, CPU", "paper, RTX 4090"]
    series = {name: [pair[place] for pair in SOLVER_MS.values()] for place, name in enumerate(names)}
    series |= {"SciPy, expanded matrix": scipy, "Rowhaul, transportation": ours}
    panel = plots.Panel(
        "ESD, table 2: optimal assignment, 8 workers",
        list(SOLVER_MS),
        series,
        "batch per worker",
        "ms",
        kind="log",
    )
    return Section(
        "esd-table-2",
        "ESD, table 2: the optimal assignment",
        f"Eight workers; ESD's costs on {trace.name} after the warm-up. SciPy solves the n·m x n·m "
        "assignment that the paper solves; Rowhaul the transportation problem with n columns. "
        "The same optimum, checked.",
        [Table(["batch per worker, ms", *names, "SciPy", "Rowhaul, 1 core", "RTX 4090 / Rowhaul"], rows)],
        plots=[plots.save(out / "esd-table-2.png", [panel])],
    )


def costs_in_training(trace: Trace, per_worker: int) -> npt.NDArray[np.int64]:
    """The cost matrix of the first iteration after the warm-up, or of the last that the trace has."""
    setting = DEFAULT.but(per_worker=per_worker)
    keeper = CostTracker()
    settings = schedule_settings(trace, Mechanism("ESD(1)", "esd:1"), setting, keeper)
    scheduler = Scheduler(settings, trace.batches(setting.batch)())
    while scheduler.fill() and scheduler.iteration <= WARMUP:
        scheduler.plan()
    assert keeper.cost is not None
    return keeper.cost


def median_ms(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)
    return 1e3 * statistics.median(seconds)
