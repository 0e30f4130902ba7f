"""The numbers of a comparison as columns of text, for the terminal and for the report alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rowhaul.schedule.plan import Kind
from rowhaul.simulate.results import BEST_SUBSET, EQUAL, Outcome, Results, describe_shares

KIND_TITLES = {
    Kind.MISS_PULL: "miss pulls",
    Kind.UPDATE_PUSH: "update pushes",
    Kind.EVICT_PUSH: "evict pushes",
    Kind.PEER_SEND: "peer sends",
}

MEASURES: dict[str, Callable[[Outcome], float]] = {
    "total cost": lambda outcome: outcome.cost_seconds,
    "slowest link": lambda outcome: outcome.slowest_link_seconds,
    "iteration": lambda outcome: outcome.iteration_seconds,
}


@dataclass(frozen=True)
class Column:
    """A column of numbers: its title in two lines, and a cell for every outcome."""

    title: tuple[str, str]
    cells: list[str]


def label(outcome: Outcome) -> str:
    """The label of an outcome's row: a comparison stands under its mechanism."""
    training = [share for share in outcome.shares if share]
    each = f"{len(training)}×{training[0]}" if len({*training}) == 1 else describe_shares(outcome.shares)
    if outcome.name.endswith(BEST_SUBSET):
        return f"best subset {each}"
    if outcome.name.endswith(EQUAL):
        return f"equal shares {each}"
    return outcome.name


def is_comparison(outcome: Outcome) -> bool:
    """Whether an outcome was added to be compared with."""
    return outcome.name.endswith((BEST_SUBSET, EQUAL))


def moves_columns(results: Results) -> list[Column]:
    """Rows and bytes moved by all workers together, and hits."""
    outcomes = results.outcomes
    columns = []
    for kind, title in KIND_TITLES.items():
        if kind != Kind.PEER_SEND or any(outcome.rows[kind].any() for outcome in outcomes):
            first, second = title.split()
            columns.append(Column((first, second), [f"{one.rows[kind].sum():,.0f}" for one in outcomes]))
    if any(outcome.all_reduce_rows for outcome in outcomes):
        columns.append(Column(("all-", "reduced"), [f"{one.all_reduce_rows:,.0f}" for one in outcomes]))
    columns.append(Column(("moved", "MB"), [_number(one.moved_bytes / 1e6) for one in outcomes]))
    columns.append(Column(("hits", "%"), [f"{one.hit_ratio * 100:.1f}" for one in outcomes]))
    return columns


def time_columns(results: Results) -> list[Column]:
    """Seconds per iteration, each with its difference to the reference, and the time to decide."""
    scale, unit = time_scale(results)
    columns = []
    for title, measure in MEASURES.items():
        numbers = [_number(measure(one) * scale) for one in results.outcomes]
        differences = [_difference(results, one, measure) for one in results.outcomes]
        cells = [f"{number} {difference:>5}" for number, difference in zip(numbers, differences, strict=True)]
        columns.append(Column((title, f"{unit}    ±%"), cells))
    decisions = ["{:.2f} {:>5.2f}".format(*one.decision_ms) for one in results.outcomes]
    columns.append(Column(("decision, ms", "median   p99"), decisions))
    return columns


def time_scale(results: Results) -> tuple[float, str]:
    """By what to multiply seconds, and the unit that gives."""
    largest = max(measure(outcome) for outcome in results.outcomes for measure in MEASURES.values())
    return (1.0, "s") if largest >= 1 else (1e3, "ms")


def footnotes(results: Results) -> list[str]:
    """Notes on the table: what is averaged, who trains how much, and this run's notes."""
    counted = results.outcomes[0].iterations
    lines = [
        f"Averages per iteration over {counted:,} iterations after the warm-up; rows and bytes of all "
        f"workers together. Times are modelled, as assumed; ±% is the difference to {results.reference}."
    ]
    for outcome in results.outcomes:
        if len({*outcome.shares}) > 1 and not is_comparison(outcome):
            ran = f" (as {outcome.dispatch})" if outcome.dispatch != outcome.name else ""
            lines.append(f"Samples per worker, {outcome.name}: {describe_shares(outcome.shares)}{ran}.")
    slow = [one.name for one in results.outcomes if one.decision_ms[0] > one.iteration_seconds * 1e3]
    if slow:
        lines.append(
            f"Decisions of {', '.join(slow)} took longer here than the modelled iteration beside which "
            "they are made: training would wait for them. --compute says what an iteration takes besides "
            "transfers."
        )
    return [*lines, *results.notes]


def _number(value: float) -> str:
    """Three significant digits or all whole ones."""
    if not value:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _difference(results: Results, outcome: Outcome, measure: Callable[[Outcome], float]) -> str:
    reference = measure(results.reference_outcome)
    if outcome.name == results.reference or not reference:
        return "–"
    return f"{(measure(outcome) / reference - 1) * 100:+.0f}%"
