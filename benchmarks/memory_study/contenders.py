"""What is compared: ways to hold rows in few bytes, by family, and their names in tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pruning_methods.methods import (
    ADAEMBED,
    BUDGET,
    FIITED,
    HASHING,
    MIXED,
    TWO_DIMENSIONS,
    UNIFORM,
    UNPRUNED,
    Case,
)

BUDGET_VERSION = 5  # another number when what `--memory-budget` does changes: its results are made anew
UNIFORM_DIMS = (1, 2, 4, 8, 16)
HASHED_DIMS = (2, 4, 8, 16, 32)
KEPT_COLUMNS = (8, 16)
PIECES = (2, 4)
# Counts of accesses are one a row, so that only other ratios for later pieces make a difference among them.
RATIOS = {"gradient": "adaptive", "access": "linear"}

Shares = Sequence[float]


def uniform(shares: Shares) -> list[Case]:
    """All rows whole, and narrower; whatever they take."""
    return [Case(UNPRUNED), *(Case(UNIFORM, dim=dim) for dim in UNIFORM_DIMS)]


def hashing(shares: Shares) -> list[Case]:
    """Ids hashed into as many rows of each size as there is room for."""
    return [Case(HASHING, dim=dim, share=share) for share in shares for dim in HASHED_DIMS]


def mixed(shares: Shares) -> list[Case]:
    """Tables of less popular rows narrower."""
    return [Case(MIXED, share=share) for share in shares]


def adaembed(shares: Shares) -> list[Case]:
    """Whole rows pruned."""
    return [
        Case(ADAEMBED, chunks=1, ratios=ratios, utility=utility, share=share)
        for share in shares
        for utility, ratios in RATIOS.items()
    ]


def fiited(shares: Shares) -> list[Case]:
    """Pieces of rows pruned."""
    return [
        Case(FIITED, chunks=chunks, ratios=ratios, utility=utility, share=share)
        for share in shares
        for utility, ratios in RATIOS.items()
        for chunks in PIECES
    ]


def fiited_2d(shares: Shares) -> list[Case]:
    """Columns pruned, then pieces of rows."""
    return [
        Case(TWO_DIMENSIONS, chunks=2, ratios=ratios, utility=utility, dim=dim, share=share)
        for share in shares
        for utility, ratios in RATIOS.items()
        for dim in KEPT_COLUMNS
    ]


def budget(shares: Shares) -> list[Case]:
    """Rowhaul's own, as `rowhaul train --memory-budget` does it."""
    return [Case(BUDGET, share=share, version=BUDGET_VERSION) for share in shares]


OURS = "budget"
FAMILIES: dict[str, Callable[[Shares], list[Case]]] = {
    "uniform": uniform,
    "hashing": hashing,
    "adaembed": adaembed,
    "fiited": fiited,
    "fiited-2d": fiited_2d,
    "mixed": mixed,
    OURS: budget,
}
TITLES = {
    "uniform": "smaller rows",
    "hashing": "hashing",
    "adaembed": "AdaEmbed",
    "fiited": "FIITED",
    "fiited-2d": "FIITED 2-D",
    "mixed": "mixed dimensions",
    OURS: "--memory-budget",
}
_FAMILY_OF = {
    UNPRUNED: "uniform",
    UNIFORM: "uniform",
    HASHING: "hashing",
    ADAEMBED: "adaembed",
    FIITED: "fiited",
    TWO_DIMENSIONS: "fiited-2d",
    MIXED: "mixed",
    BUDGET: OURS,
}


def family_of(case: Case) -> str:
    """The family of a case."""
    return _FAMILY_OF[case.method]


def name_of(case: Case) -> str:
    """A case in a table, beside a budget."""
    by = "accesses" if case.utility == "access" else "gradients"
    return {
        UNPRUNED: "unpruned",
        UNIFORM: f"rows of {case.dim}",
        HASHING: f"hashing, rows of {case.dim}",
        ADAEMBED: f"AdaEmbed, by {by}",
        FIITED: f"FIITED, {case.chunks} pieces by {by}",
        TWO_DIMENSIONS: f"FIITED 2-D, {case.dim} columns by {by}",
        MIXED: "mixed dimensions",
        BUDGET: "--memory-budget",
    }[case.method]
