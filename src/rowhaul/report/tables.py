"""The tables of a run's page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from rowhaul._quantities import bytes_text, seconds_text
from rowhaul.explain.advice import advise
from rowhaul.explain.findings import CONTROL, DENSE, KIND_TITLES, PARTS, REASON_TITLES, Findings, Moved
from rowhaul.explain.summary import shares_text

_MOST_LINES = 400  # of a table; the rest is summed up
_COSTLY = 5

Cells = Sequence[str]


def costly_tables(found: Findings) -> str:
    """The five tables that cost most, with why their rows move."""
    lines = []
    for table, moved in found.tables_by_cost[:_COSTLY]:
        why: dict[str, float] = {}
        for (other, _, reason), part in found.by_table.items():
            if other == table:
                why[reason] = why.get(reason, 0.0) + part.num_bytes
        reasons = shares_text({REASON_TITLES[name]: num_bytes for name, num_bytes in why.items()})
        share = moved.num_bytes / found.row_bytes if found.row_bytes else 0.0
        lines.append([found.tables[table], *_cells(moved), f"{share:.1%}", _Bar(share), reasons])
    return _table(
        ["table", "rows", "bytes", "seconds", "of all rows", "", "why"], lines, 1, last_is_text=True
    )


def by_link(found: Findings) -> str:
    """Everything that each link carried, by kind and reason."""
    lines = [
        [
            f"{found.roles[source]} → {found.roles[target]}",
            KIND_TITLES[kind],
            _why(kind, reason),
            *_cells(moved),
        ]
        for (source, target, kind, reason), moved in sorted(
            found.by_link.items(), key=lambda one: (one[0][:2], -one[1].num_bytes)
        )
    ]
    return _table(["link", "kind", "why", "rows", "bytes", "seconds"], lines, 3)


def links_in_all(found: Findings) -> str:
    """What each link carried in all."""
    totals: dict[tuple[int, int], list[float]] = {}  # bytes of rows, of the dense sum, of control
    for (source, target, kind, _), moved in found.by_link.items():
        cell = totals.setdefault((source, target), [0.0, 0.0, 0.0])
        cell[{DENSE: 1, CONTROL: 2}.get(kind, 0)] += moved.num_bytes
    most = max((sum(one) for one in totals.values()), default=1.0) or 1.0
    hosts = found.detail["hosts"]
    lines = []
    for (source, target), (rows, dense, control) in sorted(totals.items()):
        total = rows + dense + control
        name = f"{found.roles[source]} → {found.roles[target]}"
        where = "within a host" if hosts[source] == hosts[target] else "network"
        seconds = seconds_text(found.link_seconds.get((source, target), 0.0))
        cells = [bytes_text(one) for one in (rows, dense, control, total)]
        lines.append([name, where, *cells, _Bar(total / most), seconds])
    return _table(["link", "", "rows", "dense sum", "control", "all", "", "waited for its rows"], lines, 2)


def by_table(found: Findings) -> str:
    """Rows moved by table, kind and reason."""
    lines = [
        [found.tables[table], KIND_TITLES[kind], REASON_TITLES[reason], *_cells(moved)]
        for (table, kind, reason), moved in found.by_table.items()
    ]
    return _table(["table", "kind", "why", "rows", "bytes", "seconds"], lines, 3)


def by_reason(found: Findings) -> str:
    """Rows moved by kind and reason."""
    totals: dict[tuple[str, str], list[float]] = {}
    for (_, kind, reason), moved in found.by_table.items():
        cell = totals.setdefault((kind, reason), [0.0, 0.0, 0.0])
        for at, value in enumerate((moved.rows, moved.num_bytes, moved.seconds)):
            cell[at] += value
    most = sum(one[1] for one in totals.values()) or 1.0
    lines = [
        [
            KIND_TITLES[kind],
            REASON_TITLES[reason],
            *_cells(Moved(*cell)),
            f"{cell[1] / most:.1%}",
            _Bar(cell[1] / most),
        ]
        for (kind, reason), cell in sorted(totals.items(), key=lambda one: -one[1][1])
    ]
    return _table(["kind", "why", "rows", "bytes", "seconds", "of all rows", ""], lines, 2)


def waits(found: Findings) -> str:
    """Who waited for whom: seconds an iteration of each worker's training."""
    peers = sorted({peer for _, peer in found.waits}, key=lambda peer: -found.waited_for(peer))[:12]
    titles = [
        "",
        *(title for title in PARTS.values()),
        *(f"of which rows of {found.roles[one]}" for one in peers),
    ]
    lines = []
    for rank, seconds in enumerate(found.seconds):
        parts = [seconds_text(seconds[name]) for name in PARTS]
        role = found.roles[rank]
        if rank in found.left_out:
            role += f" (left out in {found.left_out[rank]:.0%} of iterations)"
        lines.append([role, *parts, *(seconds_text(found.waits.get((rank, peer), 0.0)) for peer in peers)])
    return _table(titles, lines, 1)


def advice(found: Findings) -> str:
    """What would help, with what each estimate rests on."""
    lines = "".join(
        f'<tr><td class="text">{escape(one.what)}</td><td class="wrap">{marked(one.text)}</td>'
        f'<td class="wrap">{marked(one.basis)}</td></tr>'
        for one in advise(found)
    )
    if not lines:
        return "<p>Nothing that was measured stands out.</p>"
    titles = '<th class="text">what</th><th class="text">estimate</th><th class="text">what it rests on</th>'
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def marked(text: str) -> str:
    """Return a sentence as HTML; what is in backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


class _Bar(str):
    """A cell that is a bar of this share."""

    share: float

    def __new__(cls, share: float) -> _Bar:
        made = super().__new__(cls, "")
        made.share = share
        return made


def _why(kind: str, reason: str) -> str:
    return REASON_TITLES[reason] if reason else KIND_TITLES[kind]


def _cells(moved: Moved) -> list[str]:
    """Rows, bytes and seconds; what is not measured, as seconds of the dense sum, is left blank."""
    rows = f"{moved.rows:,.1f}" if moved.rows >= 0.1 else f"{moved.rows:.1g}"
    return [
        rows if moved.rows else "",
        bytes_text(moved.num_bytes),
        seconds_text(moved.seconds) if moved.seconds else "",
    ]


def _table(titles: Cells, lines: Sequence[Cells], num_text: int, *, last_is_text: bool = False) -> str:
    def cell(tag: str, at: int, text: str) -> str:
        if isinstance(text, _Bar):
            return f'<td class="bar"><i style="width:{100 * min(1.0, text.share):.1f}%"></i></td>'
        is_text = at < num_text or (last_is_text and at == len(titles) - 1)
        kind = ' class="text"' if is_text else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", at, text) for at, text in enumerate(titles))
    body = "".join(
        f"<tr>{''.join(cell('td', at, text) for at, text in enumerate(line))}</tr>"
        for line in lines[:_MOST_LINES]
    )
    left_out = len(lines) - _MOST_LINES
    more = f'<p class="note">{left_out:,} more lines are in explain.jsonl.</p>' if left_out > 0 else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'
    )
