"""What came of the faults, as a table for docs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from testbed.chaos.campaign import Outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per kind of fault, in Markdown."""
    lines = [
        "| fault | thrown | as promised | what is promised | seconds to the end |",
        "|---|---|---|---|---|",
    ]
    for kind in sorted({one.fault for one in outcomes}, key=lambda kind: kind.name):
        some = [one for one in outcomes if one.fault is kind]
        kept = [one for one in some if not one.trouble]
        seconds = [one.seconds for one in kept if kind.ends_run]
        shown = f"{median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else ""
        lines.append(f"| {kind.name} | {len(some)} | {len(kept)} | {kind.promise} | {shown} |")
    return "\n".join(lines)
