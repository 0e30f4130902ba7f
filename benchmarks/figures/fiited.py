"""FIITED's tables 2 and 3 and figures 8 and 11 to 15, redone: models trained on whole small logs.

Results are kept in benchmarks/results/memory, which benchmarks/memory.py shares: what was trained once is
not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from figures import plots
from figures.published import FIITED as SAYS
from figures.sections import Section, Table, percent, span, times
from pruning_methods.logs import SOURCES
from pruning_methods.methods import ADAEMBED, FIITED, GROWING, LINEAR, MIXED, TWO_DIMENSIONS, UNPRUNED, Case
from pruning_methods.runs import Result, Run, results_of
from pruning_methods.tables import PUBLISHED, Estimate, Line, differences, largest_reduction, lines_of
from report import console
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.deciding.decision import ratios_by_place
from rowhaul.pruning.deciding.entries import entry_words

SEEDS = 3
PAPER_CHUNKS = 2
QUICK_SAMPLES, SHORT_SAMPLES = 60_000, 100_000
FIGURE_8 = (0.625, 0.75, 0.875, 0.9375, 0.99)
RATIOS = {  # those of figure 8, of tables 2 and 3, and some that lie around them
    "criteo": (*FIGURE_8, 0.995, 0.999),
    "criteo-tb": (0.75, 0.9375, 0.985, 0.99, 0.995),
    "avazu": (0.75, 0.9375, 0.99, 0.995, 0.9975, 0.999),
    "movielens": (0.1, 0.25, 0.45, 0.55, 0.63),
}
TWO_DIMENSIONS_RATIOS = {
    "criteo": (0.9925, 0.995, 0.999),
    "criteo-tb": (0.9375, 0.9925, 0.995),
    "avazu": (0.9375, 0.9975, 0.99875),
    "movielens": (0.5, 0.63, 0.75, 0.944),
}
CHUNKS = (1, 2, 4, 8)
MOVED = (0.5, 0.7, 0.9)
INDEX_BYTES = 23  # of an entry's place in a large index
METHODS = {
    ADAEMBED: "AdaEmbed",
    FIITED: "FIITED, dynamic",
    LINEAR: "FIITED, manual",
    TWO_DIMENSIONS: "FIITED-2D",
    MIXED: "mixed dimensions",
    GROWING: "growing rows",
}


def _accuracy(result: Result) -> float:
    return result.accuracy


def _auc(result: Result) -> float:
    return result.auc


@dataclass
class Training:
    """Trains what the sections ask for, each once."""

    quick: bool
    jobs: int
    _lines: dict[str, list[Line]] = field(default_factory=dict)

    def quality(self, data: str) -> list[Line]:
        """The cases of tables 2 and 3 and figure 8."""
        if data not in self._lines:
            samples = QUICK_SAMPLES if self.quick else SOURCES[data].samples
            runs = [Run(data, samples, seed, case) for seed in range(SEEDS) for case in quality_cases(data)]
            self._lines[data] = lines_of(results_of(runs, self.jobs, _ignore), data)
        return self._lines[data]

    def moves(self) -> list[Line]:
        """All numbers of chunks, ratios and shapes of figures 11 to 15, on a short log."""
        shapes = product(("power", "linear"), MOVED, CHUNKS)
        cases = [Case(FIITED, ratio, chunks, shape) for shape, ratio, chunks in shapes]
        samples = QUICK_SAMPLES if self.quick else SHORT_SAMPLES
        runs = [Run("criteo", samples, 0, case) for case in (Case(UNPRUNED), *cases)]
        return lines_of(results_of(runs, self.jobs, _ignore), "criteo")[1:]


def _ignore(done: int, total: int, run: Run, result: Result) -> None:
    if done % 20 == 0:
        console.print(f"{done} of {total} runs")


def quality_cases(data: str) -> list[Case]:
    """With as many chunks as the paper; 2-D is built upon manual ratios there."""
    cases = [Case(UNPRUNED)]
    for ratio in RATIOS[data]:
        cases += [Case(ADAEMBED, ratio), Case(FIITED, ratio, PAPER_CHUNKS), Case(LINEAR, ratio, PAPER_CHUNKS)]
    cases += [Case(TWO_DIMENSIONS, ratio, PAPER_CHUNKS, "linear") for ratio in TWO_DIMENSIONS_RATIOS[data]]
    if data == "criteo":
        cases += [Case(MIXED, ratio) for ratio in FIGURE_8[:-1]]
    if data == "movielens":
        cases += [Case(GROWING, ratio) for ratio in (0.25, 0.55)]
    return cases


def tables_2_and_3(training: Training) -> Section:
    """The largest reduction that costs hardly any accuracy, or AUC."""
    rows, details = [], []
    methods = [method for method in METHODS if method != MIXED]
    for data, stated in PUBLISHED.items():
        lines = training.quality(data)
        cells = [SOURCES[data].title]
        for method in methods:
            of_method = [line for line in lines if line.case.method == method]
            found = [within_budget(of_method, of) for of in (_accuracy, _auc)]
            cells.append(" / ".join([stated.get(method, "-"), *found]) if of_method else "-")
            details += [
                [
                    f"{SOURCES[data].title}, {METHODS[method]}",
                    f"{line.value_reduction:.1f}x",
                    line.change(_accuracy).points(),
                    line.change(_auc).points(),
                ]
                for line in of_method
            ]
        rows.append(cells)
    return Section(
        "fiited-tables",
        "FIITED, tables 2 and 3: the largest reduction of values",
        "The paper's reduction, at most 0.1 points of accuracy lost / the largest one tried here at which no "
        f"more than that is lost, on the mean of {SEEDS} seeds / the same for AUC. `>` marks the largest "
        "that was tried. Two chunks a row as in the paper, rows of 32 (MovieLens: 128). Then every reduction "
        "that was tried, with changes in points and 95 % intervals.",
        [
            Table(["paper / accuracy / AUC", *(METHODS[method] for method in methods)], rows, all_text=True),
            Table(["", "reduction", "accuracy", "AUC"], details),
        ],
    )


def within_budget(lines: Sequence[Line], of: Callable[[Result], float]) -> str:
    """The largest reduction that loses no more than is allowed, marked if no larger one was tried."""
    best = largest_reduction(lines, of)
    if best is None:
        return "none"
    is_last = best.value_reduction == max(line.value_reduction for line in lines)
    return f"{'> ' if is_last else ''}{best.value_reduction:.1f}x"


def figure_8(training: Training, out: Path) -> Section:
    """Accuracy against the share pruned."""
    methods = (ADAEMBED, FIITED, LINEAR, MIXED)
    lines = {
        (line.case.method, line.case.ratio): line
        for line in training.quality("criteo")
        if line.case.method in methods and line.case.ratio in FIGURE_8
    }
    rows, series = [], {}
    for method in methods:
        changes = [
            lines[method, ratio].change(_accuracy) if (method, ratio) in lines else None for ratio in FIGURE_8
        ]
        rows.append([METHODS[method], *("-" if one is None else one.points() for one in changes)])
        series[METHODS[method]] = [float("nan") if one is None else 100 * one.mean for one in changes]

    def against(ours: str, theirs: str) -> list[float]:
        both = [ratio for ratio in FIGURE_8 if (ours, ratio) in lines and (theirs, ratio) in lines]
        return [
            Estimate.of(differences(lines[ours, ratio].results, lines[theirs, ratio].results, _accuracy)).mean
            for ratio in both
        ]

    def points(values: Sequence[float]) -> str:
        return span([100 * value for value in values], lambda value: f"{round(value, 2) + 0.0:+.2f}")

    panel = plots.Panel(
        "FIITED, figure 8: accuracy minus the unpruned model's",
        [f"{100 * ratio:g} %" for ratio in FIGURE_8],
        series,
        "pruned",
        "points",
        kind="lines",
    )
    better = [points(against(ours, theirs)) for ours in (FIITED, LINEAR) for theirs in (ADAEMBED, MIXED)]
    return Section(
        "fiited-08",
        "FIITED, figure 8: accuracy under pruning",
        f"The Criteo-like log, changes from the unpruned model in points, mean of {SEEDS} seeds with 95 % "
        "intervals.",
        [Table(["pruned", *(f"{100 * ratio:g} %" for ratio in FIGURE_8)], rows)],
        [
            (
                SAYS["better"],
                f"dynamic minus AdaEmbed {better[0]}, minus mixed dimensions {better[1]}; "
                f"manual {better[2]} and {better[3]} points",
            ),
            (SAYS["similar"], f"dynamic minus manual {points(against(FIITED, LINEAR))} points"),
            (SAYS["mixed"], "nor here: a row of 32 has one value at least"),
        ],
        plots=[plots.save(out / "fiited-08.png", [panel])],
    )


def figure_11(training: Training, out: Path) -> Section:
    """Memory that is not values."""
    dim = SOURCES["criteo"].dim
    found = {
        (line.case.ratio, line.case.chunks): line for line in training.moves() if line.case.ratios == "power"
    }
    of_entry = {
        utility: [
            4 * entry_words(PruneSettings(chunks=chunks, utility=utility)) / (4 * dim) for chunks in CHUNKS
        ]
        for utility in ("gradient", "access")
    }
    measured = {ratio: [overhead(found[ratio, chunks], dim) for chunks in CHUNKS] for ratio in MOVED}
    rows = [
        ["paper: 3 K / D", *(percent(3 * chunks / dim) for chunks in CHUNKS)],
        ["a row's entry, by gradients", *map(percent, of_entry["gradient"])],
        ["a row's entry, by accesses", *map(percent, of_entry["access"])],
        ["serving: paper and here K / D", *(percent(chunks / dim) for chunks in CHUNKS)],
        *(
            [f"measured of all rows, {percent(ratio, 0)} pruned", *map(percent, values)]
            for ratio, values in measured.items()
        ),
    ]
    panel = plots.Panel(
        "FIITED, figure 11: memory beside values and their state",
        CHUNKS,
        {f"{percent(ratio, 0)} pruned": values for ratio, values in measured.items()},
        "chunks of a row",
        "of the unpruned values",
    )
    return Section(
        "fiited-11",
        "FIITED, figure 11: memory overhead",
        f"Of the bytes of the values, rows of {dim}. Measured: everything allocated for rows but values and "
        "optimizer state, over the values of the unpruned model (the short Criteo-like log, pruned by "
        f"gradients): entries and their places in the index, which take {INDEX_BYTES} to 47 bytes each.",
        [Table(["chunks of a row", *map(str, CHUNKS)], rows)],
        [
            (SAYS["overhead"], f"an entry: {span(of_entry['gradient'])}"),
            (
                SAYS["linear overhead"],
                "; ".join(
                    f"{percent(ratio, 0)} pruned: {percent(values[0])} to {percent(values[-1])}"
                    for ratio, values in measured.items()
                ),
            ),
        ],
        plots=[plots.save(out / "fiited-11.png", [panel])],
    )


def overhead(line: Line, dim: int) -> float:
    """Bytes beside values and their optimizer state, over the bytes of the unpruned values."""
    (result,) = line.results.values()
    state = result.value_bytes * line.case.chunks / dim  # row-wise Adagrad: one number a chunk
    return (result.held_bytes - result.value_bytes - state) / (4 * dim * result.num_rows)


def figures_12_to_15(training: Training, out: Path) -> Section:
    """What is read, evicted and allocated, by chunks of a row."""
    kinds: dict[str, Callable[[Result], float]] = {
        "read": lambda one: one.chunks_read / one.ids_read,
        "evicted": lambda one: one.evicted / one.num_rows,
        "allocated": lambda one: one.allocated / one.num_rows,
    }
    lines = {(one.case.ratios, one.case.ratio, one.case.chunks): one for one in training.moves()}
    shapes = {
        f"{shape}, {percent(ratio, 0)}": ratios_by_place(shape, ratio, CHUNKS[-1]).tolist()
        for shape, ratio in product(("power", "linear"), MOVED)
    }
    rows, panels, memory = [], [], {}
    for kind, of in kinds.items():
        series = {}
        for shape, ratio in product(("power", "linear"), MOVED):
            values = [lines[shape, ratio, chunks].mean(of).mean for chunks in CHUNKS]
            name = f"{shape}, {percent(ratio, 0)}"
            series[name] = values
            rows.append([f"{kind}, {name}", *(f"{value:.2f}" for value in values)])
            memory[kind, shape, ratio] = [
                value / chunks for value, chunks in zip(values, CHUNKS, strict=True)
            ]
        panels.append(
            plots.Panel(
                f"FIITED, figures 13-15: chunks {kind}", CHUNKS, series, "chunks of a row", kind="lines"
            )
        )
    places = [str(place + 1) for place in range(CHUNKS[-1])]
    panels.append(
        plots.Panel(
            "FIITED, figure 12: share pruned, K = 8", places, shapes, "place in the row", kind="lines"
        )
    )

    def growth(kind: str) -> str:
        return span([values[-1] / values[0] for key, values in memory.items() if key[0] == kind], times)

    return Section(
        "fiited-13",
        "FIITED, figures 12 to 15: what is read, evicted and allocated",
        "The short Criteo-like log, trained once and pruned every 20 steps by gradients. Chunks read are per "
        "id read, chunks evicted and allocated per row of the unpruned model; their memory is that over K. "
        "`power` is the paper's a = 0.5; `linear` is Rowhaul's, which spreads evenly around the mean. The "
        "first table is figure 12, by place in the row.",
        [
            Table(["pruned", *places], [[name, *map(percent, values)] for name, values in shapes.items()]),
            Table(["chunks of a row", *map(str, CHUNKS)], rows),
        ],
        [
            (
                SAYS["same ratios"],
                f"`linear` from {percent(shapes['linear, 90 %'][0])} to "
                f"{percent(shapes['linear, 90 %'][-1])}, `power` from {percent(shapes['power, 90 %'][0])} to "
                f"{percent(shapes['power, 90 %'][-1])}",
            ),
            (
                SAYS["more chunks"],
                f"memory with K = 8 over K = 1: read {growth('read')}, evicted {growth('evicted')}, "
                f"allocated {growth('allocated')}",
            ),
        ],
        plots=[plots.save(out / "fiited-13.png", panels)],
    )
