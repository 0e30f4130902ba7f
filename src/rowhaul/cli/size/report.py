"""What `rowhaul size` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rowhaul.cli.console import bytes_text, console, plain_table, say

if TYPE_CHECKING:
    from rich.table import Table

    from rowhaul.sizing.card import CardSize
    from rowhaul.sizing.fit import Suggestion
    from rowhaul.sizing.ranks import RankSize
    from rowhaul.sizing.row_counts import RowCounts
    from rowhaul.sizing.sizing import Run, SizeEstimate

_NO_WAY = (
    "No single change is enough: take machines with more memory, or combine a smaller embedding_dim, a row "
    "optimizer with less state, fewer rows and more machines."
)

_TOO_SMALL = (
    "The bare process, Python with PyTorch, takes {} before it has any row, so no change of the model helps: "
    "take a machine with more memory, or give a larger --memory."
)


def numbers(
    run: Run, counts: RowCounts, estimate: SizeEstimate, memory: int, ways: list[Suggestion]
) -> dict[str, Any]:
    """All numbers, in bytes, for `--json`."""
    from rowhaul.sizing.row_counts import ERROR

    found: dict[str, Any] = {
        "fits": does_fit(estimate, memory),
        "needed": estimate.needed,
        "memory": memory,
        "tables": _with_totals(estimate.tables),
        "ranks": _with_totals(estimate.ranks),
        "machines": [
            {"ranks": list(ranks), "total": total}
            for ranks, total in zip(estimate.machines, estimate.machine_bytes, strict=True)
        ],
        "samples": {"trained": counts.samples, "read": counts.read, "extrapolated": counts.is_sample},
        "standard_error_of_rows": ERROR,
        "rows_seen": dict(run.rows),
        "suggestions": [asdict(way) for way in ways],
    }
    if estimate.card is not None:
        found["card"] = {**estimate.card.parts, "total": estimate.card.total}
    if (without := _without_pruning(run)) is not None:
        parts = {"tables": _with_totals(without.tables), "ranks": _with_totals(without.ranks)}
        found["without_pruning"] = {"needed": without.needed, **parts}
    return found


def does_fit(estimate: SizeEstimate, memory: int) -> bool:
    """Whether machines have the memory, and so has the card of this one, where it is for one."""
    return estimate.needed <= memory and _fits_card(estimate)


def _fits_card(estimate: SizeEstimate) -> bool:
    card = card_memory() if estimate.card is not None else None
    return estimate.card is None or card is None or estimate.card.total <= card


def _with_totals(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**asdict(one), "total": one.total} for one in parts]


def print_report(
    run: Run, counts: RowCounts, estimate: SizeEstimate, memory: int, ways: list[Suggestion]
) -> None:
    """Print tables, ranks, the verdict, and what would help."""
    without = _without_pruning(run)
    console.print(_tables(estimate, without), highlight=False)
    say(f"\n{_how_counted(counts)}")
    for line in _notes_on_rows(run):
        say(line)
    say("")
    console.print(_ranks(estimate, without), highlight=False)
    if note := _note_on_peak(estimate):
        say(f"\n{note}")
    if estimate.card is not None:
        say("")
        console.print(_card(estimate.card), highlight=False)
        if (card := card_memory()) is not None:
            fits = "it fits" if _fits_card(estimate) else "it does not fit: see --device-memory"
            say(f"\nThe card has {bytes_text(card)}: {fits}.")
    where = "It needs" if len(estimate.machines) == 1 else "The fullest machine needs"
    has = f"{bytes_text(estimate.needed)} of {bytes_text(memory)}"
    if estimate.needed <= memory:
        on_card = "it fits." if _fits_card(estimate) else "that fits, but what is on the card does not."
        say(f"\n{where} {has}: {on_card}")
        return
    bare = min(rank.parts["process"] for rank in estimate.ranks)
    no_way = _NO_WAY if bare <= memory else _TOO_SMALL.format(bytes_text(bare))
    say(f"\n{where} {has}: it does not fit. " + ("Any one of these changes is enough:" if ways else no_way))
    for way in ways:
        say(f"  {way.text} ({bytes_text(way.needed)})")


def _without_pruning(run: Run) -> SizeEstimate | None:
    """Estimate the same run with whole rows, where it has others."""
    return None if run.format.name == run.unpruned.format.name else run.unpruned.estimate()


def _tables(estimate: SizeEstimate, without: SizeEstimate | None) -> Table:
    """A line for each table, with a last column for its unpruned size if it is pruned."""
    more = ("unpruned",) if without is not None else ()
    table = plain_table("table", "rows", "dim", "values", "state", "index", "all", *more)
    unpruned = without.tables if without is not None else ()
    for number, one in enumerate(estimate.tables):
        sizes = [one.values, one.state, one.index, one.total, *(two.total for two in unpruned[number:][:1])]
        table.add_row(one.name, f"{one.rows:,}", str(one.dim), *map(bytes_text, sizes))
    if len(estimate.tables) > 1:
        names = ("values", "state", "index", "total")
        sums = [sum(getattr(one, name) for one in estimate.tables) for name in names]
        sums += [sum(one.total for one in unpruned)] if unpruned else []
        rows = f"{sum(one.rows for one in estimate.tables):,}"
        table.add_row("all", rows, "", *map(bytes_text, sums), style="bold")
    return table


def _notes_on_rows(run: Run) -> list[str]:
    """What pruning, policies and hot rows make of the rows, a sentence each."""
    lines = [note] if (note := run.row_estimate.note()) else []
    for name, one in run.kept.items():
        if one.why:
            lines.append(f"{name}: at most {one.rows:,} of {one.of:,} rows: {one.why}.")
    if run.config.cluster.workers and run.config.cluster.hot_is_auto:
        lines.append("Hot rows: counted at their upper limit, half of the cache.")
    return lines


def _how_counted(counts: RowCounts) -> str:
    from rowhaul.sizing.row_counts import ERROR

    accuracy = f"counted to about {2 * ERROR:.1%} (two standard errors)"
    if not counts.is_sample:
        return f"Distinct keys of {counts.samples:,} samples, {accuracy}."
    return (
        f"Extrapolated from the first {counts.read:,} of {counts.samples:,} samples, {accuracy}: for each "
        "table, its growth at their end continued as a power law. This errs on the high side; leave out "
        "--sample to count all."
    )


def _ranks(estimate: SizeEstimate, without: SizeEstimate | None) -> Table:
    """A column for each group of ranks that need the same."""
    alike: dict[tuple[Any, ...], list[RankSize]] = {}
    for rank in estimate.ranks:
        alike.setdefault((rank.role, *rank.parts.items()), []).append(rank)
    groups = list(alike.values())
    table = plain_table("at the peak", *(_title(group) for group in groups))
    names = list(dict.fromkeys(name for group in groups for name in group[0].parts))
    for name in names:
        cells = [group[0].parts.get(name) for group in groups]
        table.add_row(name, *("-" if cell is None else bytes_text(cell) for cell in cells))
    table.add_row("all", *(bytes_text(group[0].total) for group in groups), style="bold")
    if without is not None:
        totals = (without.ranks[group[0].rank].total for group in groups)
        table.add_row("unpruned", *map(bytes_text, totals))
    return table


def _note_on_peak(estimate: SizeEstimate) -> str:
    """Why one process takes more for its rows than the tables say, if it does."""
    if len(estimate.ranks) > 1:
        return ""
    parts, tables = estimate.ranks[0].parts, estimate.tables
    above = {"rows": sum(one.values + one.state for one in tables), "index": sum(one.index for one in tables)}
    larger = [name for name, size in above.items() if parts.get(name, 0) > 1.01 * size]
    if not larger:
        return ""
    return (
        f"At the peak there is more for {' and '.join(larger)} than in the first table: memory is taken in "
        "whole pieces, and with room to grow."
    )


def _card(card: CardSize) -> Table:
    """A line for each part of what is on the card."""
    table = plain_table("on the card", "bytes")
    for name, size in card.parts.items():
        table.add_row(name, bytes_text(size))
    table.add_row("all", bytes_text(card.total), style="bold")
    return table


def card_memory() -> int | None:
    """Bytes of the first card here, if there is one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _title(group: list[RankSize]) -> str:
    role = group[0].role
    if role == "the process":
        return role
    if len(group) == 1:
        return f"{role}, rank {group[0].rank}"
    return f"{role}, each of {len(group)}"
