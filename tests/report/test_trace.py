"""The trace follows the rules of the trace event format."""

import json

from explain_cases import explained

from rowhaul.report.trace import trace_events


def check_trace(trace):
    """Check the rules: complete events with numbers, named processes and threads, nested per thread."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named, events = set(), []
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in (
                *("process_name", "thread_name"),
                *("process_sort_index", "thread_sort_index"),
            )
            if event["name"].endswith("_name"):
                named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
            continue
        assert event["ph"] == "X"  # complete: no B needs an E
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        events.append(event)
    for event in events:
        assert (event["pid"], None) in named
        assert (event["pid"], event["tid"]) in named
    for thread in {(event["pid"], event["tid"]) for event in events}:
        around = []
        for event in (one for one in events if (one["pid"], one["tid"]) == thread):
            start, end = event["ts"], event["ts"] + event["dur"]
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], "events of a thread overlap without being nested"
            around.append(end)
    return events


def test_a_trace_is_valid_and_complete():
    timeline = explained(20).timeline(20)
    events = check_trace(json.loads(trace_events(timeline)))
    assert len(events) == len(timeline["spans"])
    assert {event["pid"] for event in events} == set(range(5))
    names = {event["name"] for event in events}
    assert {"compute", "wait for rows: store 1", "sum", "plan", "agree on the plan", "late rows"} <= names
    assert min(event["ts"] for event in events) == 0


def test_events_that_overlap_are_cut():
    timeline = {
        "roles": ["worker 0"],
        "hosts": ["a"],
        "spans": [
            [0, "rows", "late rows", 0.001, 0.003, 0, -1],
            [0, "rows", "wait for rows", 0.002, 0.004, 0, 0],  # reaches beyond, by a clock's error
            [0, "rows", "late rows", 0.004, 0.005, 1, -1],
        ],
    }
    events = check_trace(json.loads(trace_events(timeline)))
    assert [(one["ts"], one["dur"]) for one in events] == [(0, 2000), (1000, 1000), (3000, 1000)]
    assert events[1]["args"] == {"iteration": 0, "rank": "worker 0"}
