"""The study in Markdown: a table a log, and what it says about when to prune. Only measured numbers."""

from __future__ import annotations

from collections.abc import Sequence

from memory_study.contenders import FAMILIES, OURS, TITLES, name_of
from memory_study.judging import Study, Verdict, auc, log_loss
from pruning_methods.logs import SOURCES
from pruning_methods.methods import UNIFORM, UNPRUNED, Case
from pruning_methods.tables import Estimate

PICTURE = "memory.png"
ENOUGH = 0.001  # AUC that a smaller dimension may lose and still be called enough: 0.1 points


def verdict_table(study: Study, verdicts: Sequence[Verdict]) -> str:
    """Rowhaul and the best contender at every budget, on the seeds that judge."""
    rows = []
    for one in verdicts:
        ours, best = one.ours, one.best
        cells = [percent(one.share)]
        cells += [study.change(ours).points(), percent(study.share(ours))] if ours else ["-", "-"]
        cells += (
            [name_of(best), study.change(best).points(), percent(study.share(best))] if best else ["-"] * 3
        )
        if ours and best:
            cells += [study.difference(ours, best, of).points() for of in (auc, log_loss)]
        else:
            cells += ["-", "-"]
        rows.append(cells)
    head = [
        "budget",
        "ours: AUC",
        "bytes",
        "best contender",
        "AUC",
        "bytes",
        "ours − best: AUC",
        "log loss, in 0.01",
    ]
    return markdown(head, rows)


def picking_table(study: Study, shares: Sequence[float]) -> str:
    """The best case of every family at every budget, on the seeds that pick."""
    rows = []
    for family in FAMILIES:
        if not study.cases(family):
            continue
        cells = [TITLES[family]]
        for share in shares:
            best = study.best(study.cases(family), share)
            if best is None:
                cells.append("-")
                continue
            detail = f" ({name_of(best)})" if family in ("uniform", "hashing") else ""
            cells.append(f"{points(study.change(best))}, {percent(study.share(best))}{detail}")
        rows.append(cells)
    return markdown(["", *(f"{percent(share)} of the bytes" for share in shares)], rows)


def dimension_table(studies: Sequence[Study]) -> str:
    """What rows of fewer values cost where nothing else is done."""
    dims = sorted({case.dim for study in studies for case in study.cases("uniform") if case.dim})
    rows = []
    for study in studies:
        cells = [SOURCES[study.data].title]
        for dim in dims:
            case = Case(UNIFORM, dim=dim)
            is_known = case in study.by_case
            cells.append(f"{points(study.change(case))}, {percent(study.share(case))}" if is_known else "-")
        rows.append(cells)
    return markdown(["", *(f"rows of {dim}" for dim in dims)], rows)


def opening(studies: Sequence[tuple[Study, Study, Sequence[Verdict]]]) -> str:
    """The beginning of docs/pruning.md: the frontier, whether a smaller dimension does, who is best below it.

    Args:
        studies: of each log, on picking seeds and on judging seeds, with the verdicts of the latter.
    """
    lines = [
        f"![AUC against the share of all bytes, by method](pictures/{PICTURE})",
        "",
        "Changes of AUC in points against rows of 32 that are all kept. Bytes are all that lead from a raw "
        "key to its row: values, optimizer state, index and what decides who is kept. Try a smaller "
        "dimension first:",
        "",
        dimension_table([picked for picked, _, _ in studies]),
        "",
    ]
    for picked, judged, found in studies:
        lines += [
            f"**{SOURCES[picked.data].title}.** {enough(picked)} {standing(judged, found)}".rstrip(),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def enough(study: Study) -> str:
    """The smallest dimension that loses no more than `ENOUGH`."""
    cases = [case for case in study.cases("uniform") if case.method != UNPRUNED]
    good = [case for case in cases if study.change(case).mean >= -ENOUGH]
    if not good:
        return f"No smaller dimension is enough: each loses more than {100 * ENOUGH:g} points."
    case = min(good, key=lambda one: one.dim)
    return (
        f"Rows of {case.dim} are enough: {points(study.change(case))} points with "
        f"{percent(study.share(case))} of the bytes."
    )


def standing(study: Study, verdicts: Sequence[Verdict]) -> str:
    """Where Rowhaul's budget is better, equal or worse than the best contender, by the 95 % bounds."""
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
    for one in verdicts:
        if one.ours is None or one.best is None:
            continue
        found = study.difference(one.ours, one.best)
        if not found.half < abs(found.mean):
            kinds["not told apart"].append(percent(one.share))
        else:
            kinds["better" if found.mean > 0 else "worse"].append(percent(one.share))
    said = [f"{kind} at {', '.join(shares)}" for kind, shares in kinds.items() if shares]
    return f"{TITLES[OURS]} against the best contender: {'; '.join(said)}." if said else ""


def percent(share: float) -> str:
    """A share with as many digits as matter."""
    return f"{100 * share:.3g} %"


def points(estimate: Estimate) -> str:
    """A mean in percentage points, with a bound where there is one."""
    return f"{100 * estimate.mean:+.2f}" if estimate.half != estimate.half else estimate.points()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
