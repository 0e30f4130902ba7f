"""A run's timeline in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Ranks are processes, lanes are threads. All events are complete ("X"): a name, a start and a duration in
microseconds. Events of one thread are nested: one that reaches beyond the event around it is cut.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from rowhaul.explain.explain_file import Line
from rowhaul.explain.spans import LANES

Event = dict[str, Any]


def trace_events(timeline: Line) -> str:
    """Return a timeline as the text of a trace file."""
    lanes = {name: number for number, name in enumerate(LANES, 1)}
    roles, hosts = timeline["roles"], timeline["hosts"]
    events: list[Event] = []
    for rank, role in enumerate(roles):
        events.append(_metadata("process_name", rank, 0, {"name": f"{role} ({hosts[rank]})"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        used = {lane for one, lane, *_ in timeline["spans"] if one == rank}
        for name in (lane for lane in LANES if lane in used):
            events.append(_metadata("thread_name", rank, lanes[name], {"name": name}))
            events.append(_metadata("thread_sort_index", rank, lanes[name], {"sort_index": lanes[name]}))
    by_thread: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for rank, lane, name, began, ended, iteration, peer in timeline["spans"]:
        given: dict[str, Any] = {} if iteration < 0 else {"iteration": iteration}
        if peer >= 0:
            given["rank"] = roles[peer]
        start, end = round(began * 1e6), round(ended * 1e6)
        title = f"{name}: {roles[peer]}" if peer >= 0 else name
        event = {"name": title, "cat": lane, "ph": "X", "ts": start, "dur": end - start}
        by_thread[rank, lanes[lane]].append({**event, "pid": rank, "tid": lanes[lane], "args": given})
    first = min((one["ts"] for many in by_thread.values() for one in many), default=0)
    for many in by_thread.values():
        events += _nested(many, first)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _metadata(name: str, process: int, thread: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _nested(events: list[Event], first: int) -> list[Event]:
    """Sort the events of a thread, count time from ``first``, and cut those that overlap others."""
    around: list[int] = []  # ends of the events that the next one may lie in
    for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        start, end = one["ts"], one["ts"] + one["dur"]
        while around and around[-1] <= start:
            around.pop()
        end = min(end, around[-1]) if around else end
        around.append(end)
        one["ts"], one["dur"] = start - first, end - start
    return sorted(events, key=lambda one: (one["ts"], -one["dur"]))
