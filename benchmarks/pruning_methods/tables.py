"""What runs say together: means and intervals over seeds.

Runs of one seed see the same samples in the same order and start from the same values, so methods are
compared seed by seed: the interval is that of the differences; what differs between logs is no part of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pruning_methods.logs import SOURCES
from pruning_methods.methods import (
    ADAEMBED,
    FIITED,
    GROWING,
    LINEAR,
    METHODS,
    TWO_DIMENSIONS,
    UNPRUNED,
    Case,
)
from pruning_methods.runs import Result, Run
from report import console, print_table

# Student's t of a 95 % interval, by the number of seeds.
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
ALLOWED_LOSS = 0.001
# FIITED's tables II and III: largest reduction with little loss, the paper's dims and whole data sets.
PUBLISHED = {
    "criteo": {ADAEMBED: "50x", FIITED: "100x", LINEAR: "100x", TWO_DIMENSIONS: "133.3x"},
    "criteo-tb": {ADAEMBED: "66.7x", FIITED: "100x", LINEAR: "100x", TWO_DIMENSIONS: "133.3x"},
    "avazu": {ADAEMBED: "100x", FIITED: "400x", LINEAR: "200x", TWO_DIMENSIONS: "800x"},
    "movielens": {  # as good as ESAPN, on MovieLens-20M
        ADAEMBED: "1.8x (20M)",
        GROWING: "2.1x (20M, ESAPN)",
        FIITED: "2.2x (20M)",
        LINEAR: "2.7x (20M)",
        TWO_DIMENSIONS: "17.8x (20M)",
    },
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half of its 95 % interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one value a seed."""
        if len(values) < 2:
            return cls(values[0], math.nan)
        half = _T95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)

    def points(self) -> str:
        """As percentage points."""
        return f"{100 * self.mean:+.2f} ± {100 * self.half:.2f}"


@dataclass(frozen=True)
class Line:
    """One case on one data set; results are by seed."""

    case: Case
    results: Mapping[int, Result]
    unpruned: Mapping[int, Result]

    @property
    def name(self) -> str:
        """The method, with its number of chunks where that is chosen."""
        return f"FIITED (K = {self.case.chunks})" if self.case.method == FIITED else self.case.method

    def mean(self, of: Callable[[Result], float]) -> Estimate:
        """Of a field."""
        return Estimate.of([of(one) for one in self.results.values()])

    def change(self, of: Callable[[Result], float]) -> Estimate:
        """Of a field, against the unpruned run with the same seed."""
        return Estimate.of(differences(self.results, self.unpruned, of))

    @property
    def value_reduction(self) -> float:
        """How many times fewer bytes of values than unpruned."""
        return (
            self.mean_of_unpruned(lambda one: one.value_bytes) / self.mean(lambda one: one.value_bytes).mean
        )

    @property
    def held_reduction(self) -> float:
        """The same of all bytes: values, state and index, as allocated."""
        return self.mean_of_unpruned(lambda one: one.held_bytes) / self.mean(lambda one: one.held_bytes).mean

    def mean_of_unpruned(self, of: Callable[[Result], float]) -> float:
        """Of a field of the unpruned runs with the same seeds."""
        return statistics.fmean(of(self.unpruned[seed]) for seed in self.results)


def differences(
    ours: Mapping[int, Result], theirs: Mapping[int, Result], of: Callable[[Result], float]
) -> list[float]:
    """How much more of a field we have, for every seed that both have."""
    return [of(ours[seed]) - of(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def lines_of(results: dict[Run, Result], data: str) -> list[Line]:
    """The cases of a data set, by method and ratio."""
    by_case: dict[Case, dict[int, Result]] = {}
    for run, result in results.items():
        if run.data == data:
            by_case.setdefault(run.case, {})[run.seed] = result
    plain = by_case[Case(UNPRUNED)]
    lines = [Line(case, by_seed, plain) for case, by_seed in by_case.items()]
    return sorted(lines, key=lambda line: (METHODS.index(line.case.method), line.case.ratio))


def pairs_with_adaembed(lines: Sequence[Line], method: str) -> list[tuple[Line, Line]]:
    """The lines of a method, each with that of AdaEmbed at the same ratio."""
    others = {line.case.ratio: line for line in lines if line.case.method == ADAEMBED}
    ours = [line for line in lines if line.case.method == method]
    return [(line, others[line.case.ratio]) for line in ours if line.case.ratio in others]


def largest_reduction(lines: Sequence[Line], of: Callable[[Result], float]) -> Line | None:
    """The line with the fewest bytes of values that loses no more than 0.1 % of a metric."""
    allowed = [line for line in lines if line.change(of).mean >= -ALLOWED_LOSS]
    return max(allowed, key=lambda line: line.value_reduction, default=None)


def print_data(lines: Sequence[Line], data: str) -> None:
    """All cases of a data set."""
    rows = []
    for line in lines:
        is_plain = line.case.method == UNPRUNED
        held = line.mean(lambda one: one.held_bytes).mean
        rows.append(
            [
                line.case.method + ("" if is_plain else f", {line.case.ratio:.2%}"),
                str(len(line.results)),
                f"{line.mean(lambda one: one.auc).mean:.4f}",
                "" if is_plain else line.change(lambda one: one.auc).points(),
                f"{line.mean(lambda one: one.accuracy).mean:.4f}",
                "" if is_plain else line.change(lambda one: one.accuracy).points(),
                f"{line.mean(lambda one: one.log_loss).mean:.4f}",
                f"{line.value_reduction:.1f}x",
                f"{held / 1e6:.2f}",
                f"{held / line.mean_of_unpruned(lambda one: one.held_bytes):.1%}",
            ]
        )
    print_table(
        f"{SOURCES[data].title}: changes in points with 95 % intervals; bytes as allocated",
        [
            "",
            "seeds",
            "AUC",
            "change",
            "accuracy",
            "change",
            "log loss",
            "fewer value bytes",
            "MB held",
            "of unpruned",
        ],
        rows,
    )


def print_largest(lines: Sequence[Line], data: str) -> None:
    """The largest reduction of each method at which no more than 0.1 % is lost."""
    rows = []
    for method in METHODS[1:]:
        of_method = [line for line in lines if line.case.method == method]
        if not of_method:
            continue
        cells: list[str] = [method]
        for of in (lambda one: one.auc, lambda one: one.accuracy):
            best = largest_reduction(of_method, of)
            cells.append("none" if best is None else f"{best.value_reduction:.1f}x")
            cells.append("" if best is None else f"{best.held_reduction:.1f}x")
        rows.append([*cells, PUBLISHED.get(data, {}).get(method, "")])
    print_table(
        f"{SOURCES[data].title}: largest reduction measured at a loss of 0.1 % or less",
        ["", "values, by AUC", "all bytes", "values, by accuracy", "all bytes", "FIITED reports"],
        rows,
    )


def print_against(lines: Sequence[Line], data: str) -> None:
    """Pieces of rows against whole ones (AdaEmbed) at equal ratios, seed by seed."""
    rows = []
    for method in (FIITED, LINEAR, TWO_DIMENSIONS):
        for ours, theirs in pairs_with_adaembed(lines, method):
            of_auc = differences(ours.results, theirs.results, lambda one: one.auc)
            of_accuracy = differences(ours.results, theirs.results, lambda one: one.accuracy)
            of_loss = differences(ours.results, theirs.results, lambda one: one.log_loss)
            rows.append(
                [
                    f"{method}, {ours.case.ratio:.2%}",
                    Estimate.of(of_auc).points(),
                    f"{sum(one > 0 for one in of_auc)} of {len(of_auc)}",
                    Estimate.of(of_accuracy).points(),
                    f"{sum(one > 0 for one in of_accuracy)} of {len(of_accuracy)}",
                    Estimate.of(of_loss).points(),
                ]
            )
    print_table(
        f"{SOURCES[data].title}: minus AdaEmbed with the same seed, in points with 95 % intervals",
        ["", "AUC", "seeds better", "accuracy", "seeds better", "log loss, in 0.01"],
        rows,
    )


def print_budgets(results: dict[Run, Result]) -> None:
    """The most bytes that were ever held under a budget."""
    rows = [
        [
            run.case.method,
            f"{run.case.budget:,}",
            f"{result.peak_bytes:,}",
            f"{result.peak_bytes / run.case.budget:.1%}",
            f"{result.num_looks}",
        ]
        for run, result in results.items()
    ]
    columns = ["", "bytes allowed", "most held after any step", "of the budget", "steps"]
    print_table("Budgets, checked after every step", columns, rows)


def print_times(lines: Sequence[Line]) -> None:
    """CPU time of whole iterations and of scoring, relative to unpruned."""
    rows = []
    for line in lines:
        train = line.mean(lambda one: one.train_seconds).mean
        score = line.mean(lambda one: one.score_seconds).mean
        plain_train = line.mean_of_unpruned(lambda one: one.train_seconds)
        plain_score = line.mean_of_unpruned(lambda one: one.score_seconds)
        if line.case.method != UNPRUNED and line.case.ratio == 0.9375:
            rows.append([line.name, 1e3 * train, f"{train / plain_train:.2f}", f"{score / plain_score:.2f}"])
    console.print("CPU time beside other work is a hint only; benchmarks/prune_step.py times the sparse part")
    print_table(
        "CPU time of an iteration, 93.75 % pruned", ["", "ms", "of unpruned", "scoring, of unpruned"], rows
    )
