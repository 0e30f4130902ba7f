"""The exact transportation solver beside SciPy, lapx, OR-tools and POT: same optimum, one core, medians.

SciPy and lapx solve assignment problems, so they get the matrix with a column per slot, as ESD does;
OR-tools (min-cost flow) and POT (network simplex) take capacities as they are. Building a peer's
input is not counted. A peer that would take too long at a size is left out, and the table says so.

    python benchmarks/transport.py

The peers live in ``benchmarks/.cache/transport-venv``, made on the first run (some 300 MB).
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
PEERS = FOLDER / "transport_peers.txt"
ENVIRONMENT = FOLDER / ".cache" / "transport-venv"
SIZES = ((1024, 8), (8192, 8), (65536, 64))
REPEATS = {"Rowhaul": 51, "POT": 5, "OR-tools": 5, "lapx": 5, "SciPy": 5}
ONCE_IS_ENOUGH = 1.0  # seconds: a run that takes longer is not repeated
# The most rows that a peer is given, and what would happen with more.
MOST_ROWS = {"SciPy": (1024, "minutes"), "lapx": (8192, "34 GB matrix")}
MOST_ROWS_OF_ALL_KINDS = 8192  # beyond, OR-tools and POT take seconds too
KINDS_OF_LARGE_SIZES = ("random 0..200", "ties 0..3", "dispatch of 26 rows")
ESD_TABLE_2 = {
    32: (9, 21),
    64: (62, 28),
    128: (528, 82),
    256: (3360, 186),
    512: (50976, 811),
    1024: (134986, 1385),
}

Answer = tuple[float, int]  # milliseconds (median), total cost


def main() -> None:
    if "--measure" in sys.argv:
        print(json.dumps(measure_all()))
        return
    from report import console, print_machine, print_table

    print_machine()
    python = peers_python()
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parent / "src"),
        "NUMBA_CACHE_DIR": str(ENVIRONMENT / "kernels"),
        "OMP_NUM_THREADS": "1",
    }
    console.print("measuring: about five minutes, most of them the peers'")
    command = [str(python), str(Path(__file__).resolve()), "--measure"]
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(result.stdout)
    console.print("measured with " + report["versions"])
    columns = ["costs", *REPEATS, "best peer / Rowhaul"]
    for size, lines in report["sizes"].items():
        print_table(f"{size}: milliseconds, one core, same optimum", columns, lines)
    lines = [
        [f"{slots} per worker ({slots * 8} × 8)", *map(readable, (*ESD_TABLE_2[slots], milliseconds))]
        for slots, milliseconds in report["slots"]
    ]
    print_table(
        "ESD's table 2, 8 workers: milliseconds of a decision, the paper's machine and this one",
        ["", "ESD, Hungarian on CPU", "ESD, Hungarian on RTX 4090", "Rowhaul, one core"],
        lines,
    )


def peers_python() -> Path:
    """The interpreter of the peers' environment; made anew when the list of peers has changed."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    wanted = hashlib.sha256(PEERS.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(PEERS)]
        subprocess.run([str(python), *install], check=True)
        stamp.write_text(wanted)
    return python


def measure_all() -> dict[str, Any]:
    """In the peers' environment: every solver on every kind of costs."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rowhaul(np.zeros((2, 2), np.int64), np.ones(2, np.int64))()  # compile
    names = ("numpy", "numba", "scipy", "lapx", "ortools", "POT")
    sizes = {}
    for num_rows, num_columns in SIZES:
        capacity = np.full(num_columns, num_rows // num_columns)
        lines = []
        for kind, cost in costs_by_kind(num_rows, num_columns).items():
            if num_rows <= MOST_ROWS_OF_ALL_KINDS or kind in KINDS_OF_LARGE_SIZES:
                lines.append([kind, *compare(cost, capacity)])
        sizes[f"{num_rows} × {num_columns}"] = lines
    slots = []
    for per_worker in ESD_TABLE_2:
        cost = dispatch_costs(8 * per_worker, 8, np.random.default_rng(0))
        slots.append((per_worker, timed(rowhaul(cost, np.full(8, per_worker)), REPEATS["Rowhaul"])[0]))
    return {
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
        "sizes": sizes,
        "slots": slots,
    }


def compare(cost: np.ndarray, capacity: np.ndarray) -> list[object]:
    """The milliseconds of each solver, or why there are none, and the ratio of the best peer to Rowhaul."""
    cells: list[object] = []
    answers: dict[str, Answer] = {}
    for name, prepare in SOLVERS.items():
        most_rows, why = MOST_ROWS.get(name, (len(cost), ""))
        if len(cost) > most_rows:
            cells.append(why)
            continue
        answers[name] = timed(prepare(cost, capacity), REPEATS[name])
        cells.append(readable(answers[name][0]))
    totals = {name: total for name, (_, total) in answers.items()}
    assert len(set(totals.values())) == 1, f"the solvers disagree on the optimum: {totals}"
    peers = [milliseconds for name, (milliseconds, _) in answers.items() if name != "Rowhaul"]
    cells.append(f"{min(peers) / answers['Rowhaul'][0]:.0f}x")
    return cells


def readable(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def timed(solve: Callable[[], int], repeats: int) -> Answer:
    """The median of some runs after a first one, or the first one where it is long."""
    milliseconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        total = solve()
        milliseconds.append(1e3 * (time.perf_counter() - began))
        if milliseconds[0] > 1e3 * ONCE_IS_ENOUGH:
            return milliseconds[0], total
    return statistics.median(milliseconds[1:]), total


def costs_by_kind(num_rows: int, num_columns: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    uniform = random.integers(0, 201, (num_rows, num_columns))
    links = np.where(np.arange(num_columns) < num_columns // 2, 1, 10)
    return {
        "random 0..200": uniform,
        "ties 0..3": random.integers(0, 4, (num_rows, num_columns)),
        "offset 50 per column": uniform + 50 * np.arange(num_columns),
        "10:1 links": random.integers(0, 27, (num_rows, num_columns)) * links,
        "dispatch of 26 rows": dispatch_costs(num_rows, num_columns, random),
        "distinct 0..10^9": random.integers(0, 10**9, (num_rows, num_columns)),
    }


def dispatch_costs(num_samples: int, num_workers: int, random: np.random.Generator) -> np.ndarray:
    """ESD's expected costs of samples with 26 rows, some hot; half of the links are ten times slower.

    A row costs nothing where its latest version is; elsewhere a pull, and the push of its owner.
    """
    link = np.where(np.arange(num_workers) < num_workers // 2, 1, 10)
    cost = np.zeros((num_samples, num_workers), np.int64)
    for _ in range(26):
        num_keys = int(10 ** random.uniform(0.5, 5))
        owners = random.integers(-1, num_workers, num_keys)  # -1: at home
        owner = owners[(num_keys * random.random(num_samples) ** 4).astype(np.int64)]
        push = np.where(owner >= 0, link[owner], 0)
        cost += np.where(owner[:, None] == np.arange(num_workers), 0, link + push[:, None])
    return cost


def rowhaul(cost: np.ndarray, capacity: np.ndarray) -> Callable[[], int]:
    from rowhaul.schedule.transportation import transport

    rows = np.arange(len(cost))
    return lambda: int(cost[rows, transport(cost, capacity)].sum())


def pot(cost: np.ndarray, capacity: np.ndarray) -> Callable[[], int]:
    import ot

    supply, demand, floats = np.ones(len(cost)), capacity.astype(np.float64), cost.astype(np.float64)
    return lambda: round((ot.emd(supply, demand, floats, numItermax=10**7) * floats).sum())


def or_tools(cost: np.ndarray, capacity: np.ndarray) -> Callable[[], int]:
    from ortools.graph.python import min_cost_flow

    num_rows, num_columns = cost.shape
    tails = np.repeat(np.arange(num_rows), num_columns)
    heads = num_rows + np.tile(np.arange(num_columns), num_rows)
    flow = min_cost_flow.SimpleMinCostFlow()
    flow.add_arcs_with_capacity_and_unit_cost(tails, heads, np.ones(cost.size, np.int64), cost.ravel())
    flow.set_nodes_supplies(np.arange(num_rows + num_columns), np.r_[np.ones(num_rows, np.int64), -capacity])

    def solve() -> int:
        assert flow.solve() == flow.OPTIMAL
        return int(flow.optimal_cost())

    return solve


def lapx(cost: np.ndarray, capacity: np.ndarray) -> Callable[[], int]:
    import lap

    expanded = np.repeat(cost, capacity, axis=1).astype(np.float64)
    return lambda: round(lap.lapjv(expanded)[0])


def scipy(cost: np.ndarray, capacity: np.ndarray) -> Callable[[], int]:
    from scipy.optimize import linear_sum_assignment

    expanded = np.repeat(cost, capacity, axis=1)
    return lambda: int(expanded[linear_sum_assignment(expanded)].sum())


SOLVERS = {"Rowhaul": rowhaul, "POT": pot, "OR-tools": or_tools, "lapx": lapx, "SciPy": scipy}


if __name__ == "__main__":
    main()
