"""Who is best at a budget: picked on some seeds, judged on others, seed by seed against Rowhaul.

The best of many contenders on the seeds it was picked on is partly the luckiest. So it is compared on seeds
that had no part in picking it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memory_study.contenders import OURS, family_of
from pruning_methods.methods import UNPRUNED, Case
from pruning_methods.runs import Result, Run
from pruning_methods.tables import Estimate, differences

BySeed = Mapping[int, Result]
CHANCE = 1e-9  # of a share, for rounding


def auc(result: Result) -> float:
    """The measure that picks."""
    return result.auc


def log_loss(result: Result) -> float:
    """The other measure."""
    return result.log_loss


@dataclass(frozen=True)
class Study:
    """The results on one log, by case and seed; those that a method refused are left out."""

    data: str
    by_case: Mapping[Case, BySeed]

    @classmethod
    def of(cls, data: str, results: Mapping[Run, Result]) -> Study:
        """From the results on all logs."""
        by_case: dict[Case, dict[int, Result]] = {}
        for run, result in results.items():
            if run.data == data and not result.refused:
                by_case.setdefault(run.case, {})[run.seed] = result
        return cls(data, by_case)

    @property
    def unpruned(self) -> BySeed:
        """The runs that all others are compared with."""
        return self.by_case.get(Case(UNPRUNED), {})

    def on(self, seeds: Iterable[int]) -> Study:
        """The same with these seeds alone."""
        kept = set(seeds)
        some = {
            case: {seed: result for seed, result in of_case.items() if seed in kept}
            for case, of_case in self.by_case.items()
        }
        return Study(self.data, {case: of_case for case, of_case in some.items() if of_case})

    def cases(self, family: str) -> list[Case]:
        """The cases of a family that have a result."""
        return [case for case in self.by_case if family_of(case) == family]

    def change(self, case: Case, of: Callable[[Result], float] = auc) -> Estimate:
        """Of a measure, against the unpruned run of the same seed."""
        return Estimate.of(differences(self.by_case[case], self.unpruned, of))

    def difference(self, ours: Case, theirs: Case, of: Callable[[Result], float] = auc) -> Estimate:
        """How much more of a measure one has than another, seed by seed."""
        return Estimate.of(differences(self.by_case[ours], self.by_case[theirs], of))

    def share(self, case: Case) -> float:
        """Bytes from raw key to row, of those of the unpruned run."""
        of_case = self.by_case[case]
        return statistics.fmean(
            of_case[seed].used_bytes / self.unpruned[seed].used_bytes
            for seed in of_case.keys() & self.unpruned.keys()
        )

    def best(self, cases: Iterable[Case], share: float) -> Case | None:
        """The case of highest AUC among those that take no more than a share of the bytes, on all seeds."""
        whole = [case for case in cases if self.by_case[case].keys() >= self.unpruned.keys()]
        within = [case for case in whole if self.share(case) <= share + CHANCE]
        return max(within, key=lambda case: self.change(case).mean, default=None)

    def best_contender(self, share: float) -> Case | None:
        """The best of all families but Rowhaul's own."""
        return self.best((case for case in self.by_case if family_of(case) != OURS), share)

    def frontier(self, cases: Sequence[Case], shares: Sequence[float]) -> list[tuple[float, float]]:
        """Share of the bytes and change of AUC of the best case at each budget, each once."""
        found = [self.best(cases, share) for share in shares]
        return self.points(case for case in found if case is not None)

    def points(self, cases: Iterable[Case]) -> list[tuple[float, float]]:
        """Share of the bytes and change of AUC of cases, each once."""
        return sorted({(self.share(case), self.change(case).mean) for case in cases})


@dataclass(frozen=True)
class Verdict:
    """One budget on the judging seeds; None where there is no result."""

    share: float
    ours: Case | None
    best: Case | None


def verdicts(
    study: Study, picking: Sequence[int], judging: Sequence[int], ours: Sequence[Case]
) -> list[Verdict]:
    """The best contender at each of our budgets, where both have been run on judging seeds."""
    picked, judged = study.on(picking), study.on(judging)
    found = []
    for case in ours:
        best = picked.best_contender(case.share)
        found.append(
            Verdict(
                case.share,
                case if case in judged.by_case else None,
                best if best in judged.by_case else None,
            )
        )
    return found
