"""A run in a few lines, for a screen: where time and bytes go, who waits for whom, what would help."""

from __future__ import annotations

from rowhaul._quantities import bytes_text, seconds_text
from rowhaul.explain.advice import advise, one_machine_text
from rowhaul.explain.explain_file import Line
from rowhaul.explain.findings import PARTS, REASON_TITLES, Findings

_LEAST_SHARE = 0.01
_TABLES, _ADVICE = 5, 3  # shown

Facts = list[tuple[str, str]]


def summarise(detail: Line) -> Facts:
    """Return names and sentences, those that matter most first."""
    if "num_workers" not in detail:
        return summarise_alone(detail)
    found = Findings(detail)
    if not found.iteration_seconds:
        nothing = "nothing is measured yet: the first iterations, which may compile kernels, do not count"
        return [(f"step {detail['step']:,}", nothing)]
    facts = [
        (f"step {detail['step']:,}", time_text(found)),
        ("moved", moved_text(found)),
        ("rows, why", reasons_text(found)),
        ("waited for", waits_text(found)),
        ("left out", left_out_text(found)),
        ("tables", tables_text(found)),
        ("one machine", one_machine_text(found)),
    ]
    facts += [("would help", text) for text in advice_texts(found, _ADVICE)]
    return [(name, text) for name, text in facts if text]


def summarise_alone(detail: Line) -> Facts:
    """The same of a run in one process: no rows move."""
    return [(f"step {detail['step']:,}", parts_text(detail["seconds"]))]


def parts_text(seconds: dict[str, float]) -> str:
    """Say how long an iteration takes, and which share of it each part has."""
    whole = sum(seconds.values())
    parts = {PARTS[name]: value for name, value in seconds.items()}
    return f"{seconds_text(whole)} an iteration: {shares_text(parts)}"


def time_text(found: Findings) -> str:
    """Say where the time goes."""
    return parts_text(found.composition) if found.iteration_seconds else ""


def moved_text(found: Findings) -> str:
    """Say what the links carry."""
    parts = f"{bytes_text(found.row_bytes)} of rows"
    if found.dense_bytes:
        parts += f", {bytes_text(found.dense_bytes)} of dense gradients"
    if found.control_bytes:
        parts += f", {bytes_text(found.control_bytes)} of control"
    return f"{parts} an iteration; {found.hit_ratio:.1%} of look-ups hit the cache"


def shares_text(parts: dict[str, float]) -> str:
    """List parts of a whole, the largest first; tiny ones are left out."""
    whole = sum(parts.values())
    if not whole:
        return ""
    largest = sorted(parts.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {n / whole:.0%}" for name, n in largest if n >= _LEAST_SHARE * whole)


def reasons_text(found: Findings) -> str:
    """Say why rows move."""
    return shares_text({REASON_TITLES[name]: count for name, count in found.by_reason.items()})


def advice_texts(found: Findings, most: int) -> list[str]:
    """Return the best advice, besides that of `one_machine_text`."""
    return [one.text for one in advise(found) if one.what != "one machine"][:most]


def waits_text(found: Findings) -> str:
    """Name the ranks whose rows the others wait for, the most first."""
    ranks = sorted(range(len(found.roles)), key=lambda rank: -found.waited_for(rank))
    least = _LEAST_SHARE * found.iteration_seconds
    worst = [one for one in ranks if 0 < found.waited_for(one) >= least][:3]
    return ", ".join(
        f"{found.roles[one]}: {seconds_text(found.waited_for(one))} an iteration" for one in worst
    )


def left_out_text(found: Findings) -> str:
    """Name the workers without a share: what they wait for is no part of the other times."""
    return ", ".join(
        f"{found.roles[one]} in {part:.0%} of iterations" for one, part in found.left_out.items()
    )


def tables_text(found: Findings) -> str:
    """Name the tables that move most."""
    return ", ".join(
        f"{found.tables[table]} {bytes_text(moved.num_bytes)}"
        for table, moved in found.tables_by_cost[:_TABLES]
    )
