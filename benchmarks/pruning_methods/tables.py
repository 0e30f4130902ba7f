"""What runs say together: means and intervals over seeds, changes from the unpruned run of the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pruning_methods.logs import SOURCES
from pruning_methods.methods import ADAEMBED, FIITED, METHODS, UNPRUNED, Case
from pruning_methods.runs import Result, Run
from report import console, print_table

# Student's t of a 95 % interval, by the number of seeds.
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
ALLOWED_LOSS = 0.001
# FIITED's tables II and III: largest reduction with little loss, the paper's dims and whole data sets.
PUBLISHED = {
    "criteo": {"AdaEmbed (K = 1)": "50x", "FIITED": "100x", "FIITED 2-D": "133.3x"},
    "criteo-tb": {"AdaEmbed (K = 1)": "66.7x", "FIITED": "100x", "FIITED 2-D": "133.3x"},
    "avazu": {"AdaEmbed (K = 1)": "100x", "FIITED": "400x", "FIITED 2-D": "800x"},
    "movielens": {
        "AdaEmbed (K = 1)": "1.8x (20M)",
        "growing (as ESAPN)": "2.1x (20M, ESAPN)",
        "FIITED": "2.7x (20M)",
        "FIITED 2-D": "17.8x (20M)",
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
    """One case on one data set, over all seeds."""

    case: Case
    results: Sequence[Result]
    unpruned: Sequence[Result]

    @property
    def name(self) -> str:
        """The method, with its number of chunks where that is chosen."""
        return f"FIITED (K = {self.case.chunks})" if self.case.method == FIITED else self.case.method

    def mean(self, of: Callable[[Result], float]) -> Estimate:
        """Of a field."""
        return Estimate.of([of(one) for one in self.results])

    def change(self, of: Callable[[Result], float]) -> Estimate:
        """Of a field, against the unpruned run with the same seed."""
        return Estimate.of([of(a) - of(b) for a, b in zip(self.results, self.unpruned, strict=True)])

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
        """Of a field of the unpruned runs."""
        return statistics.fmean(of(one) for one in self.unpruned)


def lines_of(results: dict[Run, Result], data: str) -> list[Line]:
    """The cases of a data set, by method and ratio."""
    by_case: dict[Case, dict[int, Result]] = {}
    for run, result in results.items():
        if run.data == data:
            by_case.setdefault(run.case, {})[run.seed] = result
    plain = by_case[Case(UNPRUNED)]
    lines = [
        Line(case, [by_seed[seed] for seed in sorted(by_seed)], [plain[seed] for seed in sorted(by_seed)])
        for case, by_seed in by_case.items()
    ]
    return sorted(lines, key=lambda line: (METHODS.index(line.case.method), line.case.ratio))


def print_data(lines: Sequence[Line], data: str) -> None:
    """All cases of a data set."""
    rows = []
    for line in lines:
        held = line.mean(lambda one: one.held_bytes).mean
        rows.append(
            [
                line.case.method + (f", {line.case.ratio:.2%}" if line.case.ratio else ""),
                f"{line.mean(lambda one: one.auc).mean:.4f}",
                line.change(lambda one: one.auc).points() if line.case.ratio else "",
                f"{line.mean(lambda one: one.accuracy).mean:.4f}",
                line.change(lambda one: one.accuracy).points() if line.case.ratio else "",
                f"{line.mean(lambda one: one.log_loss).mean:.4f}",
                f"{line.value_reduction:.1f}x",
                f"{held / 1e6:.2f}",
                f"{held / line.mean_of_unpruned(lambda one: one.held_bytes):.1%}",
            ]
        )
    seeds = len(lines[0].results)
    print_table(
        f"{SOURCES[data].title}: {seeds} seeds, changes in points with 95 % intervals; bytes as allocated",
        [
            "",
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
            best = max(
                (line for line in of_method if line.change(of).mean >= -ALLOWED_LOSS),
                key=lambda line: line.value_reduction,
                default=None,
            )
            cells.append("none" if best is None else f"{best.value_reduction:.1f}x")
            cells.append("" if best is None else f"{best.held_reduction:.1f}x")
        rows.append([*cells, PUBLISHED.get(data, {}).get(method, "")])
    print_table(
        f"{SOURCES[data].title}: largest reduction measured at a loss of 0.1 % or less",
        ["", "values, by AUC", "all bytes", "values, by accuracy", "all bytes", "FIITED reports"],
        rows,
    )


def print_against(lines: Sequence[Line], data: str) -> None:
    """FIITED against AdaEmbed at equal ratios, seed by seed."""
    rows = []
    for ours in (line for line in lines if line.case.method == FIITED):
        theirs = [line for line in lines if line.case == Case(ADAEMBED, ours.case.ratio)]
        if not theirs:
            continue
        pairs = Line(ours.case, ours.results, theirs[0].results)
        rows.append(
            [
                f"{ours.case.ratio:.2%}",
                pairs.change(lambda one: one.auc).points(),
                pairs.change(lambda one: one.accuracy).points(),
                f"{1000 * pairs.change(lambda one: one.log_loss).mean:+.2f}",
            ]
        )
    print_table(
        f"{SOURCES[data].title}: FIITED minus AdaEmbed, in points with 95 % intervals",
        ["pruned", "AUC", "accuracy", "log loss, in 0.001"],
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
