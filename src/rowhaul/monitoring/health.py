"""Whether a run is well: it makes progress, and no rank is lost."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from rowhaul.monitoring.monitor import FINISHED
from rowhaul.monitoring.run_monitor import RunMonitor


@dataclass(frozen=True)
class Health:
    """An answer of /healthz."""

    status: str  # ok or failing
    reason: str  # why it is failing
    phase: str
    step: int
    seconds_since_progress: float
    limit_seconds: float

    @property
    def is_ok(self) -> bool:
        """Whether the run is well."""
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def check_health(monitor: RunMonitor, limit_seconds: float) -> Health:
    """Look at a run: a lost rank, or no progress for longer than the limit, is a problem.

    Progress is a step, or the beginning or end of an evaluation or of a checkpoint.
    """
    seconds, phase, step = time.monotonic() - monitor.progressed_at, monitor.phase, monitor.step
    error, reason = monitor.error(), ""
    if error is not None:
        reason = f"{type(error).__name__}: {error}"
    elif seconds > limit_seconds and phase != FINISHED:
        reason = (
            f"no progress for {seconds:.0f} s while {phase}, after step {step:,}; at most {limit_seconds:g} s"
        )
    return Health("failing" if reason else "ok", reason, phase, step, round(seconds, 3), limit_seconds)
