"""Requests a second and their times over the last minutes, for the page of a server.

Every process keeps samples of what all processes have counted together, taken at the same full seconds, so
that any of them can answer, and a page may join the answers of several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

EVERY_SECONDS = 2
KEPT_SECONDS = 15 * 60
_OVER = 5  # samples that a rate is measured over


@dataclass(frozen=True)
class Counts:
    """What was counted so far; ``buckets`` are requests by their longest time in seconds, each with those of
    the ones before."""

    requests: float = 0.0
    errors: float = 0.0
    candidates: float = 0.0
    processes: int = 1
    buckets: tuple[tuple[float, float], ...] = field(default=())


@dataclass(frozen=True)
class Traffic:
    """A sample: rates over the last seconds, times in milliseconds, None where nothing was asked."""

    time: int
    requests_per_second: float
    candidates_per_second: float
    errors_per_second: float
    p50_ms: float | None
    p99_ms: float | None
    step: int
    age_seconds: float | None  # of the newest event that the served model has learned from


def counts_of(families: Iterable[Any]) -> Counts:
    """Read counts from metrics as prometheus-client collects them."""
    by_name: dict[str, list[Any]] = {}
    for family in families:
        for one in family.samples:
            by_name.setdefault(one.name.removeprefix("rowhaul_serve_"), []).append(one)
    answered = by_name.get("requests_total", [])
    return Counts(
        requests=sum(one.value for one in answered),
        errors=sum(one.value for one in answered if not one.labels["status"].startswith("2")),
        candidates=sum(one.value for one in by_name.get("candidates_total", [])),
        processes=int(sum(one.value for one in by_name.get("processes", []))),
        buckets=tuple(
            sorted((float(one.labels["le"]), one.value) for one in by_name.get("request_seconds_bucket", []))
        ),
    )


def quantile_seconds(before: Counts, after: Counts, share: float) -> float | None:
    """Return the time that a share of the requests between two counts took at most.

    Within a bucket requests are taken to be spread evenly, as Prometheus does.
    """
    earlier = dict(before.buckets)
    found = [(edge, count - earlier.get(edge, 0.0)) for edge, count in after.buckets]
    total = found[-1][1] if found else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for edge, count in found:
        if count >= share * total:
            if edge == float("inf"):
                return low  # longer than the largest bucket
            return low + (edge - low) * (share * total - below) / (count - below)
        low, below = edge, count
    return low


class History:
    """Samples of the last minutes.

    Args:
        read: counts of all processes.
        served: the step of the model that is served, and the age of its newest event.
    """

    def __init__(self, read: Callable[[], Counts], served: Callable[[], tuple[int, float | None]]) -> None:
        self._read, self._served = read, served
        self._raw: deque[tuple[int, Counts]] = deque(maxlen=_OVER + 1)
        self._samples: deque[Traffic] = deque(maxlen=KEPT_SECONDS // EVERY_SECONDS)

    def sample(self, now: int) -> None:
        """Take a sample at a time in seconds."""
        after = self._read()
        self._raw.append((now, after))
        began, before = self._raw[0]
        seconds = max(now - began, 1)
        p50, p99 = (quantile_seconds(before, after, share) for share in (0.5, 0.99))
        step, age = self._served()
        # Counts of a process that was replaced stay, so differences are never below zero.
        self._samples.append(
            Traffic(
                now,
                (after.requests - before.requests) / seconds,
                (after.candidates - before.candidates) / seconds,
                (after.errors - before.errors) / seconds,
                None if p50 is None else 1000 * p50,
                None if p99 is None else 1000 * p99,
                step,
                age,
            )
        )

    def since(self, time: int) -> list[dict[str, Any]]:
        """Return the samples after a time."""
        return [asdict(one) for one in self._samples if one.time > time]
