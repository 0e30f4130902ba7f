"""What one rank reports to rank 0 now and then: its seconds, its waits, its bytes, perhaps its spans.

All numbers count from the start of the process, so a report that is missed loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rowhaul.explain.spans import Recorder, Span

_MOST_SPANS = 600  # in a report; the longest
_SAME_CLOCK = 0.25  # seconds


@dataclass(frozen=True)
class RankReport:
    """The numbers of one rank so far."""

    iterations: int  # that its seconds are of
    left_out: int = 0  # iterations without a share, beside those: a worker takes no part in them
    seconds: dict[str, float] = field(default_factory=dict)  # of the training thread, by what it did
    waited: dict[int, float] = field(default_factory=dict)  # by training, for the rows of each rank
    received: dict[int, float] = field(default_factory=dict)  # by the moves thread, for the rows of each rank
    dense_bytes: dict[int, int] = field(default_factory=dict)  # sent to each rank, for the dense sum
    control_bytes: dict[int, int] = field(default_factory=dict)  # sent to each rank, for control
    agreed: dict[int, float] = field(default_factory=dict)  # by iteration: when all ranks agreed on it
    spans: list[Span] = field(default_factory=list)

    def pack(self) -> bytes:
        """Return the report as a message."""
        values = asdict(self)
        for name in ("seconds", "waited", "received", "agreed"):
            values[name] = {key: round(value, 6) for key, value in values[name].items()}
        values["spans"] = [
            (*span[:2], round(span.began, 6), round(span.ended, 6), *span[4:]) for span in self.spans
        ]
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, message: bytes) -> RankReport:
        """Read a message."""
        values: dict[str, Any] = json.loads(message)
        for name in ("waited", "received", "dense_bytes", "control_bytes", "agreed"):
            values[name] = {int(key): value for key, value in values[name].items()}
        values["spans"] = [Span(*one) for one in values["spans"]]
        return cls(**values)


def longest(spans: list[Span], most: int = _MOST_SPANS) -> list[Span]:
    """Return the longest spans, in order."""
    if len(spans) <= most:
        return spans
    least = sorted((span.ended - span.began for span in spans), reverse=True)[most - 1]
    return [span for span in spans if span.ended - span.began >= least][:most]


def seconds_of(recorder: Recorder) -> dict[str, float]:
    """Return where the training thread's time went, and beside that its processor time."""
    found = recorder.seconds
    step, dense, compute = found["step"], found["dense"], found["compute"]
    return {
        "compute": compute,
        "other": max(0.0, step - dense - compute),
        "dense": dense,
        "rows": sum(recorder.waited.values()),
        "plan": found["plan"],
        "data": found["data"],
        "moving": found["moving"],
        "cpu": found["cpu"],
    }


def clock_shift(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return what to add to another rank's times: all ranks learn of an agreement at about the same time.

    Clocks of two machines count from their boots; those that hardly differ are one clock.
    """
    both = mine.keys() & theirs.keys()
    shift = median(mine[one] - theirs[one] for one in both) if both else 0.0
    return shift if abs(shift) > _SAME_CLOCK else 0.0
