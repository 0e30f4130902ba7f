"""Ways to make embedding tables smaller, against each other: quality for measured bytes.

Unpruned, AdaEmbed (whole rows are pruned), FIITED (pieces of rows), FIITED in two dimensions, mixed
dimensions (fixed before training, with projections) and rows that grow (after ESAPN) train one DLRM with one
trainer, optimizer and data, on MovieLens-1M and logs shaped like Criteo, Avazu and Criteo Terabyte. Bytes are
those that are really allocated for values, optimizer state, entries and index. After every step a sampler
asserts that a pruned model is within its room.

Methods are compared seed by seed: runs of one seed see the same samples in the same order and start from the
same values. Whether pieces of rows are better than whole ones is asked of ``--pairs`` Criteo-like logs.

Every result is kept in benchmarks/results/pruning, so a run may be ended and started again. The full setting
takes about an hour of two cores, ``--quick`` three minutes.

    python benchmarks/pruning.py [--data criteo,movielens] [--seeds 3] [--pairs 10] [--quick] [--jobs 2]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import shutil
from pathlib import Path

from pruning_methods.figures import draw_against, draw_moves, draw_quality, draw_times
from pruning_methods.logs import SOURCES
from pruning_methods.methods import (
    ACCESS,
    ADAEMBED,
    FIITED,
    GROWING,
    LINEAR,
    MIXED,
    PRUNING,
    TWO_DIMENSIONS,
    UNPRUNED,
    Case,
)
from pruning_methods.runs import FOLDER, Result, Run, results_of
from pruning_methods.tables import (
    Line,
    lines_of,
    print_against,
    print_budgets,
    print_data,
    print_largest,
    print_times,
)
from report import console, print_machine

RATIOS = (0.625, 0.75, 0.875, 0.9375, 0.99)
BEYOND = (0.995, 0.999)  # to see where it ends
GENTLE = (0.1, 0.25, 0.5)  # for a data set without rows that nobody needs
QUICK_RATIOS = (0.875, 0.99)
QUICK_SAMPLES = 60_000
MOVES = (0.5, 0.7, 0.9)  # the ratios of FIITED's figures 13 to 15
MOVES_SAMPLES = 100_000
COMPARED = (UNPRUNED, ADAEMBED, FIITED, ACCESS, TWO_DIMENSIONS)  # with more seeds than the others
BUDGETS = (2 << 20, 4 << 20, 8 << 20)  # bytes in all, of which a sampler sees that they are kept


def cases_for(data: str, quick: bool) -> list[Case]:
    """What is tried on a data set."""
    ratios = QUICK_RATIOS if quick else RATIOS
    cases = [Case(UNPRUNED)]
    for method in (ADAEMBED, FIITED, LINEAR, ACCESS, TWO_DIMENSIONS, MIXED, GROWING):
        wanted = list(ratios)
        if not quick and data == "movielens" and method in PRUNING:
            wanted += GENTLE
        if not quick and data == "criteo" and method in (ADAEMBED, FIITED, TWO_DIMENSIONS):
            wanted += BEYOND
        if not quick and data == "criteo" and method == FIITED:
            wanted.append(0.0)  # what it does to a model that a row's pieces have each their optimizer state
        if method == TWO_DIMENSIONS:
            wanted.append(0.9925)  # 133 times, as FIITED reports
        if method == LINEAR and (quick or data not in ("criteo", "movielens")):
            continue
        cases += [Case(method, ratio) for ratio in sorted(wanted)]
    return [case for case in cases if case.reaches(SOURCES[data].dim)]


def runs_of(options: argparse.Namespace) -> list[Run]:
    """All runs that compare quality."""
    runs = []
    for data in options.data:
        samples = options.samples or (QUICK_SAMPLES if options.quick else SOURCES[data].samples)
        cases = cases_for(data, options.quick)
        for seed in range(options.seeds):
            runs += [Run(data, samples, seed, case) for case in cases]
        if data == "criteo" and not options.quick:
            compared = [case for case in cases if case.method in COMPARED]
            for seed in range(options.seeds, options.pairs):
                runs += [Run(data, samples, seed, case) for case in compared]
    return runs


def runs_of_chunks(options: argparse.Namespace) -> list[Run]:
    """K = 1, 2, 4, 8 on a short log: what moves, and how long a step takes."""
    if options.quick or "criteo" not in options.data:
        return []
    cases = [Case(UNPRUNED)]
    cases += [Case(FIITED, ratio, chunks, "power") for ratio in MOVES for chunks in (1, 2, 4, 8)]
    cases += [Case(FIITED, 0.9375, chunks) for chunks in (1, 2, 4, 8)]
    cases += [Case(MIXED, 0.9375), Case(GROWING, 0.9375)]
    return [Run("criteo", MOVES_SAMPLES, 0, case) for case in cases]


def runs_of_budgets(options: argparse.Namespace) -> list[Run]:
    """Budgets in bytes instead of ratios, on a short log: runs end with an error where one is exceeded."""
    samples = QUICK_SAMPLES if options.quick else MOVES_SAMPLES
    cases = [Case(method, budget=budget) for method in (ADAEMBED, FIITED) for budget in BUDGETS]
    return [Run("criteo", samples, 0, case) for case in cases] if "criteo" in options.data else []


def main() -> None:
    """Run what is missing, print the tables, draw the plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="criteo,movielens,avazu,criteo-tb", help="some of these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10, help="seeds of what is compared with AdaEmbed")
    parser.add_argument("--samples", type=int, default=0, help="of each data set; 0: its own number")
    parser.add_argument("--quick", action="store_true", help="two ratios on short logs")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--again", action="store_true", help="forget kept results first")
    options = parser.parse_args()
    options.data = [one.strip() for one in options.data.split(",")]
    unknown = [one for one in options.data if one not in SOURCES]
    if unknown:
        parser.error(f"--data: {unknown[0]!r} is none of {', '.join(SOURCES)}")
    if options.again:
        shutil.rmtree(FOLDER, ignore_errors=True)
    print_machine()
    quality = results_of(runs_of(options), options.jobs, print_progress)
    of_chunks = results_of(runs_of_chunks(options), options.jobs, print_progress)
    budgets = results_of(runs_of_budgets(options), options.jobs, print_progress)
    lines = {data: lines_of(quality, data) for data in options.data}
    for data, of_data in lines.items():
        print_data(of_data, data)
        print_largest(of_data, data)
        print_against(of_data, data)
    checked = sum(one.num_looks for run, one in quality.items() if run.case.method in PRUNING)
    console.print(f"never above its room: checked after {checked:,} steps of pruned runs")
    if budgets:
        print_budgets(budgets)
    draw(lines, lines_of(of_chunks, "criteo") if of_chunks else [])


def draw(lines: dict[str, list[Line]], of_chunks: list[Line]) -> None:
    """All plots."""
    folder = Path(FOLDER)
    paths = [
        draw_quality(lines, folder / "auc-by-values.png", by_bytes=False),
        draw_quality(lines, folder / "auc-by-bytes.png", by_bytes=True),
        draw_against(lines, folder / "against-adaembed.png"),
    ]
    if of_chunks:
        timed = [line for line in of_chunks if line.case.ratio == 0.9375]
        print_times(of_chunks)
        paths.append(draw_times(timed, folder / "time.png"))
        moved = [line for line in of_chunks if line.case.ratios == "power"]
        paths.append(draw_moves(moved, folder / "moves.png"))
    console.print("plots: " + ", ".join(paths))


def print_progress(done: int, total: int, run: Run, result: Result) -> None:
    """One line a run."""
    console.print(
        f"{done}/{total} {run.data} seed {run.seed} {run.case.method} {run.case.ratio:.2%}: "
        f"AUC {result.auc:.4f}, {result.held_bytes / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
