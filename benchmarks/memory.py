"""AUC and log loss against all bytes from a raw key to its row: values, optimizer state, index, decisions.

One DLRM (rows of 32, row-wise Adagrad, one pass) is trained on MovieLens-1M, shuffled and in the order of
time, on logs shaped like Criteo and Avazu, and on one whose rare ids carry signal. Rows are held whole; with
fewer values; hashed; with mixed dimensions; pruned as AdaEmbed and FIITED do; and as `--memory-budget` does.

At every budget, a share of the unpruned bytes, the best contender with at most as many bytes is picked on
some seeds and judged on others, seed by seed against `--memory-budget`. Contenders are charged for the bytes
they use, Rowhaul for those it allocates; a run that ever allocates more than its budget has no result.

Every result is kept in benchmarks/results/memory, so a study may be ended and started again. A run takes 5 to
20 seconds, the whole study some core-hours; ``--quick`` minutes.

    python benchmarks/memory.py [--logs rare,criteo] [--families uniform,hashing,budget] [--budgets 50,10]
                                [--picks 2] [--seeds 10] [--jobs 2] [--minutes 60] [--quick]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import math
import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memory_study.contenders import FAMILIES, OURS, budget, name_of
from memory_study.drawing import draw
from memory_study.judging import Study, verdicts
from memory_study.writing import PICTURE, opening, percent, picking_table, verdict_table
from pruning_methods.logs import SOURCES
from pruning_methods.runs import FOLDER, Result, Run, results_of
from report import console, print_machine

LOGS = ("movielens-shuffled", "rare", "criteo", "avazu", "movielens-time")
BUDGETS = "50,25,10,5,3"
FIRST_PICKING_SEED = 100  # judging seeds are counted from 0
QUICK_SAMPLES = 60_000
QUICK_FAMILIES = ("uniform", "hashing", "adaembed", OURS)


def main() -> None:
    """Run what is missing, print the tables, draw the frontier."""
    options = parsed()
    deadline = time.monotonic() + 60 * options.minutes
    print_machine()
    results = run(picking_runs(options), options.jobs, deadline, "picking")
    if OURS in options.families:
        results |= run(judging_runs(options, results), options.jobs, deadline, "judging")
    write(options, results)


def parsed() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", default=",".join(LOGS), help="some of these, first ones first")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of these")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of the unpruned bytes")
    parser.add_argument("--picks", type=int, default=2, help="seeds on which the best contender is picked")
    parser.add_argument("--seeds", type=int, default=10, help="seeds on which it is judged")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--quick", action="store_true", help="short logs, two budgets, few seeds")
    options = parser.parse_args()
    if options.quick:
        options.logs, options.families, options.budgets = "rare,criteo", ",".join(QUICK_FAMILIES), "25,5"
        options.picks, options.seeds = 1, 2
    options.logs = named(parser, "--logs", options.logs, LOGS)
    options.families = named(parser, "--families", options.families, tuple(FAMILIES))
    try:
        options.shares = sorted((float(one) / 100 for one in options.budgets.split(",")), reverse=True)
    except ValueError:
        parser.error(f"--budgets: {options.budgets!r} is not a list of percentages such as {BUDGETS}")
    if not all(0 < share < 1 for share in options.shares):
        parser.error(f"--budgets: {options.budgets!r} must be above 0 and below 100 percent")
    if options.picks < 1 or options.seeds < 0 or options.seeds > FIRST_PICKING_SEED:
        parser.error(f"--picks must be at least 1, and --seeds from 0 to {FIRST_PICKING_SEED}")
    options.picking = range(FIRST_PICKING_SEED, FIRST_PICKING_SEED + options.picks)
    options.judging = range(options.seeds)
    return options


def named(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> list[str]:
    """The names of an option, or an error."""
    names = [one.strip() for one in text.split(",")]
    unknown = [one for one in names if one not in known]
    if unknown:
        parser.error(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    return names


def samples_of(data: str, options: argparse.Namespace) -> int:
    """Samples of a log."""
    return QUICK_SAMPLES if options.quick else SOURCES[data].samples


def picking_runs(options: argparse.Namespace) -> list[Run]:
    """Every case of every family; rows that are all kept whole are what all others are compared with."""
    cases = [case for family in options.families for case in FAMILIES[family](options.shares)]
    return [
        Run(data, samples_of(data, options), seed, case)
        for data in options.logs
        for seed in options.picking
        for case in cases
    ]


def judging_runs(options: argparse.Namespace, results: dict[Run, Result]) -> list[Run]:
    """Rowhaul's budgets and the best contenders, once these are known."""
    runs = []
    for data in options.logs:
        picked = Study.of(data, results).on(options.picking)
        if not picked.unpruned:
            continue
        found = [picked.best_contender(share) for share in options.shares]
        cases = [*budget(options.shares), *(case for case in found if case is not None)]
        for seed in options.judging:
            one = Run(data, samples_of(data, options), seed, cases[0])
            runs += [one.unpruned, *(Run(data, one.samples, seed, case) for case in cases)]
    return runs


def run(runs: Sequence[Run], jobs: int, deadline: float, stage: str) -> dict[Run, Result]:
    """Their results, with a bar of those that are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(stage, total=len(set(runs)), latest="")

        def progress(done: int, total: int, run: Run, result: Result) -> None:
            told = (
                f"none: {result.refused}"
                if result.refused
                else f"AUC {result.auc:.4f}, {result.used_bytes / 1e6:.3f} MB"
            )
            what = f"{run.data} {run.seed} {name_of(run.case)} {percent(run.case.share)}: {told}"
            bar.update(task, completed=done, total=total, latest=what)
            if not console.is_terminal:
                console.print(f"{done}/{total} {what}", highlight=False)

        results = results_of(runs, jobs, progress, deadline)
        bar.update(task, completed=len(results))
    return results


def write(options: argparse.Namespace, results: dict[Run, Result]) -> None:
    """Print the tables as Markdown and keep them beside the results, with the picture."""
    studies = []
    text = []
    for data in options.logs:
        study = Study.of(data, results)
        if not study.on(options.picking).unpruned:
            console.print(f"{data}: no unpruned run yet")
            continue
        found = verdicts(study, options.picking, options.judging, budget(options.shares))
        picked, judged = study.on(options.picking), study.on(options.judging)
        studies.append((picked, judged, found))
        text += [f"## {SOURCES[data].title}", ""]
        if any(one.ours for one in found):
            text += [
                f"AUC in points against unpruned rows, the same seed; {len(options.judging)} seeds judge.",
                "",
                verdict_table(judged, found),
                "",
            ]
        text += [
            f"The best of every family where it is picked: AUC and bytes; {len(options.picking)} seeds pick.",
            "",
            picking_table(picked, options.shares),
            "",
        ]
    if not studies:
        return
    page = "\n".join([opening(studies), *text])
    path = FOLDER / "memory.md"
    path.write_text(page, encoding="utf-8")
    console.print(page, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{path} and {draw([picked for picked, _, _ in studies], FOLDER / PICTURE)}")


if __name__ == "__main__":
    main()
