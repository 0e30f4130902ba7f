"""The figures and tables of ESD, Herald, HypeReca and FIITED, redone on MovieLens-1M and generated logs.

    python benchmarks/papers.py [--quick] [--only esd-04,herald-11] [--jobs 2] [--out FOLDER]

Writes papers.md, with every table beside what the paper states, and a plot a figure: about half an hour on
2 cores, `--quick` (fewer samples) about 8 minutes. What the numbers rest on is written at the top of it.
What was measured is kept beside it: `--only` measures some sections again and keeps the others, and
`--only ''` writes the page again, after a judgement (figures/reasons.py) has changed. Results of FIITED's
models are kept where benchmarks/memory.py keeps its own.
docs/papers.md is that file of a full run without the plots:

    grep -v '^!' benchmarks/.cache/papers/papers.md | cat -s > docs/papers.md
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from datasets import CACHE
from figures import (
    esd,
    esd_sensitivity,
    fiited,
    fiited_rows,
    fiited_times,
    herald,
    herald_scheduler,
    hypereca,
    popularity,
    solver,
)
from figures.lab import VANILLA, Lab
from figures.published import ESD_TRANSFER_SHARE
from figures.reasons import JUDGEMENTS
from figures.sections import Section, Table, percent
from figures.traces import Trace, generated, movielens
from report import console, print_machine

SAMPLES = 409_600  # 400 iterations of 8 workers with 128 samples each
MOVIELENS_SAMPLES = 819_200
QUICK_SAMPLES = 102_400
POPULARITY_SAMPLES = 1_000_000
TITLE = """\
# The figures of ESD, Herald, HypeReca and FIITED, redone

`python benchmarks/papers.py` runs the mechanisms of these papers, and Rowhaul's own, and puts what comes
out beside what the papers state in their text (nothing is read off their plots):

* **ESD**: Li et al., *Embedding Samples Dispatching for Recommendation Model Training in Edge
  Environments*; figures are counted as there, one lower than in its journal version.
* **Herald** with its allocation **LAIA**: Zeng et al., *Accelerating Neural Recommendation Training with
  Embedding Scheduling*, NSDI '24.
* **HypeReca**: He et al., *Distributed Heterogeneous In-Memory Embedding Database for Training Recommender
  Models*, USENIX ATC '25: what it says about the data.
* **FIITED**: Luo et al., *Fine-Grained Embedding Dimension Optimization During Training for Recommender
  Systems*: what it reports of public data."""
ASSUMPTIONS = """\
**What is measured, and how.** The scheduler runs every mechanism over the same {samples:,} samples of
each log ({movies:,} of MovieLens), the first 10 iterations left out, as in the papers. Cache ratios are
shares of the distinct rows of these samples (of all of MovieLens), so caches fill up and evict; the
papers' are shares of the whole tables. A row is dim x 4 bytes and moves without optimizer state; a row
never seen before is pulled too. Cost is ESD's: bytes over bandwidth, added up over all moves, both ways.
An iteration is pushes, then pulls, then computing, one after the other, each as long as its slowest link
takes; the store's link is no bottleneck. Deciding is hidden behind the iteration before.
Counts, costs and hit ratios are the same at every run; milliseconds of decisions are CPU time of this
machine.

**Computing** takes a time that ESD does not state. It says that transfer takes up to {share} of
the training time on Criteo with the default setting: computing is set to {compute:.1f} µs a sample, which
makes it so for the vanilla run on the Criteo-like log, and is left alone in all of ESD's figures.
Speed-ups hang on this number, cost reductions do not.

**Logs.** S1/W1 `criteo`, S2/W3 `avazu` and S3/W4 `criteo-search` are generated (seed 0): they match what
is published about the real logs (see [generator.md](generator.md)) and are not the logs. `criteo` and
`avazu` were also fitted to what `random`, `esd:1` and `joint` cost beside LAIA on the first 10,000 samples
of the real logs, with 16 samples a worker; nothing of the kind is known for `criteo-search`. MovieLens-1M is
real: user and movie in the order of time; Herald's W2 is MovieLens-25M, ESD has none. HET and FAE run
synchronously, as in both papers; that makes HET the vanilla run. `joint` is Rowhaul's own dispatcher.

**FIITED's models** are a small DLRM trained once over a log of 150,000 to 225,000 samples (MovieLens-1M: all,
in random order) and scored on later ones, pruned every 20 steps by gradients, row-wise Adagrad: the set-up of
[pruning.md](pruning.md#what-it-keeps-measured), with the paper's two chunks a row. Rows that grow with their
popularity stand in for ESAPN, whose policy networks are not built here."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: a few minutes")
    parser.add_argument("--only", help="sections to measure, by their key, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes that train FIITED's models")
    parser.add_argument("--out", type=Path, default=CACHE / "papers")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    samples = QUICK_SAMPLES if options.quick else SAMPLES

    criteo, avazu, search = (generated(preset, samples) for preset in ("criteo", "avazu", "criteo-search"))
    movies = movielens(samples if options.quick else MOVIELENS_SAMPLES)
    share = ESD_TRANSFER_SHARE
    vanilla = Lab(compute_seconds=0.0).run(criteo, VANILLA, esd.DEFAULT)
    lab = Lab(vanilla.iteration_seconds * (1 - share) / share / esd.DEFAULT.per_worker)

    makers = sections(lab, criteo, avazu, search, movies, options)
    chosen = list(makers) if options.only is None else [key for key in options.only.split(",") if key]
    if unknown := set(chosen) - set(makers):
        parser.error(f"no section is called {', '.join(sorted(unknown))}; known are {', '.join(makers)}")
    with console.capture() as capture:
        print_machine("scipy", "matplotlib")
    assumptions = ASSUMPTIONS.format(
        samples=samples, movies=len(movies), share=percent(share, 0), compute=1e6 * lab.compute_seconds
    )
    header = [TITLE, capture.get().strip(), assumptions]
    measured = options.out / ("measured-quick" if options.quick else "measured")
    for key in chosen:
        began = time.perf_counter()
        section = makers[key]()
        section.keep(measured)
        console.print(f"{section.title}: {time.perf_counter() - began:.0f} s")
        write_page(options.out / "papers.md", header, measured, list(makers))
    write_page(options.out / "papers.md", header, measured, list(makers))
    console.print(f"written to {options.out / 'papers.md'}")


def write_page(path: Path, header: list[str], measured: Path, keys: list[str]) -> None:
    """Write all sections that have been measured so far, in the order of ``keys``."""
    files = [file for key in keys if (file := measured / f"{key}.json").exists()]
    made = [Section.kept(file) for file in files]
    verdicts = [[one.title, JUDGEMENTS[one.key].verdict] for one in made]
    summary = Table(["", "reproduced"], verdicts, all_text=True)
    parts = [*header, summary.markdown(), *(one.markdown() for one in made)]
    path.write_text("\n\n".join(parts) + "\n")


def sections(
    lab: Lab, criteo: Trace, avazu: Trace, search: Trace, movies: Trace, options: argparse.Namespace
) -> dict[str, Callable[[], Section]]:
    """How to make each section, by its key."""
    quick, out = options.quick, options.out
    training = fiited.Training(quick, options.jobs)
    edge = [
        esd.Workload("S1", criteo, in_paper=True),
        esd.Workload("S2", avazu, in_paper=True),
        esd.Workload("S3", search, in_paper=True),
        esd.Workload("", movies, in_paper=False),
    ]
    sensitivity = [edge[1], edge[3]]
    cloud = [criteo, movies, avazu, search]

    def long_logs() -> list[Trace]:
        if quick:
            return cloud
        logs = [generated(trace.name, POPULARITY_SAMPLES) for trace in (criteo, avazu, search)]
        return [logs[0], movielens(POPULARITY_SAMPLES), *logs[1:]]

    clusters, most_workers = ((8, 16), 6) if quick else ((8, 16, 32, 64), 7)
    return {
        "esd-04": lambda: esd.figure_4(lab, edge, out),
        "esd-05": lambda: esd.figure_5(lab, edge, out),
        "esd-06": lambda: esd.figure_6(lab, edge, out),
        "esd-07": lambda: esd_sensitivity.figure_7(lab, sensitivity, out),
        "esd-08": lambda: esd_sensitivity.figure_8(lab, sensitivity, out),
        "esd-09": lambda: esd_sensitivity.figure_9(lab, sensitivity, out),
        "esd-10": lambda: esd_sensitivity.figure_10(lab, edge, out),
        "esd-table-2": lambda: solver.table_2(criteo, 256 if quick else 1024, out),
        "herald-03": lambda: popularity.figure_3(cloud, out),
        "herald-06": lambda: popularity.figures_6_and_10(long_logs(), out),
        "herald-11": lambda: herald.figure_11(lab, cloud, out),
        "herald-table-2": lambda: herald.table_2(lab, cloud[:2]),
        "herald-12": lambda: herald_scheduler.figure_12(criteo, out),
        "herald-13": lambda: herald_scheduler.figure_13(lab, criteo, clusters, out),
        "herald-16": lambda: herald.figure_16(lab, cloud, out),
        "herald-20": lambda: herald_scheduler.figure_20(lab, cloud[:2], most_workers, out),
        "hypereca-05": hypereca.figure_5,
        "hypereca-16": lambda: hypereca.figure_16([criteo, generated("taobao", len(criteo))], out),
        "hypereca-18": lambda: hypereca.figure_18(out),
        "fiited-table-1": fiited_rows.table_1,
        "fiited-02": lambda: fiited_rows.figures_2_and_3(quick, out),
        "fiited-tables": lambda: fiited.tables_2_and_3(training),
        "fiited-08": lambda: fiited.figure_8(training, out),
        "fiited-10": lambda: fiited_times.figure_10(quick, out),
        "fiited-11": lambda: fiited.figure_11(training, out),
        "fiited-13": lambda: fiited.figures_12_to_15(training, out),
    }


if __name__ == "__main__":
    main()
