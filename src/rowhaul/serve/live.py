"""What the page of a server asks for: numbers of now, and samples of the last minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rowhaul.serve.metrics import ServeMetrics
from rowhaul.serve.row_file import FIELD
from rowhaul.serve.scorer import Refreshed, Scorer
from rowhaul.serve.traffic import EVERY_SECONDS, History, counts_of
from rowhaul.serve.training_file import read_windows

_REAL_TIME = 1e9  # seconds since 1970: what is before is no time, but a number that a producer chose


class LiveStats:
    """Collects what the page shows, in one process of a server."""

    def __init__(self, scorer: Scorer, metrics: ServeMetrics, clock: Callable[[], float] = time.time) -> None:
        self._scorer, self._metrics, self._clock = scorer, metrics, clock
        self._num_deltas = scorer.model.num_deltas
        self.history = History(lambda: counts_of(metrics.collect()), self._served)

    def _served(self) -> tuple[int, float | None]:
        event = self._newest_event()
        return self._scorer.step, None if event is None else self._clock() - event

    def _newest_event(self) -> float | None:
        """Return when the newest event that is served happened; where that is not known, the publishing."""
        if (moment := self._scorer.model.moment) is None:
            return None
        event = moment.event_time
        return moment.published_at if event is None or event < _REAL_TIME else event

    def refreshed(self, found: Refreshed) -> None:
        """Count deltas that this process has applied."""
        self._num_deltas += found.num_deltas

    async def sample_on(self) -> None:
        """Take samples at full seconds that all processes have in common, until cancelled."""
        while True:
            now = self._clock()
            following = (int(now) // EVERY_SECONDS + 1) * EVERY_SECONDS
            await asyncio.sleep(following - now)
            with suppress(OSError, ValueError):  # the file of a process that has just ended
                self.history.sample(following)

    def answer(self, since: int) -> dict[str, Any]:
        """Return everything, with the samples after a time."""
        model = self._scorer.model
        rows, windows = model.folder.rows, read_windows(model.folder.path)
        counts = counts_of(self._metrics.collect())
        known = [one["num_rows"] for one in windows if one.get("num_rows") and model.moment is not None]
        return {
            "now": self._clock(),
            "model": model.folder.model,
            "step": model.step,
            "deltas": self._num_deltas,
            "rows": known[-1] if known else int(rows.entries[:, FIELD["num_rows"]].sum()),
            "changed_rows": model.rows.overlay.num_rows,
            "row_bytes": len(rows.data),
            "processes": counts.processes,
            "requests": counts.requests,
            "candidates": counts.candidates,
            "errors": counts.errors,
            "newest_event": self._newest_event(),
            "published_at": None if model.moment is None else model.moment.published_at,
            "windows": windows,
            "samples": self.history.since(since),
        }
