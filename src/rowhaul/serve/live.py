"""What the page of a server asks for: numbers of now, and samples of the last minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rowhaul.serve.metrics import ServeMetrics
from rowhaul.serve.row_file import FIELD
from rowhaul.serve.scorer import Scorer
from rowhaul.serve.traffic import EVERY_SECONDS, History, counts_of
from rowhaul.serve.training_file import read_windows


class LiveStats:
    """Collects what the page shows, in one process of a server."""

    def __init__(self, scorer: Scorer, metrics: ServeMetrics, clock: Callable[[], float] = time.time) -> None:
        self._scorer, self._metrics, self._clock = scorer, metrics, clock
        self.history = History(lambda: counts_of(metrics.collect()), self._served)

    def _served(self) -> tuple[int, float | None]:
        event = self._newest_event()
        return self._scorer.step, None if event is None else self._clock() - event

    def _newest_event(self) -> float | None:
        return None

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
        scorer, rows = self._scorer, self._scorer.folder.rows
        counts = counts_of(self._metrics.collect())
        return {
            "now": self._clock(),
            "model": scorer.folder.model,
            "step": scorer.step,
            "deltas": 0,
            "rows": int(rows.entries[:, FIELD["num_rows"]].sum()),
            "row_bytes": len(rows.data),
            "processes": counts.processes,
            "requests": counts.requests,
            "candidates": counts.candidates,
            "errors": counts.errors,
            "newest_event": self._newest_event(),
            "published_at": None,
            "windows": read_windows(scorer.folder.path),
            "samples": self.history.since(since),
        }
