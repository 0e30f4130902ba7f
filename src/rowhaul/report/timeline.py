"""One iteration as a profiler shows it: a row for each thread of each rank, drawn as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rowhaul._quantities import seconds_text
from rowhaul.explain import spans
from rowhaul.explain.explain_file import Line

_CLASSES = {
    spans.COMPUTE: "compute",
    spans.WAIT_DENSE: "wait",
    spans.WAIT_ROWS: "wait",
    spans.WAIT_PLAN: "idle",
    spans.WAIT_TRAINING: "idle",
    spans.WAIT_DATA: "wait",
    spans.AGREE: "agree",
    spans.PLAN: "plan",
    spans.READ: "data",
    spans.SUM: "dense",
}
_LEGEND = {
    "compute": "compute",
    "rows": "moving rows, by phase",
    "dense": "dense sum",
    "plan": "planning",
    "agree": "agreeing on a plan",
    "data": "reading data",
    "wait": "waiting for another rank or for data",
    "idle": "idle until there is a plan, or until training is done",
}
_MOST_RANKS = 8
_LEFT, _WIDTH, _LANE, _GAP, _TOP = 150, 1000, 16, 10, 26  # pixels


def chosen_ranks(timeline: Line) -> list[int]:
    """Return the ranks to draw: all, or rank 0 and those that wait longest."""
    count = len(timeline["roles"])
    if count <= _MOST_RANKS:
        return list(range(count))
    waited = dict.fromkeys(range(count), 0.0)
    for rank, lane, name, began, ended, *_ in timeline["spans"]:
        if lane == spans.TRAINING and name in (spans.WAIT_ROWS, spans.WAIT_DENSE):
            waited[rank] += ended - began
    longest = sorted(range(1, count), key=lambda rank: -waited[rank])[: _MOST_RANKS - 1]
    return [0, *sorted(longest)]


def draw(timeline: Line) -> str:
    """Draw the last iteration of a timeline."""
    begin, end = timeline["boundaries"][-2:]
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    body, top = [], _TOP
    for rank in chosen_ranks(timeline):
        drawn = [one for one in timeline["spans"] if one[0] == rank and one[4] > begin and one[3] < end]
        lanes = [lane for lane in spans.LANES if any(one[1] == lane for one in drawn)]
        if not lanes:
            continue
        middle = top + _LANE * len(lanes) / 2 + 4
        body.append(f'<text x="0" y="{middle:.0f}" class="rank">{escape(timeline["roles"][rank])}</text>')
        for lane in lanes:
            body.append(f'<text x="{_LEFT - 8}" y="{top + 12}" class="lane">{escape(lane)}</text>')
            body.append(
                f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{_LANE - 3}" class="row"/>'
            )
            mine = sorted((one for one in drawn if one[1] == lane), key=lambda one: (one[3], -one[4]))
            body += [_bar(one, begin, end, scale, top, timeline["roles"]) for one in mine]
            top += _LANE
        top += _GAP
    axis = _axis(end - begin, scale, top)
    number = timeline["iterations"][-1]
    title = f"iteration {number:,}: {seconds_text(end - begin)}"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {top + 4}" role="img" aria-label="{title}">'
        f"<title>{title}</title>{axis}{''.join(body)}</svg>{_legend()}"
    )


def _bar(span: Sequence[Any], begin: float, end: float, scale: float, top: int, roles: Sequence[str]) -> str:
    _, _, name, began, ended, iteration, peer = span
    left, right = max(began, begin), min(ended, end)
    kind = _CLASSES.get(name, "rows")
    is_wait = kind in ("wait", "idle") and peer >= 0
    title = f"{name}: {roles[peer]}" if peer >= 0 else name
    if iteration >= 0:
        title += f", iteration {iteration:,}"
    inset = 3 if is_wait else 0
    return (
        f'<rect x="{_LEFT + (left - begin) * scale:.2f}" y="{top + inset}" '
        f'width="{max((right - left) * scale, 0.6):.2f}" height="{_LANE - 3 - 2 * inset}" class="{kind}">'
        f"<title>{escape(title)}: {seconds_text(ended - began)}</title></rect>"
    )


def _axis(seconds: float, scale: float, bottom: int) -> str:
    """Draw a line and a label at round times."""
    step = 10.0**-6
    while seconds / step > 8:
        step *= 2.5 if f"{step:.0e}".startswith("2") else 2
    marks = []
    for number in range(int(seconds / step) + 1):
        at = _LEFT + number * step * scale
        marks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{bottom}" class="grid"/>')
        marks.append(f'<text x="{at:.1f}" y="{_TOP - 10}" class="tick">{number * step * 1e3:g} ms</text>')
    return "".join(marks)


def _legend() -> str:
    parts = (f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in _LEGEND.items())
    return f'<p class="legend">{"".join(parts)}</p>'
