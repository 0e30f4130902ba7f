"""What runs say together: means and intervals over seeds.

Runs of one seed see the same samples in the same order and start from the same values, so methods are
compared seed by seed: the interval is that of the differences; what differs between logs is no part of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def largest_reduction(lines: Sequence[Line], of: Callable[[Result], float]) -> Line | None:
    """The line with the fewest bytes of values that loses no more than 0.1 % of a metric."""
    allowed = [line for line in lines if line.change(of).mean >= -ALLOWED_LOSS]
    return max(allowed, key=lambda line: line.value_reduction, default=None)
